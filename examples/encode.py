"""Sentence vectors and their similarity, without a server."""

from triptych import LLM

with LLM("embed") as llm:
    vectors = llm.encode(["a cat on a mat", "a kitten on a rug", "the price of copper"])
print((vectors @ vectors.T).round(2))  # vectors have length 1, so products are cosines
