"""LangChain's HuggingFaceEndpoint and ChatHuggingFace; its embeddings take names of the Hub alone."""

from features import HELLO, KEY, URL, expect, feature
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint


def endpoint(model: str, **given):
    """The client sends its token to the Hub alone; a server of one's own gets headers."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return HuggingFaceEndpoint(endpoint_url=f"{URL}/?model={model}", server_kwargs={"headers": headers}, **given)


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
