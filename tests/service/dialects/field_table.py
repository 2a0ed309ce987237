"""The table of every field of every dialect, made from the bodies: docs/fields.md and a page for each API.

    python -m tests.service.dialects.field_table

writes the pages again; test_fields.py compares them, and compares the table with the clients' types.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from triptych.model.api.parameters import Beams, Taken
from triptych.model.api.request import PARAMETERS
from triptych.service.dialects.common import Ignored, Refused, ServedTypes
from triptych.service.dialects.decision_bodies import DecisionBody, ModerationBody
from triptych.service.dialects.embeddings import EmbeddingBody
from triptych.service.dialects.huggingface import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from triptych.service.dialects.llama_cpp import InfillBody
from triptych.service.dialects.messages_bodies import CountBody, MessagesBody
from triptych.service.dialects.ollama_bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ShowBody,
)
from triptych.service.dialects.openai_bodies import ChatBody, CompletionBody
from triptych.service.dialects.pipelines import (
    ClassBody,
    EmbedAllBody,
    EmbedSparseBody,
    EntityBody,
    FillMaskBody,
    ImageBody,
    ImageLabelBody,
    QuestionBody,
    SimilarityBody,
    ZeroShotBody,
)
from triptych.service.dialects.ranking import ClassifyBody, CohereEmbedBody, RankBody, ScoreBody
from triptych.service.dialects.responses_bodies import InputTokensBody, ResponsesBody
from triptych.service.dialects.systemone import SystemOneBody
from triptych.service.dialects.text2text import Text2TextBody, TranslationBody
from triptych.service.schemas.field_paths import walk
from triptych.service.speech.dialect_bodies import SpeechBody, TranscriptionForm, TranslationForm

_DOCS = Path(__file__).parents[3] / "docs"
_OPENAI: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": InputTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/decisions": DecisionBody,
    "/v1/moderations": ModerationBody,
    "/v1/audio/transcriptions": TranscriptionForm,
    "/v1/audio/translations": TranslationForm,
}
_MESSAGES: dict[str, type[BaseModel]] = {
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
}
_OLLAMA: dict[str, type[BaseModel]] = {
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    "/api/show": ShowBody,
    "/v1/systemone": SystemOneBody,
}
_RANKING: dict[str, type[BaseModel]] = {
    "/v1/embed, /v2/embed (Cohere)": CohereEmbedBody,
    "/v1/rerank, /v2/rerank (Cohere, Jina, vLLM)": RankBody,
    "/v1/score": ScoreBody,
    "/v1/classify": ClassifyBody,
}
_HUGGING_FACE: dict[str, type[BaseModel]] = {
    "/, /generate, /generate_stream (Hugging Face)": TextGenerationBody,
    "/embed": EmbedBody,
    "/embed_all": EmbedAllBody,
    "/embed_sparse": EmbedSparseBody,
    "/similarity, /pipeline/sentence-similarity": SimilarityBody,
    "/rerank": RerankBody,
    "/predict": PredictBody,
    "/pipeline/fill-mask": FillMaskBody,
    "/pipeline/question-answering": QuestionBody,
    "/pipeline/token-classification": EntityBody,
    "/pipeline/zero-shot-classification": ZeroShotBody,
    "/pipeline/text-classification": ClassBody,
    "/pipeline/image-classification": ImageBody,
    "/pipeline/zero-shot-image-classification": ImageLabelBody,
    "/pipeline/automatic-speech-recognition": SpeechBody,
    "/pipeline/translation": TranslationBody,
    "/pipeline/summarization, /pipeline/text2text-generation": Text2TextBody,
}
_LLAMA_CPP: dict[str, type[BaseModel]] = {"/infill": InfillBody}
BODIES = _OPENAI | _MESSAGES | _OLLAMA | _RANKING | _HUGGING_FACE | _LLAMA_CPP
_PAGES = {  # a page of docs/ for each group of routes, by its title
    "fields-openai.md": ("Fields of OpenAI's API", _OPENAI),
    "fields-anthropic.md": ("Fields of Anthropic's API", _MESSAGES),
    "fields-ollama.md": ("Fields of Ollama's API", _OLLAMA),
    "fields-ranking.md": ("Fields of Cohere's, Jina's and vLLM's APIs", _RANKING),
    "fields-huggingface.md": ("Fields of Hugging Face's APIs", _HUGGING_FACE),
    "fields-llama-cpp.md": ("Fields of llama.cpp's API", _LLAMA_CPP),
}
_HEAD = """# Fields of other servers' APIs

What each route does with every field that clients of its API send. These pages are made from the bodies
(`python -m tests.service.dialects.field_table`). Tests compare them with the clients' own types, `make conformance`
with those of the newest releases.

- **Used** fields are read; `/docs` describes them.
- **Ignored** fields are accepted with any value, because no output depends on them.
- **Refused** fields would change the output: a 400 that names the field and its place, but for values without effect.
- Any other field is unknown, at every depth: a 400 that names it, its place, and the nearest known field.

