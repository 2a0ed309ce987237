"""OpenAI's client."""

import json

import openai
from features import (
    ANSWER,
    ASKED,
    CHAT,
    CITY,
    HELLO,
    KEY,
    RESULT,
    SAID,
    SAMPLE,
    TEXTS,
    URL,
    WEATHER,
    expect,
    expect_alike,
    expect_city,
    expect_error,
    feature,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=3)
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": WEATHER}]


@feature("chat")
def chat():
    reply = client.chat.completions.create(model=CHAT, messages=MESSAGES, temperature=0)
    assert reply.usage.completion_tokens > 3 and reply.choices[0].finish_reason == "stop"
    return expect(reply.choices[0].message.content, HELLO)


@feature("chat: asynchronous")
async def asynchronous():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as other:
        reply = await other.chat.completions.create(model=CHAT, messages=MESSAGES, temperature=0, n=2)
    return expect([one.message.content for one in reply.choices], [HELLO] * 2)


@feature("chat: responses")
def responses():
    reply = client.responses.create(model=CHAT, input="Hello", temperature=0)
    return expect(reply.output_text, HELLO)


@feature("chat: stored responses")
def stored():
    reply = client.responses.create(model=CHAT, input="Hello", temperature=0)
    expect(client.responses.retrieve(reply.id).output_text, HELLO)
    client.responses.delete(reply.id)


@feature("stream")
def stream():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=CHAT, messages=MESSAGES, temperature=0, stream=True, stream_options=options
        )
    )
    assert chunks[-1].usage.completion_tokens > 3
    return expect("".join(one.choices[0].delta.content or "" for one in chunks[:-1]), HELLO)


@feature("stream: its helper")
def helper():
    with client.chat.completions.stream(model=CHAT, messages=MESSAGES, temperature=0) as events:
        for _ in events:
            pass
        return expect(events.get_final_completion().choices[0].message.content, HELLO)


@feature("stream: responses")
def stream_responses():
    with client.responses.stream(model=CHAT, input="Hello", temperature=0) as events:
        for _ in events:
            pass
        return expect(events.get_final_response().output_text, HELLO)


@feature("tools")
def tools():
    messages = [{"role": "user", "content": ASKED}]
    first = client.chat.completions.create(model=CHAT, messages=messages, tools=TOOLS, temperature=0).choices[0]
    expect(first.finish_reason, "tool_calls")
    [call] = first.message.tool_calls
    expect(json.loads(call.function.arguments), {"city": "Oslo"})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = client.chat.completions.create(model=CHAT, messages=messages, tools=TOOLS, temperature=0)
    return expect(last.choices[0].message.content, ANSWER)


@feature("tools: responses")
def tools_of_responses():
    tool = {"type": "function", "strict": False, **WEATHER}
    first = client.responses.create(model=CHAT, input=ASKED, tools=[tool], temperature=0)
    [call] = first.output
    expect((call.type, json.loads(call.arguments)), ("function_call", {"city": "Oslo"}))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    last = client.responses.create(
        model=CHAT, previous_response_id=first.id, input=[output], tools=[tool], temperature=0
    )
    return expect(last.output_text, ANSWER)


@feature("structured")
def structured():
    form = {"type": "json_schema", "json_schema": {"name": "stay", "schema": CITY, "strict": True}}
    reply = client.chat.completions.create(model=CHAT, messages=MESSAGES, response_format=form, max_tokens=100)
    return expect_city(reply.choices[0].message.content)


@feature("structured: parse")
def parse():
    import pydantic

    class Stay(pydantic.BaseModel):
        city: str
        days: int

    asked = [{"role": "user", "content": "Three days in Oslo, as JSON"}]
    reply = client.chat.completions.parse(
        model="chat", messages=asked, response_format=Stay, max_tokens=100, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Stay)
    other = client.responses.parse(model="chat", input=asked, text_format=Stay, max_output_tokens=100, temperature=0)
    assert isinstance(other.output_parsed, Stay)
    return reply.choices[0].message.parsed


@feature("completion")
def completion():
    reply = client.completions.create(model="normalize", prompt="the third of march twenty twenty four", temperature=0)
    return expect(reply.choices[0].text, "2024-03-03")


@feature("completion: stream")
def completion_stream():
    chunks = client.completions.create(
        model="code", prompt="def add(", max_tokens=8, temperature=0, stream=True, logprobs=1
    )
    text = "".join(one.choices[0].text for one in chunks)
    assert text
    return text


@feature("embeddings")
def embeddings():
    reply = client.embeddings.create(model="embed", input=TEXTS)
    assert reply.usage.total_tokens > 10
    return expect_alike([one.embedding for one in reply.data])


@feature("embeddings: 2,048 inputs")
def many():
    reply = client.embeddings.create(model="embed", input=["a"] * 2048)
    return expect(len(reply.data), 2048)


@feature("audio")
def audio():
    with SAMPLE.open("rb") as file:
        return expect(client.audio.transcriptions.create(model="speech", file=file).text, SAID)


@feature("audio: verbose, text and subtitles")
def formats():
    for form in ("verbose_json", "text", "srt", "vtt"):
        with SAMPLE.open("rb") as file:
            reply = client.audio.transcriptions.create(model="speech", file=file, response_format=form)
        assert SAID in (reply if isinstance(reply, str) else reply.text), reply


@feature("audio: stream")
def audio_stream():
    with SAMPLE.open("rb") as file:
        events = list(client.audio.transcriptions.create(model="speech", file=file, stream=True))
    return expect(events[-1].text, SAID)


@feature("other: models")
def models():
    names = {one.id for one in client.models.list()}
    assert {"assistant", "embed"} <= names
    return expect(client.models.retrieve("assistant").id, "assistant")


@feature("other: errors")
def errors():
    completions = client.chat.completions
    told = expect_error(openai.NotFoundError, lambda: completions.create(model="none-such", messages=MESSAGES))
    assert "none-such" in told
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    return expect_error(openai.AuthenticationError, stranger.models.list)
