"""Requests that each dialect refuses: status, field and code; a good request right after each is served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import BRACKETS, chat_app, talker
from tests.service.speech import ids, saying, served_speech
from tests.service.support import (
    App,
    ask,
    check_accounts,
    events,
    make_app,
    run,
    samples,
    served,
    word_tokenizer,
)
from tests.service.test_bad_requests import check_error
from triptych.service.chat.render_pool import RenderPool
from triptych.service.planning.response_format import GrammarChecker
from triptych.service.planning.tokenization import TokenizerThreads
from triptych.service.settings.service_settings import Limits, ServiceSettings

C, M, V = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
G, E = "/generate", "/encode"
HELLO = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    C: {"model": "gen", "prompt": "ab", "max_tokens": 2},
    M: {"model": "chat", "messages": HELLO, "max_tokens": 2},
    V: {"model": "enc", "input": "w1"},
    "/": {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 2}},
    "/embed": {"model": "enc", "inputs": "w1"},
    G: {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 2}},
    E: {"model": "enc", "inputs": "w1"},
    "/rerank": {"query": "w1", "texts": ["w2"]},
    "/predict": {"inputs": "w1"},
}
_COMPARED = {"inputs": {"source_sentence": "w1", "sentences": ["w2"]}}
TASKS: dict[str, dict[str, Any]] = {
    "/embed_all": {"inputs": "w1"},
    "/embed_sparse": {"inputs": "w1"},
    "/similarity": _COMPARED,
    "/pipeline/sentence-similarity": _COMPARED,
    "/pipeline/feature-extraction": {"inputs": "w1"},
    "/pipeline/fill-mask": {"inputs": "w1"},
    "/pipeline/question-answering": {"inputs": {"question": "w1", "context": "w2"}},
    "/pipeline/token-classification": {"inputs": "w1"},
    "/pipeline/zero-shot-classification": {"inputs": "w1", "parameters": {"candidate_labels": ["w2"]}},
    "/pipeline/text-classification": {"inputs": "w1"},
    "/pipeline/automatic-speech-recognition": {"inputs": "UklGRg=="},
    "/pipeline/translation": {"inputs": "ab"},
    "/pipeline/summarization": {"inputs": "ab"},
    "/pipeline/text2text-generation": {"inputs": "ab"},
    "/pipeline/text-generation": {"inputs": "ab"},
    "/pipeline/image-classification": {"inputs": "iVBORw0KGgo="},
    "/pipeline/zero-shot-image-classification": {
        "inputs": "iVBORw0KGgo=",
        "parameters": {"candidate_labels": ["a cat", "a dog"]},
    },
}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}


def said(*contents: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for content in contents]}


def hf(**parameters: Any) -> dict[str, Any]:
    return {"parameters": parameters}


NO, IV = "not_supported", "invalid_value"
SCHEMA = "response_format.json_schema.schema"
JSON = {"type": "json_object"}
# route, difference from a good request, status, param, code
BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (C, {"prompt": None}, 400, "prompt", "invalid_type"),
    (C, {"prompt": ""}, 400, "prompt", "invalid_value"),
    (C, {"prompt": [1, "a"]}, 400, "prompt[1]", "invalid_type"),
    (C, {"prompt": [[1], [999]]}, 400, "prompt[1][0]", "token_id_out_of_range"),
    (C, {"prompt": ["a"] * 33}, 400, "prompt", "invalid_value"),
    (C, {"model": "nope"}, 404, "model", "model_not_found"),
    (C, {"model": "enc"}, 400, "model", "wrong_task"),
    (C, {"model": None}, 400, "model", "missing_field"),
    (C, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (C, {"max_tokens": 1000}, 400, "max_tokens", "context_length_exceeded"),
    (C, {"max_tokens": "2"}, 400, "max_tokens", "invalid_type"),
    (C, {"temperature": -1}, 400, "temperature", "invalid_value"),
    (C, {"temperature": True}, 400, "temperature", "invalid_type"),
    (C, {"top_p": -0.1}, 400, "top_p", "invalid_value"),
    (C, {"temprature": 1}, 400, "temprature", "unknown_field"),
    (C, {"num_beams": 2}, 400, "num_beams", "unknown_field"),
    (C, {"stream_options": {"include_usag": True}}, 400, "stream_options.include_usag", "unknown_field"),
    (C, {"guided_regex": "a"}, 400, "guided_regex", NO),
    (C, {"json_schema": "{}"}, 400, "json_schema", NO),
    (C, {"n": 9}, 400, "n", "invalid_value"),
    (C, {"n": 0}, 400, "n", "invalid_value"),
    (C, {"best_of": 2}, 400, "best_of", NO),
    (C, {"suffix": "x"}, 400, "suffix", NO),
    (C, {"logprobs": 21}, 400, "logprobs", "invalid_value"),
    (C, {"logprobs": -1}, 400, "logprobs", "invalid_value"),
    (C, {"logprobs": 21, "echo": True}, 400, "logprobs", "invalid_value"),
    (C, {"stop": ["a"] * 5}, 400, "stop", "invalid_value"),
    (C, {"stop": [""]}, 400, "stop[0]", "invalid_value"),
    (C, {"logit_bias": {"999": 1}}, 400, "logit_bias.999", "token_id_out_of_range"),
    (C, {"logit_bias": {"a": 1}}, 400, "logit_bias.a", "invalid_type"),
    (C, {"logit_bias": {"1": 101}}, 400, "logit_bias.1", "invalid_value"),
    (C, {"presence_penalty": 3}, 400, "presence_penalty", "invalid_value"),
    (C, {"stream_options": 1}, 400, "stream_options", "invalid_type"),
    (C, {"response_format": {"type": "json"}}, 400, "response_format.type", "invalid_value"),
    (C, {"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos", "invalid_value"),
    (C, {"structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex", "invalid_grammar"),
    (C, {"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", "invalid_value"),
    (C, {"structured_outputs": {"json": "nope"}}, 400, "structured_outputs.json", "invalid_value"),
    (C, {"structured_outputs": {"json": {"type": "x"}}}, 400, "structured_outputs.json", "invalid_grammar"),
    (C, {"structured_outputs": {"json": {}, "json_object": True}}, 400, "structured_outputs.json_object", ""),
    (C, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs.choice", "invalid_value"),
    (C, {"structured_outputs": {"grammar": "x"}}, 400, "structured_outputs.grammar", "invalid_grammar"),
    (C, {"structured_outputs": {"regex": "a"}, "response_format": JSON}, 400, "structured_outputs", "invalid_value"),
    (C, {"guided_json": {}}, 400, "guided_json", NO),
    (C, {"use_beam_search": True}, 400, "use_beam_search", NO),
    (C, {"add_special_tokens": False}, 400, "add_special_tokens", NO),
    (C, {"return_token_ids": True}, 400, "return_token_ids", NO),
    (M, {"return_token_ids": True}, 400, "return_token_ids", NO),
    (M, {"return_tokens_as_token_ids": True}, 400, "return_tokens_as_token_ids", NO),
    (V, {"add_special_tokens": False}, 400, "add_special_tokens", NO),
    (C, {"prompt_embeds": "AAAA"}, 400, "prompt_embeds", NO),
    (C, {"bad_words": ["x"]}, 400, "bad_words", NO),
    (C, {"include_stop_str_in_output": 1}, 400, "include_stop_str_in_output", "invalid_type"),
    (C, {"request_id": "a b"}, 400, "request_id", "invalid_value"),
    (C, {"timeout_s": 601}, 400, "timeout_s", "invalid_value"),
    (M, {"messages": []}, 400, "messages", "invalid_value"),
    (M, {"messages": None}, 400, "messages", "invalid_type"),
    (M, {"messages": "Hi"}, 400, "messages", "invalid_type"),
    (M, {"messages": [{"content": "Hi"}]}, 400, "messages[0].role", "missing_field"),
    (M, said(7), 400, "messages[0].content", "invalid_type"),
    (M, said([]), 400, "messages[0].content", "invalid_value"),
    (M, said("a", [{"type": "text", "text": "b"}, IMAGE]), 400, "messages[1].content[1].image_url.url", NO),
    (M, said(*["a"] * 9), 400, "messages", "invalid_value"),
    (M, said("a" * 2000), 400, "messages", "context_length_exceeded"),
    (M, said("a" * 64), 400, "messages", "context_length_exceeded"),
    (M, said("a", role="assistant"), 400, "messages", "chat_template"),
    (M, said(None), 400, "messages[0].content", "missing_field"),
    (M, {"no_repeat_ngram_size": 2}, 400, "no_repeat_ngram_size", "unknown_field"),
    (M, {"messages": [{"role": "user", "content": "a", "nmae": "b"}]}, 400, "messages[0].nmae", "unknown_field"),
    (M, said([{"type": "text", "text": "b", "txt": "c"}]), 400, "messages[0].content[0].txt", "unknown_field"),
    (M, said([{"type": "video", "video": "b"}]), 400, "messages[0].content[0].type", NO),
    (M, said(["a"]), 400, "messages[0].content[0]", "invalid_type"),
    (M, {"tools": [{**TOOL, "functoin": {}}]}, 400, "tools[0].functoin", "unknown_field"),
    (M, {"response_format": {"type": "text", "schema": {}}}, 400, "response_format.schema", "invalid_value"),
    (M, {"response_format": {"type": "json_object", "value": {"type": "x"}}}, 400, "response_format.value", ""),
    (M, {"response_format": {"type": "json_object", "value": {}, "schema": {}}}, 400, "response_format.value", ""),
    (M, {"model": "gen"}, 400, "model", "no_chat_template"),
    (M, {"max_completion_tokens": 1000}, 400, "max_completion_tokens", "context_length_exceeded"),
    (M, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "invalid_value"),
    (M, {"logprobs": 3}, 400, "logprobs", "invalid_type"),
    (M, {"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    (M, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    (M, {"tools": [TOOL, TOOL]}, 400, "tools", IV),
    (M, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools[0].type", IV),
    (M, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name", IV),
    (M, {"tools": [TOOL], "tool_choice": "any"}, 400, "tool_choice", IV),
    (M, {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "g"}}}, 400, "tool_choice", IV),
    (M, {"tool_choice": "required"}, 400, "tool_choice", IV),
    (M, {"parallel_tool_calls": "no"}, 400, "parallel_tool_calls", "invalid_type"),
    (M, {"functions": [{"name": "f"}]}, 400, "functions", NO),
    (M, {"modalities": ["text", "audio"]}, 400, "modalities", NO),
    (M, {"audio": {"voice": "x"}}, 400, "audio", NO),
    (M, {"response_format": {"type": "json_schema", "json_schema": {}}}, 400, SCHEMA, "missing_field"),
    (M, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "missing_field"),
    (M, {"reasoning_effort": "high"}, 400, "reasoning_effort", NO),
    (M, {"web_search_options": {}}, 400, "web_search_options", NO),
    (M, {"chat_template": "{{ 1 }}"}, 400, "chat_template", NO),
    (M, {"reasoning_effort": "some"}, 400, "reasoning_effort", IV),
    (M, {"enable_thinking": False}, 400, "enable_thinking", NO),
    (M, {"thinking": {"type": "disabled"}}, 400, "thinking", NO),
    (M, {"thinking_token_budget": 9}, 400, "thinking_token_budget", NO),
    (M, {"reasoning": {"effort": "high"}}, 400, "reasoning", NO),
    (M, {"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs.tokenize", NO),
    (M, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages", NO),
    (M, {"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message", ""),
    (M, {"continue_final_message": True, **said(None)}, 400, "messages[0].content", "missing_field"),
    (V, {"input": []}, 400, "input", "invalid_value"),
    (V, {"input": [{"txt": "a"}]}, 400, "input[0].text", "missing_field"),
    (V, {"input": [{"image": "a"}]}, 400, "input[0]", "invalid_value"),
    (V, {"late_chunks": True}, 400, "late_chunks", "unknown_field"),
    (V, {"late_chunking": True, "input": ["w1", [1]]}, 400, "input[1]", "invalid_type"),
    (V, {"late_chunking": True, "input": [[1, 2]]}, 400, "input[0]", "invalid_value"),
    (V, {"late_chunking": True, "truncate": True}, 400, "late_chunking", "invalid_value"),
    (V, {"embedding_type": ["float"]}, 400, "embedding_type", "invalid_value"),
    (V, {"embedding_type": "base64", "encoding_format": "float"}, 400, "encoding_format", "invalid_value"),
    (V, {"embedding_type": "int8", "encoding_type": "binary"}, 400, "encoding_type", "invalid_value"),
    (V, {"encoding_type": "int8", "normalized": False}, 400, "encoding_type", "invalid_value"),
    (V, {"embedding_type": "int8", "normalized": False}, 400, "embedding_type", "invalid_value"),
    (V, {"embedding_type": "int8", "ranges": [[0.0], [1.0]]}, 400, "ranges", "invalid_value"),
    (V, {"normalize": True, "normalized": False}, 400, "normalized", "invalid_value"),
    (V, {"task": "separation"}, 400, "task", "invalid_value"),
    (V, {"prompt_name": "separation"}, 400, "prompt_name", "invalid_value"),
    (V, {"truncation_side": "left"}, 400, "truncation_side", "invalid_value"),
    (V, {"truncate_prompt_tokens": 8}, 400, "truncate_prompt_tokens", NO),
    (V, {"truncate_prompt_tokens": -1, "truncate": False}, 400, "truncate_prompt_tokens", IV),
    (V, {"late_chunking": True, "input": ["w1"] * 2049}, 413, "input", "too_many_inputs"),
    (V, {"task": "query", "input": [4, 5]}, 400, "task", IV),
    (V, {"task": "query", "truncate_prompt_tokens": -1, "truncation_side": "left"}, 400, "truncate_prompt_tokens", IV),
    (V, {"messages": HELLO}, 400, "messages", NO),
    (V, {"return_multivector": True}, 400, "return_multivector", NO),
    (V, {"input_type": "query"}, 400, "input_type", NO),
    (V, {"embed_dtype": "float16"}, 400, "embed_dtype", NO),
    (V, {"endianness": "big"}, 400, "endianness", NO),
    (V, {"priority": 1}, 400, "priority", NO),
    (V, {"cache_salt": "a"}, 400, "cache_salt", NO),
    (V, {"additional_data": {}}, 400, "additional_data", NO),
    (V, {"input": "w1 " * 20}, 400, "input", "context_length_exceeded"),
    (V, {"dimensions": 9}, 400, "dimensions", "invalid_value"),
    (V, {"encoding_format": "hex"}, 400, "encoding_format", "invalid_value"),
    ("/", {"inputs": None}, 400, "inputs", "invalid_type"),
    ("/", {"inputs": ["a"]}, 400, "inputs", "invalid_type"),
    ("/", {"inputs": ""}, 400, "inputs", "invalid_value"),
    ("/", {"inputs": "a" * 2000}, 400, "inputs", "context_length_exceeded"),
    ("/", {"parameters": []}, 400, "parameters", "invalid_type"),
    ("/", hf(max_new_tokens=1000), 400, "parameters.max_new_tokens", "context_length_exceeded"),
    ("/", hf(max_new_tokens=0), 400, "parameters.max_new_tokens", "invalid_value"),
    ("/", hf(temperature=0), 400, "parameters.temperature", "invalid_value"),
    ("/", hf(top_p=2), 400, "parameters.top_p", "invalid_value"),
    ("/", hf(top_n_tokens=30), 400, "parameters.top_n_tokens", "invalid_value"),
    ("/", hf(stop=["a"] * 5), 400, "parameters.stop", "invalid_value"),
    ("/", hf(best_of=2), 400, "parameters.best_of", NO),
    ("/", hf(typical_p=2), 400, "parameters.typical_p", "invalid_value"),
    ("/", hf(truncate=5), 400, "parameters.truncate", NO),
    ("/", hf(watermark=True), 400, "parameters.watermark", NO),
    ("/", hf(grammar={"type": "ebnf", "value": "a"}), 400, "parameters.grammar.type", "invalid_value"),
    ("/", hf(grammar={"type": "regex", "value": "("}), 400, "parameters.grammar.value", "invalid_grammar"),
    ("/", hf(grammar={"type": "regex", "value": {}}), 400, "parameters.grammar.value", "invalid_value"),
    ("/", hf(grammar={"type": "json", "value": "{"}), 400, "parameters.grammar.value", "invalid_value"),
    ("/", hf(grammar={"type": "json", "value": {"not": {}}}), 400, "parameters.grammar.value", "invalid_grammar"),
    ("/", hf(grammar={"type": "json_schema", "value": {}}), 400, "parameters.grammar.value.schema", "invalid_value"),
    ("/", hf(adapter_id="seq"), 400, "parameters.adapter_id", "model_not_found"),
    ("/", hf(adapter_id="x"), 404, "model", "model_not_found"),
    ("/generate_stream", hf(repetition_penalty=0), 400, "parameters.repetition_penalty", "invalid_value"),
    ("/embed", {"inputs": "w1 " * 20}, 400, "inputs", "context_length_exceeded"),
    ("/embed", {"inputs": ["w1", ""]}, 400, "inputs[1]", "invalid_value"),
    ("/embed", {"inputs": ["w1"] * 2049}, 413, "inputs", "too_many_inputs"),
    ("/embed", {"prompt_name": "passage"}, 400, "prompt_name", "invalid_value"),
    ("/embed", {"truncation_direction": "up"}, 400, "truncation_direction", "invalid_value"),
    ("/rerank", {"texts": []}, 400, "texts", "invalid_value"),
    ("/rerank", {"model": "gen"}, 400, "model", "wrong_task"),
    ("/rerank", {"query": ""}, 400, "query", "invalid_value"),
    ("/predict", {"inputs": []}, 400, "inputs", "invalid_value"),
    ("/predict", {"inputs": [["a"], ["a", "b", "c"]]}, 400, "inputs[1]", "invalid_value"),
    ("/predict", {}, 400, "model", "wrong_task"),
    (G, {"prompt": "a"}, 400, "prompt", "ambiguous_body"),
    (E, {"input": "w1"}, 400, "input", "ambiguous_body"),
]


def test_table_of_bad_requests() -> None:
    app = chat_app(BRACKETS, settings=ServiceSettings(limits=Limits(max_chat_messages=8)))

    async def work(client: httpx.AsyncClient) -> None:
        for route, changes, status, param, code in BAD:
            reply = await client.post(route, json={**GOOD[route], **changes})
            found = check_error(reply, status)
            assert (found["param"], code and found["code"]) == (param, code), (route, changes, found)
            if route not in ("/rerank", "/predict"):
                good = await client.post(route, json=GOOD[route])
                assert good.status_code == 200, (route, changes, good.text)

    run(app, work)
    check_accounts(app)


NATIVE = {G: {"prompt": "ab", "max_tokens": 2}, E: {"input": [1, 3, 2]}}


@pytest.mark.parametrize(
    ("route", "changes", "param"),
    [
        (G, hf(grammar={"type": "regex", "value": "ab"}) | {"stream": True}, "parameters.grammar.value"),
        (C, {"structured_outputs": {"regex": "ab"}, "stream": True}, "structured_outputs.regex"),
        (M, {"structured_outputs": {"choice": ["ab"]}, "stream": True}, "structured_outputs.choice"),
        ("/generate_stream", hf(grammar={"type": "regex", "value": "ab"}), "parameters.grammar.value"),
    ],
)
def test_an_error_in_a_stream_names_the_clients_field(route: str, changes: dict[str, Any], param: str) -> None:
    app = chat_app(error_after=1)
    text = ask(app, "POST", route, json={**GOOD[route], **changes}).text
    [error] = [one["error"] for one in events(text) if "error" in one]
    assert error["param"] == param and error["message"].startswith(f"{param} cannot be followed"), error


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": JSON},
            "structured_outputs and response_format exclude each other",
        ),
        (
            {"structured_outputs": {"json": {}, "json_object": True}},
            "structured_outputs.json_object and structured_outputs.json exclude each other",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_contradict_each_other_have_the_clients_names(fields: dict[str, Any], said: str) -> None:
    reply = ask(chat_app(), "POST", M, json=GOOD[M] | fields)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)


def test_words_of_a_message_are_not_renamed_as_fields() -> None:
    app = chat_app()

    async def work(client: httpx.AsyncClient) -> None:
        async def message(route: str, changes: dict[str, Any]) -> str:
            reply = await client.post(route, json={**GOOD[route], **changes})
            return str(check_error(reply, 400)["message"])

        assert await message(E, {"dimensions": 0}) == "dimensions: input should be greater than or equal to 1"
        assert "messages give a text of more than" in await message(M, said("a" * 2000))
        assert await message(G, hf(top_p=2, typical_p=2)) == (
            "parameters.top_p: input should be less than or equal to 1; "
            "parameters.typical_p: input should be less than or equal to 1"
        )

    run(app, work)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (G, '{"model": "gen", "inputs": "a", "parameters": {"temperature": NaN}}', "parameters.temperature"),
        (E, '{"model": "enc", "inputs": "w1", "timeout_s": Infinity}', "timeout_s"),
    ],
)
def test_a_number_that_is_none_is_refused_in_the_bodys_own_dialect(app: App, route: str, body: str, param: str) -> None:
    reply = ask(app, "POST", route, content=body, headers={"content-type": "application/json"})
    error = check_error(reply, 400)
    assert error["param"] == param and "finite" in error["message"]


@pytest.mark.parametrize("levels", [190, 191, 200, 300, 900, 961, 962, 963, 1_500, 100_000])
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "object"])
def test_a_schema_may_stand_in_any_depth_and_is_answered(app: App, levels: int, as_text: bool) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    schema = json.dumps(text) if as_text else text
    asked = {
        C: ("structured_outputs.json", '{"model": "gen", "prompt": "a", "structured_outputs": {"json": %s}}'),
    }

    async def work(client: httpx.AsyncClient) -> None:
        for route, (param, body) in asked.items():
            reply = await client.post(route, content=body % schema, headers={"content-type": "application/json"})
            error = check_error(reply, 413 if levels == 100_000 else 400)  # more than max_json_values
            if (as_text and levels < 100_000) or levels < 195:  # no body is read that is nested deeper
                assert error["param"] == param
                assert ("190 levels" in error["message"]) == (levels > 190), error

    run(app, work)


def test_the_address_names_the_model_on_every_route_that_says_so(app: App) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        given = {path: found.get("post", {}).get("parameters", ()) for path, found in paths.items()}
        routes = [path for path, fields in given.items() if "model" in [one["name"] for one in fields]]
        assert set(routes) == {G, E, "/", "/generate_stream", "/embed", "/rerank", "/predict", *TASKS}
        for route, body in [*NATIVE.items(), *((route, (GOOD | TASKS)[route]) for route in routes)]:
            unnamed = {key: value for key, value in body.items() if key != "model"}
            reply = await client.post(f"{route}?model=nope", json=unnamed)
            check_error(reply, 404, "model", "model_not_found")
        for route, body in NATIVE.items():
            assert (await client.post(f"{route}?model=seq", json=body)).json()["model"] == "seq"
            named = {**body, "model": "gen"}  # the body takes precedence
            assert (await client.post(f"{route}?model=seq", json=named)).json()["model"] == "gen"

    run(app, work)


def test_harmless_fields_and_values_pass(app: App) -> None:
    harmless = {
        **{"suffix": "", "best_of": 1, "response_format": {"type": "text"}, "user": "me", "length_penalty": 1.0},
        **{"metadata": {"a": 1}, "store": True, "service_tier": "flex", "logit_bias": None, "stop": None, "n": None},
    }
    assert ask(app, "POST", C, json={**GOOD[C], **harmless}).status_code == 200
    parameters = {"watermark": False, "best_of": 1, "grammar": None}
    options = {"use_cache": True, "wait_for_model": True}
    assert ask(app, "POST", "/", json={**GOOD["/"], **hf(**parameters), "options": options}).status_code == 200


@pytest.mark.parametrize("route", [C, "/", G])
def test_beam_search_of_the_checkpoint_is_not_meant(app: App, route: str) -> None:
    app.served["gen"].checkpoint.sampling_defaults["num_beams"] = 4
    greedy = {C: {"temperature": 0, "logprobs": 1, "stop": "x"}, "/": hf(details=True), G: hf(details=True)}
    assert ask(app, "POST", route, json={**GOOD[route], **greedy[route]}).status_code == 200
    assert [request.params.num_beams for request in app.client.submitted] == [1]


@pytest.mark.parametrize("route", [C, "/", "/generate_stream", G, V, "/embed", E])
def test_a_full_queue_is_a_429(app: App, route: str) -> None:
    app.script.queue_full = "queue_tokens"
    reply = ask(app, "POST", route, json=GOOD[route])
    check_error(reply, 429, None, "queue_full")
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize("route", [C, M, "/", "/generate_stream", G, V, "/embed", E])
def test_nothing_is_prepared_for_a_full_engine(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = chat_app()

    async def prepared(*_: object, **__: object) -> None:
        raise AssertionError("rendered, tokenised or tried")

    for owner, name in ((TokenizerThreads, "run"), (RenderPool, "render"), (GrammarChecker, "check")):
        monkeypatch.setattr(owner, name, prepared)
    asked = {**GOOD[route], **({"structured_outputs": {"regex": "a+"}} if route == C else {})}
    assert ask(app, "POST", route, json=asked).status_code == 500  # as it is prepared here
    app.script.queue_full = "queue_tokens"
    check_error(ask(app, "POST", route, json=asked), 429, None, "queue_full")
    refused = samples(app, "triptych_rejections_total")  # by model and reason
    assert [model for (model, reason), times in refused.items() if reason == "queue_tokens" and times] == [
        asked.get("model", "enc")
    ]


def test_every_dialect_is_counted() -> None:
    app = chat_app()

    async def work(client: httpx.AsyncClient) -> None:
        for route, body in GOOD.items():
            await client.post(route, json=body)

    run(app, work)
    check_accounts(app)
    assert samples(app, "triptych_requests_received_total") == {("generate",): 5, ("encode",): 5}
    assert sum(samples(app, "triptych_requests_total").values()) == 9


def test_examples_of_the_document_work_as_pasted() -> None:
    app = make_app(*_named_like_the_embedded(), max_model_len=256, num_blocks=100)
    app.script.answer = saying(ids(" Hello."))

    async def work(client: httpx.AsyncClient) -> int:
        tried = 0
        for path, methods in (await client.get("/openapi.json")).json()["paths"].items():
            body = methods.get("post", {}).get("requestBody", {"content": {"application/json": {}}})
            for example in body["content"].get("application/json", {}).get("examples", {}).values():
                if path.startswith(("/models/", "/v1/load_lora", "/v1/unload_lora", "/v1/batches", "/lora-adapters")):
                    continue  # it needs an admin key, a file that was uploaded, or an adapter
                if example["value"].get("model") == "MODEL":
                    continue  # no model that is served here can answer it
                reply = await client.post(path, json=example["value"])
                assert reply.status_code == 200, (path, reply.text)
                tried += 1
        return tried

    assert run(app, work) >= 11


def _named_like_the_embedded() -> list[Any]:
    encoder = served("embed", "encoder-only", word_tokenizer())
    return [talker(name="code"), served("normalize", "encoder-decoder", word_tokenizer()), encoder, served_speech()]
