"""LangChain's ChatAnthropic."""

import pydantic
from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, URL, expect, feature
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

GIVEN = {"base_url": URL, "api_key": KEY, "max_tokens": 100}
model = ChatAnthropic(model=CHAT, **GIVEN)


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
    return expect(reply.text, HELLO)


@feature("chat: system message and stop texts")
def system():
    reply = model.invoke([SystemMessage("Be short."), HumanMessage("Hello")], stop=["can"])
    assert "can" not in reply.text
    return reply.text


@feature("stream")
def stream():
    return expect("".join(one.text for one in model.stream("Hello")), HELLO)


@feature("tools")
def tools():
    bound = model.bind_tools([get_weather])
    asked = HumanMessage(ASKED)
    called = bound.invoke([asked])
    [call] = called.tool_calls
    expect(call["args"], {"city": "Oslo"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    return expect(bound.invoke([asked, called, result]).text, ANSWER)


@feature("structured")
def structured():
    small = ChatAnthropic(model="chat", **GIVEN)
    for method in ("json_schema", "function_calling"):
        found = small.with_structured_output(Stay, method=method).invoke("Three days in Oslo, as JSON")
        assert isinstance(found, Stay)
    return found
