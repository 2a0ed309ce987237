"""Hugging Face's InferenceClient, with the service's URL as its model or as its base."""

import json

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
    feature,
)
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": WEATHER}]
client = InferenceClient(base_url=f"{URL}/v1", api_key=KEY)


def of(path: str) -> InferenceClient:
    return InferenceClient(model=URL + path, token=KEY)


@feature("chat")
def chat():
    reply = client.chat_completion(MESSAGES, model=CHAT, max_tokens=100, temperature=0)
    return expect(reply.choices[0].message.content, HELLO)


@feature("chat: model in the URL")
def chat_by_url():
    reply = of(f"/?model={CHAT}").chat_completion(MESSAGES, max_tokens=100, temperature=0)
    return expect(reply.choices[0].message.content, HELLO)


@feature("chat: asynchronous")
async def asynchronous():
    async with AsyncInferenceClient(base_url=URL, api_key=KEY) as other:
        reply = await other.chat.completions.create(model=CHAT, messages=MESSAGES, temperature=0)
    return expect(reply.choices[0].message.content, HELLO)


@feature("stream")
def stream():
    chunks = client.chat_completion(MESSAGES, model=CHAT, max_tokens=100, temperature=0, stream=True)
    return expect("".join(one.choices[0].delta.content or "" for one in chunks), HELLO)


@feature("tools")
def tools():
    messages = [{"role": "user", "content": ASKED}]
    first = client.chat_completion(messages, model=CHAT, tools=TOOLS, tool_choice="auto", temperature=0).choices[0]
    expect(first.finish_reason, "tool_calls")
    [call] = first.message.tool_calls
    arguments = call.function.arguments
    expect(json.loads(arguments) if isinstance(arguments, str) else arguments, {"city": "Oslo"})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = client.chat_completion(messages, model=CHAT, tools=TOOLS, temperature=0)
    return expect(last.choices[0].message.content, ANSWER)


@feature("structured")
def structured():
    form = {"type": "json_schema", "json_schema": {"name": "stay", "schema": CITY, "strict": True}}
    reply = client.chat_completion(MESSAGES, model=CHAT, response_format=form, max_tokens=100)
    return expect_city(reply.choices[0].message.content)


@feature("structured: grammar of text_generation")
def grammar():
    found = of("/?model=code").text_generation("x = ", grammar={"type": "json", "value": CITY}, max_new_tokens=100)
    return expect_city(found)


@feature("completion")
def completion():
    return expect(of("/?model=normalize").text_generation("they paid twelve dollars fifty"), "they paid $12.50")


@feature("completion: details")
def details():
    found = of("/?model=code").text_generation("def add(", max_new_tokens=5, details=True, decoder_input_details=False)
    return expect(found.details.generated_tokens, 5)


@feature("completion: stream")
def completion_stream():
    code = of("/?model=code")  # a client that is let go closes its streams
    chunks = list(code.text_generation("def add(", max_new_tokens=5, stream=True, details=True))
    expect(chunks[-1].details.generated_tokens, 5)
    return expect(chunks[-1].generated_text, "".join(one.token.text for one in chunks))


@feature("embeddings")
def embeddings():
    return expect_alike(of("/embed?model=embed").feature_extraction(TEXTS))


@feature("embeddings: similarity")
def similarity():
    found = of("/pipeline/sentence-similarity?model=embed").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    assert found[0] > found[1] + 0.2
    return found


@feature("audio")
def audio():
    found = of("/pipeline/automatic-speech-recognition?model=speech").automatic_speech_recognition(SAMPLE)
    return expect(found.text, SAID)


@feature("other: text_classification")
def classification():
    [found, *_] = of("/pipeline/text-classification?model=rank").text_classification("a cat on a mat")
    return found


@feature("other: translation")
def translation():
    """`normalize` is no translator: it knows no languages."""
    found = of("/pipeline/translation?model=normalize").translation("they paid twelve dollars fifty")
    return expect(found.translation_text, "they paid $12.50")


@feature("other: summarization")
def summarization():
    found = of("/pipeline/summarization?model=normalize").summarization("they paid twelve dollars fifty")
    return expect(found.summary_text, "they paid $12.50")


@feature("other: health_check and get_endpoint_info")
def health():
    other = InferenceClient(model=URL, token=KEY, provider="hf-inference")
    expect(other.health_check(), True)
    return other.get_endpoint_info()["version"]


@feature("other: errors")
def errors():
    try:
        InferenceClient(model=f"{URL}/embed", token="wrong").feature_extraction("a")
    except HfHubHTTPError as error:
        return expect(error.response.status_code, 401)
    raise AssertionError("no error")
