"""LangChain's HuggingFaceEndpoint, ChatHuggingFace and HuggingFaceEndpointEmbeddings."""

from features import HELLO, KEY, TEXTS, URL, expect, expect_alike, feature
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint, HuggingFaceEndpointEmbeddings


def endpoint(model: str, **given):
    return HuggingFaceEndpoint(endpoint_url=f"{URL}/?model={model}", huggingfacehub_api_token=KEY, **given)


@feature("chat")
def chat():
    model = ChatHuggingFace(llm=endpoint("assistant", task="text-generation"), model_id="assistant", temperature=0)
    return expect(model.invoke("Hello").content, HELLO)


@feature("stream")
def stream():
    model = ChatHuggingFace(llm=endpoint("assistant", task="text-generation"), model_id="assistant", temperature=0)
    return expect("".join(one.content for one in model.stream("Hello")), HELLO)


@feature("completion")
def completion():
    return expect(endpoint("normalize", max_new_tokens=40).invoke("they paid twelve dollars fifty"), "they paid $12.50")


@feature("completion: stream")
def completion_stream():
    pieces = list(endpoint("code", max_new_tokens=8, do_sample=False).stream("def add("))
    assert len(pieces) > 1
    return "".join(pieces)


@feature("embeddings")
def embeddings():
    found = HuggingFaceEndpointEmbeddings(model=f"{URL}/embed?model=embed", huggingfacehub_api_token=KEY)
    return expect_alike(found.embed_documents(TEXTS))
