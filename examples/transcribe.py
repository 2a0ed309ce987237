"""What is said in an audio file, without a server."""

from model.llm import LLM
from model.pretrained import CHECKPOINTS

llm = LLM(CHECKPOINTS / "speech")
print(llm.transcribe((CHECKPOINTS / "speech" / "sample.flac").read_bytes()).text)
llm.close()
