"""What is said in an audio file, without a server."""

from pathlib import Path

from triptych import LLM

speech = Path("model/pretrained/checkpoints/speech")
with LLM(speech) as llm:
    print(llm.transcribe((speech / "sample.flac").read_bytes()).text)
