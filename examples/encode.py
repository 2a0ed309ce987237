"""Sentence vectors and their similarity, without a server."""

from model.llm import LLM
from model.pretrained import embedded_models

llm = LLM(embedded_models()["embed"])
vectors = llm.encode(["a cat on a mat", "a kitten on a rug", "the price of copper"])
print((vectors @ vectors.T).round(2))  # vectors have length 1, so products are cosines
llm.close()
