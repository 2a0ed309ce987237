"""Bad input gets the contract's error with its field, and the next good request is served."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import calling_app, chat_app, prompt_of
from tests.service.support import App, ask, check_accounts, make_app, run

LEAK = re.compile(r'0x[0-9a-f]{6,}|/(home|usr|app|opt|root|tmp|work)\b|File "|Traceback|pydantic|canary-key')
GOOD = {"model": "gen", "prompt": "ab", "max_tokens": 2}
G, E, T, D = "/generate", "/encode", "/tokenize", "/detokenize"


def gen(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def enc(**fields: Any) -> dict[str, Any]:
    return {"model": "enc", "input": "w1 w2", **fields}


SCHEMA = "response_format.json_schema.schema"


def formed(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


# route, body (bytes are sent as they are), status, param, code
BAD: list[tuple[str, Any, int, str | None, str]] = [
    (G, b"", 400, None, "invalid_json"),
    (G, b"{", 400, None, "invalid_json"),
    (G, b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    (G, b"[" * 5000, 400, None, "invalid_json"),
    (G, b"[]", 400, None, "invalid_type"),
    (G, b'"text"', 400, None, "invalid_type"),
    (G, b'{"prompt": "a", "temperature": NaN}', 400, None, ""),
    (G, b'{"prompt": "a", "temperature": Infinity}', 400, None, ""),
    (G, b'{"prompt": "a", "temperature": 1e999}', 400, None, ""),
    (G, b'{"prompt": "\\ud800"}', 400, None, "invalid_json"),
    (G, {"model": "gen"}, 400, "prompt", "missing_field"),
    (G, {"prompt": "a"}, 400, "model", "missing_field"),
    (G, gen(temprature=1), 400, "temprature", "unknown_field"),
    (G, gen(num_beams=9), 400, "num_beams", "invalid_value"),
    (G, gen(num_beams=0), 400, "num_beams", "invalid_value"),
    (G, gen(num_beams=2, n=3), 400, "n", "invalid_value"),
    (G, gen(num_beams=2, temperature=0.5), 400, "temperature", "invalid_value"),
    (G, gen(num_beams=2, stop="x"), 400, "stop", "invalid_value"),
    (G, gen(num_beams=2, logprobs=1), 400, "logprobs", "invalid_value"),
    (G, gen(length_penalty=2.0), 400, "length_penalty", "invalid_value"),
    (G, gen(early_stopping="soon"), 400, "early_stopping", "invalid_value"),
    (G, gen(typical_p=0.0), 400, "typical_p", "invalid_value"),
    (G, gen(no_repeat_ngram_size=-1), 400, "no_repeat_ngram_size", "invalid_value"),
    (G, gen(no_repeat_ngram_size=1.0), 400, "no_repeat_ngram_size", "invalid_type"),
    (G, gen(task="translation"), 400, "task", "invalid_value"),
    (G, gen(task=1), 400, "task", "invalid_type"),
    (G, gen(source_language="fr"), 400, "source_language", "invalid_value"),
    (G, gen(source_language="f" * 65), 400, "source_language", "invalid_value"),
    (G, gen(model="bare", prompt=[1], source_language="fr"), 400, "source_language", "no_tokenizer"),
    (G, gen(target_language="fr"), 400, "target_language", "invalid_value"),
    (G, gen(target_language=""), 400, "target_language", "invalid_value"),
    (G, gen(target_language="f" * 65), 400, "target_language", "invalid_value"),
    (G, gen(model="seq", target_language="xx"), 400, "target_language", "invalid_value"),
    (G, gen(model="bare", prompt=[1], target_language="fr"), 400, "target_language", "no_tokenizer"),
    (G, gen(model="nope"), 404, "model", "model_not_found"),
    (G, gen(model="x" * 5000), 404, "model", "model_not_found"),
    (G, gen(model="enc"), 400, "model", "wrong_task"),
    (G, gen(model=7), 400, "model", "invalid_type"),
    (G, gen(prompt=""), 400, "prompt", "invalid_value"),
    (G, gen(prompt=[]), 400, "prompt", "invalid_value"),
    (G, gen(prompt=["a", ""]), 400, "prompt[1]", "invalid_value"),
    (G, gen(prompt=[[1], []]), 400, "prompt[1]", "invalid_value"),
    (G, gen(prompt=7), 400, "prompt", "invalid_type"),
    (G, gen(prompt={}), 400, "prompt", "invalid_type"),
    (G, gen(prompt=None), 400, "prompt", "invalid_type"),
    (G, gen(prompt=[1, "a"]), 400, "prompt[1]", "invalid_type"),
    (G, gen(prompt=[True]), 400, "prompt[0]", "invalid_type"),
    (G, gen(prompt=[-1]), 400, "prompt[0]", "invalid_value"),
    (G, gen(prompt=[1, 300]), 400, "prompt[1]", "token_id_out_of_range"),
    (G, gen(prompt=[[1], [1, 1, 300]]), 400, "prompt[1][2]", "token_id_out_of_range"),
    (G, gen(prompt=[[1], [1, 2**70]]), 400, "prompt[1][1]", ""),
    (G, gen(prompt=["a"] * 33), 400, "prompt", "invalid_value"),
    (G, gen(prompt="a" * 1025), 400, "prompt", "context_length_exceeded"),
    (G, gen(prompt="a" * 62), 400, "max_tokens", "context_length_exceeded"),
    (G, gen(prompt="a" * 64), 400, "prompt", "context_length_exceeded"),
    (G, {"model": "gen", "prompt": [1] * 64}, 400, "prompt", "context_length_exceeded"),
    (G, gen(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (G, gen(max_tokens=True), 400, "max_tokens", "invalid_type"),
    (G, gen(max_tokens=1.5), 400, "max_tokens", "invalid_type"),
    (G, gen(max_tokens="2"), 400, "max_tokens", "invalid_type"),
    (G, gen(max_tokens=2**31), 400, "max_tokens", "invalid_value"),
    (G, gen(max_tokens=1000), 400, "max_tokens", "context_length_exceeded"),
    (G, gen(min_tokens=-1), 400, "min_tokens", "invalid_value"),
    (G, gen(min_tokens=3), 400, "min_tokens", "invalid_value"),
    (G, gen(temperature=-0.1), 400, "temperature", "invalid_value"),
    (G, gen(temperature=True), 400, "temperature", "invalid_type"),
    (G, gen(top_k=-1), 400, "top_k", "invalid_value"),
    (G, gen(top_p=0), 400, "top_p", "invalid_value"),
    (G, gen(top_p=1.1), 400, "top_p", "invalid_value"),
    (G, gen(min_p=2), 400, "min_p", "invalid_value"),
    (G, gen(seed=-1), 400, "seed", "invalid_value"),
    (G, gen(seed=2**63), 400, "seed", ""),
    (G, gen(n=0), 400, "n", "invalid_value"),
    (G, gen(n=9), 400, "n", "invalid_value"),
    (G, gen(n=None), 400, "n", "invalid_type"),
    (G, gen(stop=["a"] * 5), 400, "stop", "invalid_value"),
    (G, gen(stop=["a", "b", "c", ""]), 400, "stop[3]", "invalid_value"),
    (G, gen(stop=["a", "b" * 257]), 400, "stop[1]", "invalid_value"),
    (G, gen(stop=5), 400, "stop", "invalid_type"),
    (G, gen(stop_token_ids=[1] * 129), 400, "stop_token_ids", "invalid_value"),
    (G, gen(stop_token_ids=[300]), 400, "stop_token_ids[0]", "token_id_out_of_range"),
    (G, gen(logit_bias={str(i): 1 for i in range(301)}), 400, "logit_bias", "invalid_value"),
    (G, gen(logit_bias={"300": 1}), 400, "logit_bias.300", "token_id_out_of_range"),
    (G, gen(logit_bias={"a": 1}), 400, "logit_bias.a", "invalid_type"),
    (G, gen(logit_bias={"1": 101}), 400, "logit_bias.1", "invalid_value"),
    (G, gen(allowed_token_ids=[]), 400, "allowed_token_ids", "invalid_value"),
    (G, gen(allowed_token_ids=[1] * 301), 400, "allowed_token_ids", "invalid_value"),
    (G, gen(allowed_token_ids=[1, 300]), 400, "allowed_token_ids[1]", "token_id_out_of_range"),
    (G, gen(allowed_token_ids=[1], regex="a"), 400, "allowed_token_ids", "invalid_value"),
    (G, gen(suppress_tokens=[1] * 301), 400, "suppress_tokens", "invalid_value"),
    (G, gen(suppress_tokens=[300]), 400, "suppress_tokens[0]", "token_id_out_of_range"),
    (G, gen(suppress_tokens=["a"]), 400, "suppress_tokens[0]", "invalid_type"),
    (G, gen(suppress_tokens=[1, 2], allowed_token_ids=[2]), 400, "suppress_tokens", "invalid_value"),
    (G, gen(logprobs=21), 400, "logprobs", "invalid_value"),
    (G, gen(logprobs=-1), 400, "logprobs", "invalid_value"),
    (G, gen(prompt_logprobs=300), 400, "prompt_logprobs", "invalid_value"),
    (G, gen(response_format="json"), 400, "response_format", "invalid_type"),
    (G, gen(response_format={}), 400, "response_format.type", "missing_field"),
    (G, gen(response_format={"type": "xml"}), 400, "response_format.type", "invalid_value"),
    (G, gen(response_format={"type": "json_schema"}), 400, "response_format.json_schema", "missing_field"),
    (G, gen(response_format={"type": "json_schema", "json_schema": {}}), 400, SCHEMA, "missing_field"),
    (G, gen(response_format={"type": "json_object", "schema": {}}), 400, "response_format.schema", "unknown_field"),
    (G, gen(response_format=formed({}, stict=True)), 400, "response_format.json_schema.stict", "unknown_field"),
    (G, gen(response_format=formed({}) | {"type": "json_object"}), 400, "response_format.json_schema", "invalid_value"),
    (G, gen(response_format=formed([])), 400, SCHEMA, "invalid_type"),
    (G, gen(response_format=formed({"type": "canary-key"})), 400, SCHEMA, ""),
    (G, gen(response_format=formed({"uniqueItems": True})), 400, SCHEMA, "invalid_grammar"),
    (G, gen(response_format=formed({"enum": []})), 400, SCHEMA, "invalid_grammar"),
    (G, gen(response_format=formed({"$ref": "http://127.0.0.1/x"})), 400, SCHEMA, "invalid_grammar"),
    (G, gen(model="bare", prompt=[1], response_format=formed({})), 400, SCHEMA, "no_tokenizer"),
    (G, gen(model="bare", prompt=[1], response_format={"type": "json_object"}), 400, "response_format", "no_tokenizer"),
    (G, gen(regex=""), 400, "regex", "invalid_value"),
    (G, gen(regex=5), 400, "regex", "invalid_type"),
    (G, gen(regex="("), 400, "regex", "invalid_grammar"),
    (G, gen(regex="a\\"), 400, "regex", "invalid_grammar"),
    (G, gen(regex="(?=a)a"), 400, "regex", "invalid_grammar"),
    (G, gen(regex="(a)\\1"), 400, "regex", "invalid_grammar"),
    (G, gen(regex="()"), 400, "regex", "invalid_grammar"),
    (G, gen(regex="a" * 4097), 400, "regex", "invalid_value"),
    (G, gen(choice=[]), 400, "choice", "invalid_value"),
    (G, gen(choice=["a", ""]), 400, "choice[1]", "invalid_value"),
    (G, gen(choice="a"), 400, "choice", "invalid_type"),
    (G, gen(choice=["a"] * 1001), 400, "choice", "invalid_value"),
    (G, gen(choice=["a", "b" * 1025]), 400, "choice[1]", "invalid_value"),
    (G, gen(choice=["a"], regex="a"), 400, "choice", "invalid_value"),
    (G, gen(choice=["a"], response_format={"type": "json_object"}), 400, "choice", "invalid_value"),
    (G, gen(regex="a", ignore_eos=True), 400, "ignore_eos", "invalid_value"),
    (G, gen(regex="a", num_beams=2), 400, "num_beams", "invalid_value"),
    (G, gen(repetition_penalty=0), 400, "repetition_penalty", "invalid_value"),
    (G, gen(presence_penalty=3), 400, "presence_penalty", "invalid_value"),
    (G, gen(frequency_penalty=-3), 400, "frequency_penalty", "invalid_value"),
    (G, gen(stream=1), 400, "stream", "invalid_type"),
    (G, gen(timeout_s=0), 400, "timeout_s", "invalid_value"),
    (G, gen(timeout_s=601), 400, "timeout_s", "invalid_value"),
    (G, gen(priority=101), 400, "priority", "invalid_value"),
    (G, gen(priority=-1), 400, "priority", "invalid_value"),
    (G, gen(request_id="a b"), 400, "request_id", "invalid_value"),
    (G, gen(request_id="a\n"), 400, "request_id", "invalid_value"),
    (G, gen(request_id="a" * 129), 400, "request_id", "invalid_value"),
    (G, gen(decoder_prompt="a"), 400, "decoder_prompt", "invalid_value"),
    (G, gen(model="seq", decoder_prompt=[300]), 400, "decoder_prompt[0]", "token_id_out_of_range"),
    (G, gen(model="seq", prompt="a" * 48), 400, "prompt", "context_length_exceeded"),
    (G, gen(model="seq", prompt="a" * 40, max_tokens=60), 400, "prompt", "kv_cache_exceeded"),
    (G, gen(model="bare"), 400, "prompt", "no_tokenizer"),
    (G, gen(model="bare", prompt=[1], stop="a"), 400, "stop", "no_tokenizer"),
    (E, {"model": "enc"}, 400, "input", "missing_field"),
    (E, enc(input=""), 400, "input", "invalid_value"),
    (E, enc(input=[]), 400, "input", "invalid_value"),
    (E, enc(input=["w1", ""]), 400, "input[1]", "invalid_value"),
    (E, enc(input=[{"text": "w1", "txt_pair": "w2"}]), 400, "input[0].txt_pair", "unknown_field"),
    (E, enc(input=[{"text_pair": "w2"}]), 400, "input[0].text", "missing_field"),
    (E, enc(input=[{"image": "aaaa"}]), 400, "input[0]", "invalid_value"),
    (E, enc(input=[{"image": ""}]), 400, "input[0].image", "invalid_value"),
    (E, enc(input=[{"image": "aaaa", "text": "w1"}]), 400, "input[0].text", "unknown_field"),
    (E, enc(input=[{"image": 7}]), 400, "input[0].image", "invalid_type"),
    (E, enc(output="logits", pooling="cls"), 400, "pooling", "invalid_value"),
    (E, enc(output="logits", normalize=True), 400, "normalize", "invalid_value"),
    (E, enc(input="w1 " * 20), 400, "input", "context_length_exceeded"),
    (E, enc(input=[[1] * 11]), 400, "input[0]", "context_length_exceeded"),
    (E, enc(input=[[300]]), 400, "input[0][0]", "token_id_out_of_range"),
    (E, enc(input=["w1"] * 2049), 413, "input", "too_many_inputs"),
    (E, enc(output="logits"), 400, "output", "invalid_value"),
    (E, enc(pooling="median"), 400, "pooling", "invalid_value"),
    (E, enc(prompt_name="passage"), 400, "prompt_name", "invalid_value"),
    (E, enc(prompt_name="query", input=[[4, 5]]), 400, "prompt_name", "invalid_value"),
    (E, enc(prompt_name="query", input=[{"text": "w1", "text_pair": "w2"}]), 400, "prompt_name", "invalid_value"),
    (E, enc(prompt_name="query", truncate="left"), 400, "truncate", "invalid_value"),
    (E, enc(pooling="pooler"), 400, "pooling", "invalid_value"),
    (E, enc(pooling="cls", output="tokens"), 400, "pooling", "invalid_value"),
    (E, enc(dimensions=9), 400, "dimensions", "invalid_value"),
    (E, enc(dimensions=0), 400, "dimensions", "invalid_value"),
    (E, enc(truncate=True), 400, "truncate", "invalid_value"),
    (E, enc(encoding_format="hex"), 400, "encoding_format", "invalid_value"),
    (E, enc(normalize=1), 400, "normalize", "invalid_type"),
    (E, {"model": "gen", "input": [{"text": "a", "text_pair": "b"}]}, 400, "input[0].text_pair", "invalid_value"),
    (T, {"model": "gen"}, 400, "text", "missing_field"),
    (T, {"model": "gen", "text": "a" * 1025}, 400, "text", "context_length_exceeded"),
    (T, {"text": "a"}, 400, "model", "missing_field"),
    (T, {"model": "bare", "text": "a"}, 400, "model", "no_tokenizer"),
    (D, {"model": "gen", "token_ids": []}, 400, "token_ids", "invalid_value"),
    (D, {"model": "gen", "token_ids": [300]}, 400, "token_ids[0]", "token_id_out_of_range"),
    (D, {"model": "gen", "token_ids": [1] * 65}, 400, "token_ids", "invalid_value"),
]


def check_error(reply: httpx.Response, status: int, param: str | None = None, code: str = "") -> dict[str, Any]:
    """Check that the reply has the contract's shape and no internals."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert body.keys() - {"error_type"} == {"error"}  # the type is for clients of text-generation-inference
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert not LEAK.search(reply.text), reply.text
    assert len(reply.text) < 1500
    if code:
        assert (body["error"]["param"], body["error"]["code"]) == (param, code), reply.text
    error: dict[str, Any] = body["error"]
    return error


