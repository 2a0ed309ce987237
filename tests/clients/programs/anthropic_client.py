"""Anthropic's client."""

import anthropic
from features import ANSWER, ASKED, CHAT, HELLO, KEY, RESULT, URL, WEATHER, expect, expect_error, feature

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}]


@feature("chat")
def chat():
    reply = client.messages.create(model=CHAT, max_tokens=100, messages=MESSAGES)
    expect(reply.stop_reason, "end_turn")
    return expect(reply.content[0].text, HELLO)


@feature("chat: asynchronous")
async def asynchronous():
    async with anthropic.AsyncAnthropic(base_url=URL, auth_token=KEY) as other:
        reply = await other.messages.create(model=CHAT, max_tokens=100, messages=MESSAGES)
    return expect(reply.content[0].text, HELLO)


@feature("stream")
def stream():
    with client.messages.stream(model=CHAT, max_tokens=100, messages=MESSAGES) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().usage.output_tokens > 3
    return expect(text, HELLO)


@feature("tools")
def tools():
    arguments = {"model": CHAT, "max_tokens": 100, "tools": TOOLS}
    first = client.messages.create(**arguments, messages=[{"role": "user", "content": ASKED}])
    expect(first.stop_reason, "tool_use")
    [use] = first.content
    expect(use.input, {"city": "Oslo"})
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT}]
    history = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    return expect(client.messages.create(**arguments, messages=history).content[0].text, ANSWER)


@feature("tools: its runner")
def runner():
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather."""
        return RESULT

    asked = [{"role": "user", "content": ASKED}]
    runs = client.beta.messages.tool_runner(model=CHAT, max_tokens=100, tools=[get_weather], messages=asked)
    return expect(runs.until_done().content[0].text, ANSWER)


@feature("structured")
def structured():
    import pydantic

    class Stay(pydantic.BaseModel):
        city: str
        days: int

    asked = [{"role": "user", "content": "Three days in Oslo, as JSON"}]
    reply = client.messages.parse(model="chat", max_tokens=100, messages=asked, output_format=Stay)
    assert isinstance(reply.parsed_output, Stay)
    return reply.parsed_output


@feature("other: count of tokens")
def count():
    found = client.messages.count_tokens(model=CHAT, messages=MESSAGES, tools=TOOLS).input_tokens
    assert found > 20
    return found


@feature("other: models")
def models():
    assert "assistant" in {one.id for one in client.models.list()}


@feature("other: errors")
def errors():
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0).messages
    arguments = {"model": CHAT, "max_tokens": 1, "messages": MESSAGES}
    return expect_error(anthropic.AuthenticationError, lambda: stranger.create(**arguments))
