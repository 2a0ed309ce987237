"""Every field that a client can send is in the tables of docs/fields*.md, which are generated from the bodies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.service.dialects.client_types import paths, within
from tests.service.dialects.field_table import BODIES, Row, pages, table, types
from tests.service.dialects.support import calling_app, prompt_of, says
from tests.service.support import App, ask, byte_tokenizer
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import token_bytes
from triptych.service.app import TABLE
from triptych.service.dialects.common import DialectBody
from triptych.service.speech.dialect_bodies import AudioForm

RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "client_fields.json").read_text(encoding="utf-8")
)
HEADERS = {"betas"}  # arguments of a client that are no fields
OPENAI, ANTHROPIC, HUB = "openai.types", "anthropic.types", "huggingface_hub.inference._generated.types"
TYPES = [
    ("/v1/chat/completions", f"{OPENAI}.chat.completion_create_params.CompletionCreateParamsStreaming"),
    ("/v1/completions", f"{OPENAI}.completion_create_params.CompletionCreateParamsStreaming"),
    ("/v1/embeddings", f"{OPENAI}.embedding_create_params.EmbeddingCreateParams"),
    ("/v1/decisions", f"{OPENAI}.decision_create_params.DecisionCreateParams"),
    ("/v1/responses", f"{OPENAI}.responses.response_create_params.ResponseCreateParamsStreaming"),
    ("/v1/responses/input_tokens", f"{OPENAI}.responses.input_token_count_params.InputTokenCountParams"),
    ("/v1/audio/transcriptions", f"{OPENAI}.audio.transcription_create_params.TranscriptionCreateParamsStreaming"),
    ("/v1/audio/translations", f"{OPENAI}.audio.translation_create_params.TranslationCreateParams"),
    ("/v1/messages", f"{ANTHROPIC}.message_create_params.MessageCreateParamsStreaming"),
    ("/v1/messages", f"{ANTHROPIC}.beta.message_create_params.MessageCreateParamsStreaming"),
    ("/v1/messages/count_tokens", f"{ANTHROPIC}.message_count_tokens_params.MessageCountTokensParams"),
    ("/v1/messages/count_tokens", f"{ANTHROPIC}.beta.message_count_tokens_params.MessageCountTokensParams"),
    ("/v1/chat/completions", f"{HUB}.chat_completion.ChatCompletionInput"),
    ("/, /generate, /generate_stream (Hugging Face)", f"{HUB}.text_generation.TextGenerationInput"),
    ("/embed", f"{HUB}.feature_extraction.FeatureExtractionInput"),
    ("/pipeline/fill-mask", f"{HUB}.fill_mask.FillMaskInput"),
    ("/pipeline/question-answering", f"{HUB}.question_answering.QuestionAnsweringInput"),
    ("/pipeline/token-classification", f"{HUB}.token_classification.TokenClassificationInput"),
    ("/pipeline/text-classification", f"{HUB}.text_classification.TextClassificationInput"),
    ("/pipeline/image-classification", f"{HUB}.image_classification.ImageClassificationInput"),
    (
        "/pipeline/zero-shot-image-classification",
        f"{HUB}.zero_shot_image_classification.ZeroShotImageClassificationInput",
    ),
    ("/pipeline/zero-shot-classification", f"{HUB}.zero_shot_classification.ZeroShotClassificationInput"),
    ("/pipeline/translation", f"{HUB}.translation.TranslationInput"),
    ("/pipeline/summarization, /pipeline/text2text-generation", f"{HUB}.summarization.SummarizationInput"),
    ("/pipeline/summarization, /pipeline/text2text-generation", f"{HUB}.text2text_generation.Text2TextGenerationInput"),
    ("/similarity, /pipeline/sentence-similarity", f"{HUB}.sentence_similarity.SentenceSimilarityInput"),
    (
        "/pipeline/automatic-speech-recognition",
        f"{HUB}.automatic_speech_recognition.AutomaticSpeechRecognitionInput",
    ),
]

SENT_BACK = [  # parts of replies that clients send back in the next request
    ("/v1/chat/completions", "messages[]", f"{OPENAI}.chat.ChatCompletionMessage"),
    ("/v1/chat/completions", "messages[]", f"{OPENAI}.chat.ParsedChatCompletionMessage"),
    ("/v1/chat/completions", "messages[]", f"{HUB}.chat_completion.ChatCompletionOutputMessage"),
    ("/v1/responses", "input[]", f"{OPENAI}.responses.ResponseOutputItem"),
    ("/v1/responses", "input[]", f"{OPENAI}.responses.parsed_response.ParsedResponseOutputMessage"),
    ("/v1/responses", "input[]", f"{OPENAI}.responses.parsed_response.ParsedResponseFunctionToolCall"),
    ("/v1/messages", "messages[].content[]", f"{ANTHROPIC}.ContentBlock"),
    ("/v1/messages", "messages[].content[]", f"{ANTHROPIC}.beta.BetaContentBlock"),
]


@pytest.mark.parametrize(("route", "place", "name"), SENT_BACK, ids=lambda value: value)
def test_every_field_of_a_reply_that_is_sent_back_is_in_the_table(route: str, place: str, name: str) -> None:
    assert missing_of(route, place, name) == []


def test_every_body_of_a_dialect_is_in_the_table() -> None:
    read = {model for route in TABLE.rows if route.body is not None for model in route.body.models}
    described = {body for body in read if issubclass(body, DialectBody | AudioForm)}
    assert described == set(BODIES.values())


@pytest.mark.parametrize(("route", "name"), TYPES, ids=lambda value: value)
def test_every_field_of_a_clients_types_is_in_the_table(route: str, name: str) -> None:
    assert missing_of(route, "", name) == []


@pytest.mark.parametrize("client", RECORDED)
def test_every_recorded_field_is_in_the_table(client: str) -> None:
    for route, names in RECORDED[client].items():
        assert missing(set(names), route) == [], route


def test_nested_fields_of_clients_are_seen() -> None:
    kind = importlib.import_module(f"{OPENAI}.chat.completion_create_params").CompletionCreateParamsStreaming
    found = set(paths(kind, types(BODIES["/v1/chat/completions"])))
    assert {"messages[].content[].refusal", "tools[].function.strict", "response_format.json_schema.schema"} <= found
    assert missing({"messages[].content[].text_"}, "/v1/chat/completions") == ["messages[].content[].text_"]


def test_the_pages_are_the_tables() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name}: run python -m tests.service.dialects.field_table"
        )


def missing_of(route: str, place: str, name: str) -> list[str]:
    """Return the fields of a client's type that no row has; `place` is the path of its objects in a body."""
    module, _, kind = name.rpartition(".")
    kinds = within(getattr(importlib.import_module(module), kind))
    found = {path for _, one in kinds for path in paths(one, types(BODIES[route]), place)}
    assert len(found) > 3, name
    return missing(found - HEADERS, route)