def test_table_of_bad_requests() -> None:
    app = make_app("bare")

    async def work(client: httpx.AsyncClient) -> None:
        for route, body, status, param, code in BAD:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = await client.post(route, content=raw, headers={"content-type": "application/json"})
            check_error(reply, status, param, code)
            good = await client.post(G, json=GOOD)
            assert good.status_code == 200, (route, body)
        assert len(app.client.submitted) == len(BAD)
        assert not app.client.encoded

    run(app, work)
    check_accounts(app)


@pytest.mark.parametrize("field", ["temperature", "top_k", "n", "max_tokens", "logprobs", "priority", "timeout_s"])
@pytest.mark.parametrize("value", ["-1000000000000", str(2**63), "1e400", "-1e400", "NaN", "[]", "{}", '"x"', "true"])
def test_numbers_out_of_bounds_reach_no_engine(app: App, field: str, value: str) -> None:
    raw = b'{"model": "gen", "prompt": "a", "%s": %s}' % (field.encode(), value.encode())
    headers = {"content-type": "application/json"}

    async def work(client: httpx.AsyncClient) -> None:
        check_error(await client.post(G, content=raw, headers=headers), 400)

    run(app, work)
    assert not app.client.submitted


def test_messages_help(app: App) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        async def message(route: str, body: dict[str, Any]) -> str:
            return str((await client.post(route, json=body)).json()["error"]["message"])

        assert "did you mean 'temperature'?" in await message(G, gen(temprature=1))
        assert "did you mean 'text_pair'?" in await message(E, enc(input=[{"text": "w1", "txt_pair": "w2"}]))
        assert await message(G, gen(prompt="a" * 30, max_tokens=40)) == (
            "this model's maximum context length is 64 tokens, but 31 prompt tokens + 40 max_tokens = 71"
        )
        assert "gen, seq" in await message(G, {"prompt": "a"})
        assert "seq" in await message(G, gen(model="enc"))
        several = await message(G, gen(n=0, top_p=2, seed=-1))
        assert all(name in several for name in ("n:", "top_p:", "seed:"))
        secret = await message(G, gen(prompt=["canary-key", 5]))
        assert "canary" not in secret

    run(app, work)


