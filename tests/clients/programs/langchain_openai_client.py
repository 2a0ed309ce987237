"""LangChain's ChatOpenAI, OpenAI and OpenAIEmbeddings."""

import pydantic
from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, TEXTS, URL, expect, expect_alike, feature
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

GIVEN = {"base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0}
model = ChatOpenAI(model=CHAT, **GIVEN)


class Stay(pydantic.BaseModel):
    """A stay in a city."""

    city: str
    days: int


@tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    return RESULT


@feature("chat")
def chat():
    reply = model.invoke("Hello")
    assert reply.usage_metadata["output_tokens"] > 3
    return expect(reply.content, HELLO)


@feature("chat: batch and asynchronous")
async def batch():
    return expect([one.content for one in await model.abatch(["Hello"] * 4)], [HELLO] * 4)


@feature("chat: responses")
def responses():
    return expect(ChatOpenAI(model=CHAT, use_responses_api=True, **GIVEN).invoke("Hello").text, HELLO)


@feature("stream")
def stream():
    return expect("".join(one.content for one in model.stream("Hello", stream_usage=True)), HELLO)


@feature("tools")
def tools():
    bound = model.bind_tools([get_weather])
    asked = HumanMessage(ASKED)
    called = bound.invoke([asked])
    [call] = called.tool_calls
    expect(call["args"], {"city": "Oslo"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    return expect(bound.invoke([asked, called, result]).content, ANSWER)


@feature("structured")
def structured():
    for method in ("json_schema", "function_calling"):
        small = ChatOpenAI(model="chat", max_tokens=100, **GIVEN)
        found = small.with_structured_output(Stay, method=method).invoke("Three days in Oslo, as JSON")
        assert isinstance(found, Stay)
    return found


@feature("completion")
def completion():
    found = OpenAI(model="normalize", **GIVEN).invoke("they paid twelve dollars fifty")
    return expect(found, "they paid $12.50")


@feature("embeddings")
def embeddings():
    """Its check of lengths would fetch OpenAI's vocabulary, and sends token ids of it."""
    found = OpenAIEmbeddings(model="embed", base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False)
    expect(len(found.embed_documents(["a"] * 1000)), 1000)
    return expect_alike(found.embed_documents(TEXTS))
