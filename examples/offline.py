"""Continue a text with a decoder, and rewrite one with an encoder-decoder, without a server."""

from triptych import LLM

with LLM("code") as code:
    for _, output in code.stream("def add(a, b):", {"max_tokens": 16}):
        print(output.text, end="", flush=True)
print()

with LLM("normalize") as normalize:
    print(*normalize.generate("the third of may at five past nine", {"max_tokens": 32}))
