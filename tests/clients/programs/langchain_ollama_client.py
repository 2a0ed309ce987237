"""LangChain's client of Ollama's API."""

from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, TEXTS, URL, WEATHER, expect, expect_alike, feature
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

KEYED = {"base_url": URL, "client_kwargs": {"headers": {"Authorization": f"Bearer {KEY}"}}}
model = ChatOllama(model=CHAT, temperature=0, num_ctx=4096, keep_alive="5m", validate_model_on_init=True, **KEYED)


@feature("chat")
def chat():
    reply = model.invoke("Hello")
    assert reply.usage_metadata["output_tokens"] > 3
    return expect(reply.content, HELLO)


@feature("chat: asynchronous")
async def asynchronous():
    return expect((await model.ainvoke("Hello")).content, HELLO)


@feature("stream")
def stream():
    return expect("".join(part.content for part in model.stream("Hello")), HELLO)


@feature("tools")
def tools():
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools([{"type": "function", "function": WEATHER}])
    said = bound.invoke([HumanMessage(ASKED)])
    [call] = said.tool_calls
    expect(call["args"], {"city": "Oslo"})
    result = ToolMessage(RESULT, tool_call_id=call["id"], name=call["name"])
    return expect(bound.invoke([HumanMessage(ASKED), said, result]).content, ANSWER)


@feature("structured")
def structured():
    import pydantic

    class Stay(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=20)
        days: int = pydantic.Field(ge=1, le=7)

    found = model.with_structured_output(Stay).invoke("Three days in Oslo, as JSON")
    assert isinstance(found, Stay)
    return found


@feature("completion")
def completion():
    found = OllamaLLM(model="code", num_predict=8, **KEYED).invoke("def add(a, b):")
    assert found
    return found


@feature("embeddings")
def embeddings():
    return expect_alike(OllamaEmbeddings(model="embed", **KEYED).embed_documents(TEXTS))
