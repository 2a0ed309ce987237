"""Continue a text with a decoder, and rewrite one with an encoder-decoder, without a server."""

from model.api.request import SamplingParams
from model.llm import LLM
from model.pretrained import embedded_models

models = embedded_models()

code = LLM(models["code"])
for _, output in code.stream(["def add(a, b):"], SamplingParams(max_tokens=16)):
    print(output.text, end="", flush=True)
print()
code.close()

normalize = LLM(models["normalize"])
print(*normalize.generate(["the third of may at five past nine"], SamplingParams(max_tokens=32)))
normalize.close()
