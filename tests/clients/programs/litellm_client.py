"""LiteLLM, by its OpenAI, Anthropic, Cohere and Hugging Face providers."""

import json

import litellm
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

litellm.telemetry = False
OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY}
VLLM = {"model": f"hosted_vllm/{CHAT}", **OPENAI}
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": WEATHER}]


@feature("chat")
def chat():
    reply = litellm.completion(model=f"openai/{CHAT}", messages=MESSAGES, temperature=0, **OPENAI)
    return expect(reply.choices[0].message.content, HELLO)


@feature("chat: hosted_vllm")
def vllm():
    return expect(litellm.completion(messages=MESSAGES, temperature=0, **VLLM).choices[0].message.content, HELLO)


@feature("chat: anthropic")
def anthropic():
    reply = litellm.completion(model=f"anthropic/{CHAT}", messages=MESSAGES, api_base=URL, api_key=KEY, max_tokens=100)
    return expect(reply.choices[0].message.content, HELLO)


@feature("chat: responses")
def responses():
    reply = litellm.responses(model=f"openai/{CHAT}", input="Hello", temperature=0, **OPENAI)
    return expect(reply.output[-1].content[0].text, HELLO)


@feature("stream")
def stream():
    chunks = litellm.completion(messages=MESSAGES, temperature=0, stream=True, **VLLM)
    return expect("".join(one.choices[0].delta.content or "" for one in chunks), HELLO)


@feature("stream: anthropic")
def stream_anthropic():
    given = {"api_base": URL, "api_key": KEY, "max_tokens": 100, "stream": True}
    chunks = litellm.completion(model=f"anthropic/{CHAT}", messages=MESSAGES, **given)
    return expect("".join(one.choices[0].delta.content or "" for one in chunks), HELLO)


@feature("tools")
def tools():
    messages = [{"role": "user", "content": ASKED}]
    first = litellm.completion(messages=messages, tools=TOOLS, temperature=0, **VLLM).choices[0].message
    [call] = first.tool_calls
    expect(json.loads(call.function.arguments), {"city": "Oslo"})
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = litellm.completion(messages=messages, tools=TOOLS, temperature=0, **VLLM)
    return expect(last.choices[0].message.content, ANSWER)


@feature("structured")
def structured():
    form = {"type": "json_schema", "json_schema": {"name": "stay", "schema": CITY, "strict": True}}
    reply = litellm.completion(messages=MESSAGES, response_format=form, max_tokens=100, **VLLM)
    return expect_city(reply.choices[0].message.content)


@feature("completion")
def completion():
    model = "text-completion-openai/normalize"
    reply = litellm.text_completion(model=model, prompt="they paid twelve dollars fifty", temperature=0, **OPENAI)
    return expect(reply.choices[0].text, "they paid $12.50")


@feature("embeddings")
def embeddings():
    found = litellm.embedding(model="openai/embed", input=TEXTS, **OPENAI)
    return expect_alike([one["embedding"] for one in found.data])


@feature("rerank")
def rerank():
    given = {"query": "café", "documents": ["import os", "a café"], "top_n": 1, "api_key": KEY}
    found = litellm.rerank(model="cohere/rank", api_base=f"{URL}/v2/rerank", **given)
    expect(len(found.results), 1)
    return expect(len(litellm.rerank(model="hosted_vllm/rank", api_base=URL, **given).results), 1)


@feature("audio")
def audio():
    with SAMPLE.open("rb") as file:
        return expect(litellm.transcription(model="openai/speech", file=file, **OPENAI).text, SAID)


@feature("other: the context's length is recognised")
def context():
    long = [{"role": "user", "content": "hello " * 5000}]
    return expect_error(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=long, **VLLM))
