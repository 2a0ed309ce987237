"""curl, which offers HTTP/2 by an upgrade, waits for 100 Continue, and sends bodies in chunks."""

import json
import subprocess

from features import CHAT, HELLO, KEY, SAID, SAMPLE, TEXTS, URL, expect, expect_alike, feature

OFFER = "--http2"
BODY = json.dumps({"model": CHAT, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0})
JSON = ("-H", "Content-Type: application/json")


def curl(path, *arguments, given=None):
    command = ["curl", "-sS", "-m", "60", OFFER, "-H", f"Authorization: Bearer {KEY}", *arguments, URL + path]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text_of(reply):
    return json.loads(reply)["choices"][0]["message"]["content"]


@feature("chat")
def chat():
    return expect(text_of(curl("/v1/chat/completions", *JSON, "-d", BODY)), HELLO)


@feature("chat: chunked")
def chunked():
    chunks = ("-H", "Transfer-Encoding: chunked", "--data-binary", "@-")
    return expect(text_of(curl("/v1/chat/completions", *JSON, *chunks, given=BODY)), HELLO)


@feature("chat: Expect: 100-continue")
def waits():
    waiting = ("-H", "Expect: 100-continue", "-d", BODY)
    return expect(text_of(curl("/v1/chat/completions", *JSON, *waiting)), HELLO)


@feature("chat: two requests on a connection")
def kept():
    command = ["curl", "-sS", "-m", "60", OFFER, "-H", f"Authorization: Bearer {KEY}", *JSON, "-d", BODY]
    command += ["-w", "\n%{num_connects}\n", *[f"{URL}/v1/chat/completions"] * 2]
    first, one, second, none = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    expect([text_of(first), text_of(second)], [HELLO] * 2)
    return expect((one, none), ("1", "0"))


@feature("stream")
def stream():
    body = json.dumps({**json.loads(BODY), "stream": True})
    lines = curl("/v1/chat/completions", "-N", *JSON, "-d", body).splitlines()
    events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    expect(lines[-2], "data: [DONE]")
    return expect("".join(one["choices"][0]["delta"].get("content") or "" for one in events), HELLO)


@feature("embeddings")
def embeddings():
    found = json.loads(curl("/v1/embeddings", *JSON, "-d", json.dumps({"model": "embed", "input": TEXTS})))
    return expect_alike([one["embedding"] for one in found["data"]])


@feature("audio")
def audio():
    found = curl("/v1/audio/transcriptions", "-F", f"file=@{SAMPLE}", "-F", "model=speech")
    return expect(json.loads(found)["text"], SAID)


@feature("other: HEAD")
def head():
    return expect(curl("/v1/models", "-I").split()[1], "200")