def test_wrong_routes_methods_and_types(app: App) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        check_error(await client.get("/nope"), 404, None, "not_found")
        check_error(await client.post("/generate/", json=GOOD), 404, None, "not_found")
        refused = await client.get(G)
        check_error(refused, 405, None, "method_not_allowed")
        assert refused.headers["allow"] == "POST"
        check_error(await client.request("OPTIONS", "/metrics"), 405, None, "method_not_allowed")
        check_error(await client.post(G, data={"prompt": "a"}), 415, None, "unsupported_media_type")
        check_error(await client.post(G, content=json.dumps(GOOD)), 415, None, "unsupported_media_type")
        check_error(await client.delete("/requests/unknown"), 404, "id", "request_not_found")
        check_error(await client.delete("/requests/" + "x" * 3000), 404, "id", "request_not_found")

    run(app, work)


def test_an_unexpected_error_of_a_route_is_a_500_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()

    def fails(*_: object) -> None:
        raise RuntimeError("a prompt")

    monkeypatch.setattr(app.service.models, "hold_loaded", fails)
    reply = ask(app, "POST", "/generate", json={"prompt": "a", "model": "gen"})
    check_error(reply, 500, None, "internal")
    assert "a prompt" not in reply.text


def _nested(levels: int) -> str:
    return '{"a":' * levels + "[0]" + "}" * levels


