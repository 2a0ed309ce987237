"""Continue a text with a decoder, and rewrite one with an encoder-decoder, without a server."""

from triptych import LLM, embedded_models

models = embedded_models()

with LLM(models["code"]) as code:
    for _, output in code.stream("def add(a, b):", {"max_tokens": 16}):
        print(output.text, end="", flush=True)
print()

with LLM(models["normalize"]) as normalize:
    print(*normalize.generate("the third of may at five past nine", {"max_tokens": 32}))