def missing(found: set[str], route: str) -> list[str]:
    """Return the paths without a row that are not inside an unused field or one that is read as a whole."""
    rows = table(BODIES[route])
    return sorted(path for path in found if path not in rows and not any(_holds(one, rows) for one in _above(path)))


def _above(path: str) -> list[str]:
    return [path[:at].rstrip("[]") for at, letter in enumerate(path) if letter == "."]


def _holds(path: str, rows: dict[str, Row]) -> Any:
    if path not in rows:
        return False
    return rows[path].use != "used" or not any(one.startswith((f"{path}.", f"{path}[")) for one in rows)


def test_an_error_names_the_place_and_the_nearest_field_and_is_short(app: App) -> None:
    part = {"type": "text", "text": "Hello", "x" * 900: 1}
    unknown = {f"{letter * 70}": 1 for letter in "abcdefgh"}
    body = {**BODIES_OF[CHAT], "messages": [{"role": "user", "content": [part]}], **unknown}
    error = ask(app, "POST", CHAT, json=body).json()["error"]
    assert error["param"].startswith("messages[0].content[0].xxx") and len(error["message"]) <= 600
    assert error["message"].endswith(" more")
    tools = [{"type": "function", "function": {"name": "f", "parametrs": {}}}]
    error = ask(app, "POST", CHAT, json={**BODIES_OF[CHAT], "tools": tools}).json()["error"]
    assert error["message"] == "unknown field 'parametrs' in tools[0].function; did you mean 'parameters'?"


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES_OF = {
    CHAT: {"model": "chat", "messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"model": "chat", "prompt": "ab", "max_tokens": 4},
    RESPONSES: {"model": "chat", "input": "Hello", "max_output_tokens": 4},
    MESSAGES: {"model": "chat", "messages": HELLO, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def app() -> App:
    return calling_app()


@pytest.mark.parametrize("route", BODIES_OF)
def test_top_p_of_0_is_greedy(app: App, route: str) -> None:
    reply = ask(app, "POST", route, json={**BODIES_OF[route], "top_p": 0, "temperature": 0.8})
    assert reply.status_code == 200, reply.text
    assert app.client.submitted[-1].params.temperature == 0


def test_no_alternatives_need_no_logprobs(app: App) -> None:
    body = {**BODIES_OF[CHAT], "logprobs": False, "top_logprobs": 0}
    assert ask(app, "POST", CHAT, json=body).status_code == 200


def test_a_refusal_is_the_assistants_text(app: App) -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I cannot.", "annotations": [], "audio": None}
    in_parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    for said in (refused, in_parts, {**refused, "content": "I cannot.", "refusal": None}):
        assert ask(app, "POST", CHAT, json={**BODIES_OF[CHAT], "messages": [*HELLO, said, *HELLO]}).status_code == 200
        assert prompt_of(app).count("I cannot.") == 1
    item = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", **in_parts}
    given = [{"role": "user", "content": "Hello"}, item, {"role": "user", "content": "Why?"}]
    assert ask(app, "POST", RESPONSES, json={**BODIES_OF[RESPONSES], "input": given}).status_code == 200
    assert prompt_of(app).count("I cannot.") == 1


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_takes_no_arguments(app: App, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "now", "strict": True, **parameters}}
    says(app, '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    reply = ask(
        app, "POST", CHAT, json={**BODIES_OF[CHAT], "max_tokens": 99, "tools": [tool], "tool_choice": "required"}
    )
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}", reply.text
    grammar = app.client.submitted[-1].params.grammar
    for arguments, is_allowed in (("{}", True), ('{"a": 1}', False)):
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        matcher = compile_grammar(grammar, Vocabulary(token_bytes(byte_tokenizer(), 257)))
        ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
        assert all(matcher.tokens[token] and matcher.accept(token) is None for token in ids) == is_allowed


def test_a_prompt_beyond_the_context_is_told_in_the_words_that_clients_look_for(app: App) -> None:
    long = "a" * 9_000
    bodies = {CHAT: {"messages": [{"role": "user", "content": long}]}, "/v1/completions": {"prompt": long}}
    bodies |= {RESPONSES: {"input": long * 20}, MESSAGES: {"messages": [{"role": "user", "content": long * 20}]}}
    for route, changes in bodies.items():
        error = ask(app, "POST", route, json={**BODIES_OF[route], **changes}).json()["error"]
        assert "this model's maximum context length is 8192 tokens" in error["message"], error
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        assert ("prompt is too long" in error["message"]) == (route == MESSAGES)
