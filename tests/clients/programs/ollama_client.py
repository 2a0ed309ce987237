"""Ollama's client."""

import ollama
from features import (
    ANSWER,
    ASKED,
    CHAT,
    CITY,
    HELLO,
    KEY,
    RESULT,
    TEXTS,
    URL,
    expect,
    expect_alike,
    expect_city,
    expect_error,
    feature,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=HEADERS)
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_ctx": 4096}


def get_weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: The city
    """
    return RESULT


@feature("chat")
def chat():
    reply = client.chat(CHAT, MESSAGES, options=GREEDY)
    assert reply.done and reply.eval_count > 3 and reply.prompt_eval_count > 3 and reply.total_duration > 0
    expect(reply.done_reason, "stop")
    return expect(reply.message.content, HELLO)


@feature("chat: by its tag, without thinking")
def tagged():
    reply = client.chat(f"{CHAT}:latest", MESSAGES, options=GREEDY, think=False, keep_alive="5m")
    expect(reply.model, f"{CHAT}:latest")
    return expect(reply["message"]["content"], HELLO)


@feature("chat: asynchronous")
async def asynchronous():
    other = ollama.AsyncClient(host=URL, headers=HEADERS)
    reply = await other.chat(CHAT, MESSAGES, options=GREEDY)
    return expect(reply.message.content, HELLO)


@feature("stream")
def stream():
    parts = list(client.chat(CHAT, MESSAGES, stream=True, options=GREEDY))
    assert len(parts) > 2 and [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
    return expect("".join(one.message.content for one in parts), HELLO)


@feature("stream: asynchronous")
async def stream_asynchronously():
    other = ollama.AsyncClient(host=URL, headers=HEADERS)
    parts = [one async for one in await other.chat(CHAT, MESSAGES, stream=True, options=GREEDY)]
    return expect("".join(one.message.content for one in parts), HELLO)


@feature("tools")
def tools():
    messages = [{"role": "user", "content": ASKED}]
    reply = client.chat(CHAT, messages, tools=[get_weather], options=GREEDY)
    [call] = reply.message.tool_calls
    expect((call.function.name, call.function.arguments), ("get_weather", {"city": "Oslo"}))
    result = get_weather(**call.function.arguments)
    messages += [reply.message, {"role": "tool", "content": result, "tool_name": call.function.name}]
    return expect(client.chat(CHAT, messages, tools=[get_weather], options=GREEDY).message.content, ANSWER)


@feature("tools: streamed")
def streamed_tools():
    asked = [{"role": "user", "content": ASKED}]
    parts = client.chat(CHAT, asked, tools=[get_weather], stream=True, options=GREEDY)
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    return expect(call.function.arguments, {"city": "Oslo"})


@feature("structured")
def structured():
    asked = [{"role": "user", "content": "Three days in Oslo, as JSON"}]
    reply = client.chat(CHAT, asked, format=CITY, options=GREEDY)
    return expect_city(reply.message.content)


@feature("completion")
def completion():
    reply = client.generate("code", "def add(a, b):\n", options={**GREEDY, "num_predict": 8, "stop": ["\n\n"]})
    assert reply.response and reply.context
    return reply.response


@feature("completion: streamed, by the chat template, and a context")
def prompts():
    parts = list(client.generate(CHAT, "Hello", stream=True, options=GREEDY))
    expect("".join(one.response for one in parts), HELLO)
    again = client.generate(CHAT, "Hello", context=parts[-1].context, options={**GREEDY, "num_predict": 8})
    assert again.prompt_eval_count > parts[-1].prompt_eval_count
    raw = client.generate("code", "x = ", raw=True, logprobs=True, top_logprobs=2, options={**GREEDY, "num_predict": 3})
    expect([len(one.top_logprobs) for one in raw.logprobs], [2, 2, 2])


@feature("other: decisions")
def decisions():
    questions = {
        "greets": {"type": "noul", "instructions": "It is a greeting."},
        "tone": {"type": "score", "instructions": "How friendly?", "criteria": ["rude", "polite", "warm"]},
        "who": {"type": "choice", "instructions": "Who writes?", "criteria": {"friend": None, "boss": "An order."}},
    }
    found = client.systemone(CHAT, {"text": "Hello"}, questions, keep_alive="5m")
    assert 0 < found.answers["greets"].noul < 1 and 0 < found.answers["tone"].score < 2 and found.usage.input_tokens
    return expect(sorted(found.answers["who"].probabilities), ["boss", "friend"])


@feature("embeddings")
def embeddings():
    return expect_alike(client.embed("embed", TEXTS).embeddings)


@feature("embeddings: of one text, and by the older route")
def older_embeddings():
    [one] = client.embed("embed", TEXTS[0], dimensions=64, truncate=True).embeddings
    expect(len(one), 64)
    return expect(len(client.embeddings("embed", TEXTS[0]).embedding), 384)


@feature("other: models")
def models():
    found = {one.model: one for one in client.list().models}
    assert found[f"{CHAT}:latest"].details.parameter_size and found[f"{CHAT}:latest"].size > 1000
    assert f"{CHAT}:latest" in {one.model for one in client.ps().models}
    shown = client.show(CHAT)
    assert {"completion", "tools"} <= set(shown.capabilities), shown.capabilities
    expect(client.show("embed").capabilities, ["embedding"])
    return shown.modelinfo


@feature("other: loading")
def loading():
    return expect(client.chat(CHAT, []).done_reason, "load")


@feature("other: errors")
def errors():
    def status(function):
        try:
            function()
        except ollama.ResponseError as error:
            return error.status_code
        return 200

    expect(status(lambda: client.chat("nothing", MESSAGES)), 404)
    expect(status(lambda: client.chat(CHAT, MESSAGES, think=True)), 400)
    expect(status(lambda: list(client.chat(CHAT, MESSAGES, stream=True, options={"temperature": -1}))), 400)
    expect(status(lambda: client.generate(CHAT, keep_alive=0)), 403)
    refused = (lambda: client.pull("llama3"), lambda: client.delete(CHAT), lambda: client.copy(CHAT, "other"))
    refused += (lambda: client.push(CHAT), lambda: client.create("mine", from_=CHAT))
    expect([status(one) for one in refused], [403] * 5)
    expect(status(lambda: ollama.Client(host=URL, headers={"Authorization": "Bearer x"}).list()), 401)
    return expect_error(ollama.ResponseError, refused[0])