_TURN = '"model":"chat","max_tokens":1,"messages":[{"role":"user","content":"x"}'
_USE = '{"type":"tool_use","id":"a","name":"f","input":'


@pytest.mark.parametrize(
    ("route", "before", "after", "field"),
    [
        ("/v1/messages", f'{{{_TURN},{{"role":"assistant","content":[{_USE}', "}]}]}", "messages[1].content[0].input"),
        ("/v1/messages", f'{{{_TURN}],"tools":[{{"name":"f","input_schema":', "}]}", "tools[0].input_schema"),
        ("/v1/messages", f'{{{_TURN}],"metadata":', "}", "metadata"),
        ("/v1/messages", f'{{{_TURN}],"unknown":', "}", "unknown"),
        (
            "/v1/chat/completions",
            f'{{{_TURN}],"tools":[{{"type":"function","function":{{"name":"f","parameters":',
            "}}]}",
            "tools[0].function.parameters",
        ),
        ("/v1/responses", '{"model":"chat","input":[1,', "]}", "input[1]"),
        (
            "/generate",
            '{"model":"gen","inputs":"x","parameters":{"grammar":{"type":"json","value":',
            "}}}",
            "parameters",
        ),
        ("/generate", "[[3],", "]", None),
    ],
)
@pytest.mark.parametrize("levels", [200, 3_000])
def test_bodies_nested_too_deep_name_the_field(
    route: str, before: str, after: str, field: str | None, levels: int
) -> None:
    body = before + _nested(levels) + after
    reply = ask(chat_app(), "POST", route, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400
    name = "the body" if field is None else error["message"].partition(" ")[0]
    assert error["message"] == f"{name} has more than 200 levels of objects and lists", error
    assert field is None or name.startswith(field)
    if route != "/v1/messages":
        assert error["param"] == (None if field is None else name)


@pytest.mark.parametrize("levels", [180, 200, 300, 900, 3_000])
def test_arguments_nested_too_deep_stay_text(levels: int) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": _nested(levels)}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    app = calling_app(max_model_len=65_536)
    reply = ask(app, "POST", "/v1/chat/completions", json={"model": "chat", "messages": said, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    shown = _nested(levels).replace(":", ": ")
    assert (shown if levels < 190 else json.dumps(_nested(levels))) in prompt_of(app)
