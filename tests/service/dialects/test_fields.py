"""Every field that a client can send is in the table of docs/fields.md, which is made from the bodies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.service.dialects.client_types import paths
from tests.service.dialects.field_table import BODIES, PAGE, Row, markdown, table, types

RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "client_fields.json").read_text(encoding="utf-8")
)
HEADERS = {"betas"}  # arguments of a client that are no fields
OPENAI, ANTHROPIC, HUB = "openai.types", "anthropic.types", "huggingface_hub.inference._generated.types"
TYPES = [
    ("/v1/chat/completions", f"{OPENAI}.chat.completion_create_params.CompletionCreateParamsStreaming"),
    ("/v1/completions", f"{OPENAI}.completion_create_params.CompletionCreateParamsStreaming"),
    ("/v1/embeddings", f"{OPENAI}.embedding_create_params.EmbeddingCreateParams"),
    ("/v1/responses", f"{OPENAI}.responses.response_create_params.ResponseCreateParamsStreaming"),
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
    ("/pipeline/zero-shot-classification", f"{HUB}.zero_shot_classification.ZeroShotClassificationInput"),
    ("/similarity, /pipeline/sentence-similarity", f"{HUB}.sentence_similarity.SentenceSimilarityInput"),
    (
        "/pipeline/automatic-speech-recognition",
        f"{HUB}.automatic_speech_recognition.AutomaticSpeechRecognitionInput",
    ),
]


@pytest.mark.parametrize(("route", "name"), TYPES, ids=lambda value: value)
def test_every_field_of_a_clients_types_is_in_the_table(route: str, name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = set(paths(getattr(importlib.import_module(module), kind), types(BODIES[route])))
    assert len(found) > 3
    assert missing(found - HEADERS, route) == []


@pytest.mark.parametrize("client", RECORDED)
def test_every_recorded_field_is_in_the_table(client: str) -> None:
    for route, names in RECORDED[client].items():
        assert missing(set(names), route) == [], route


def test_nested_fields_of_clients_are_seen() -> None:
    kind = importlib.import_module(f"{OPENAI}.chat.completion_create_params").CompletionCreateParamsStreaming
    found = set(paths(kind, types(BODIES["/v1/chat/completions"])))
    assert {"messages[].content[].refusal", "tools[].function.strict", "response_format.json_schema.schema"} <= found
    assert missing({"messages[].content[].text_"}, "/v1/chat/completions") == ["messages[].content[].text_"]


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run python -m tests.service.dialects.field_table"


def missing(found: set[str], route: str) -> list[str]:
    """Return the paths that are in no row, within none that is not used, and within no field that is read whole."""
    rows = table(BODIES[route])
    return sorted(path for path in found if path not in rows and not any(_holds(one, rows) for one in _above(path)))


def _above(path: str) -> list[str]:
    return [path[:at].rstrip("[]") for at, letter in enumerate(path) if letter == "."]


def _holds(path: str, rows: dict[str, Row]) -> Any:
    if path not in rows:
        return False
    return rows[path].use != "used" or not any(one.startswith((f"{path}.", f"{path}[")) for one in rows)
