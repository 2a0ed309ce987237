"""Cohere's client."""

import cohere
from features import KEY, TEXTS, URL, expect, expect_alike, expect_error, feature

old = cohere.Client(api_key=KEY, base_url=URL) if hasattr(cohere, "Client") else None
new = cohere.ClientV2(api_key=KEY, base_url=URL)
DOCUMENTS = ["import os", "class Café:\n    price = '12 €'\n", "\nfor index in range(10):\n    print(index)\n"]


@feature("rerank")
def rerank():
    found = new.rerank(model="rank", query="café", documents=DOCUMENTS, top_n=2).results
    assert found[0].relevance_score >= found[1].relevance_score and len(found) == 2
    return [one.index for one in found]


@feature("rerank: version 1")
def rerank_1():
    found = old.rerank(model="rank", query="café", documents=DOCUMENTS, return_documents=True).results
    assert found[0].document.text in DOCUMENTS
    return expect(sorted(one.index for one in found), [0, 1, 2])


@feature("embeddings")
def embeddings():
    found = new.embed(model="embed", texts=TEXTS, input_type="search_document", embedding_types=["float", "int8"])
    assert len(found.embeddings.int8[0]) == 384
    return expect_alike(found.embeddings.float_)


@feature("embeddings: version 1")
def embeddings_1():
    return expect_alike(old.embed(model="embed", texts=TEXTS, input_type="search_query").embeddings)


@feature("other: errors")
def errors():
    stranger = cohere.ClientV2(api_key="wrong", base_url=URL)
    ask = lambda: stranger.rerank(model="rank", query="a", documents=["b"])  # noqa: E731
    return expect_error(cohere.errors.UnauthorizedError, ask)