`a[].b` is the field `b` of each entry of `a`. The native bodies of `/generate` and `/encode` have used fields alone.

{pages}
## Parameters of /generate

Every place that knows these parameters reads one table, `model/api/sampling_params.py`.

- **folder**: generation_config.json may set the default.
- **beams**: "not" has no meaning with beam search, "only" has none without it. A value without effect is accepted.
- Columns of other APIs have the name there. The routes with an empty cell do not take it.
- **flag**: of `triptych generate`.

"""

Use = Literal["used", "refused", "ignored"]


@dataclass(frozen=True, slots=True)
class Row:
    """The treatment of a field, and the reason."""

    use: Use
    reason: str = ""


def table(body: type[BaseModel]) -> dict[str, Row]:
    """Return every field of a body by its path; a field that one alternative uses counts as used."""
    found: dict[str, Row] = {}
    for path, field in walk(body):
        row = _row(field)
        if row is not None and (path not in found or row.use == "used"):
            found[path] = row
    return found


def types(body: type[BaseModel]) -> dict[str, set[str]]:
    """Return the allowed values of `type` and `role` by path; a path that allows any value has none."""
    found: dict[str, set[str]] = {}
    for path, field in walk(body):
        if path.rpartition(".")[2] in ("type", "role") and not any(
            isinstance(one, ServedTypes) for one in field.metadata
        ):
            found.setdefault(path, set()).update(_words(field.annotation))
    return found


def _row(field: FieldInfo) -> Row | None:
    for mark in field.metadata:
        if isinstance(mark, Ignored):
            return Row("ignored", mark.reason)
        if isinstance(mark, Refused):
            instead = f"; `{mark.instead}` is served" if mark.instead else ""
            return Row("refused", f"only {mark.harmless}{instead}")
        if isinstance(mark, ServedTypes):
            return None
    return Row("used")


def _words(annotation: Any) -> set[str]:
    if annotation is str:
        return set()
    args = get_args(annotation)
    return {one for arg in args for one in ([arg] if isinstance(arg, str) else _words(arg))}


_COLUMNS = {
    "OpenAI": "openai",
    "Responses": "responses",
    "Anthropic": "messages",
    "TGI": "huggingface",
    "text2text": "text2text",
    "Ollama": "ollama",
    "llama.cpp": "llama_cpp",
}


def _parameters() -> str:
    """Return the table of parameters."""
    heads = ["field", "values", "default", "folder", "beams", *_COLUMNS, "flag", ""]
    lines = [heads, ["---"] * len(heads)]
    for name, column in PARAMETERS.items():
        row = column.row
        default = row.otherwise or f"`{json.dumps(column.default)}`"
        beams = {Beams.ANY: "", Beams.ONLY: "only"}.get(row.beams, "not")
        cells = [getattr(row, one) for one in _COLUMNS.values()]
        named = ["" if cell is None else f"`{name if isinstance(cell, Taken) else cell}`" for cell in cells]
        flag = f"`--{name.replace('_', '-')}`" if row.flag else ""
        sent = f"`{name}`" if row.sent else f"{name} (folder only)"
        values = row.bounds if column.is_number else ""
        lines.append([sent, values, default, "yes" if row.folder else "", beams, *named, flag, row.help])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    links = "".join(f"- [{title}]({name})\n" for name, (title, _) in _PAGES.items())
    made = {_DOCS / "fields.md": _HEAD.replace("{pages}", links) + _parameters()}
    for name, (title, bodies) in _PAGES.items():
        head = f"# {title}\n\n[fields.md](fields.md) says what used, ignored and refused fields are.\n"
        made[_DOCS / name] = head + "".join(_section(route, table(body)) for route, body in bodies.items())
    return made


def _section(route: str, rows: dict[str, Row]) -> str:
    used = ", ".join(f"`{path}`" for path, row in rows.items() if row.use == "used")
    lines = [f"\n## {route}\n", f"Used: {used}.\n"]
    others = {path: row for path, row in rows.items() if row.use != "used" and not _is_within(path, rows)}
    by_reason: dict[tuple[Use, str], list[str]] = {}
    for path, row in others.items():
        by_reason.setdefault((row.use, row.reason), []).append(f"`{path}`")
    if by_reason:
        lines += ["| field | | |", "|---|---|---|"]
        ordered = sorted(by_reason.items(), key=lambda one: one[0][0])
        lines += [f"| {', '.join(paths)} | {use} | {reason} |" for (use, reason), paths in ordered]
        lines.append("")
    return "\n".join(lines)


def _is_within(path: str, rows: dict[str, Row]) -> bool:
    """Return whether a field is inside an object that is not used as a whole."""
    parents = [path[:at] for at, letter in enumerate(path) if letter == "."]
    return any(rows[one.rstrip("[]")].use != "used" for one in parents if one.rstrip("[]") in rows)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
