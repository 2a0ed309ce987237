"""OpenAI's decisions and moderations: questions become labels, and probabilities of labels become answers.

A generating model is asked for a label as JSON, so that the text "true" and the boolean true are distinct. Where labels
begin with the same tokens, the probability of each is a product over the tokens at which they part: that of each such
token, divided by the sum over all that could stand there. It is the distribution of an output that may only be one of
the labels. A classifier answers with its scores (`EncodedQuestions`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.service.core.errors import invalid, listed, shorten, too_large
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import fields_of, native_encode
from triptych.service.dialects.decision_bodies import (
    Choice,
    CustomCall,
    CustomOutput,
    DecisionBody,
    DecisionMessage,
    DecisionOutput,
    ModerationBody,
    Predicate,
    Question,
    Score,
)
from triptych.service.dialects.ranking import judges_pairs
from triptych.service.dialects.responses import call_message
from triptych.service.dialects.responses_bodies import InputCall
from triptych.service.http.json_replies import Json
from triptych.service.planning.capabilities import has_categories
from triptych.service.planning.encode import EncodePlan
from triptych.service.planning.outputs.answers import entailment_label
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.types import TextPair

NAMES = {"prompt": "input", "output": "model"}
_ASKS = {
    "predicate": "Is this statement about the text above true? Answer with true or false alone.",
    "choice": "Answer with one of these values alone, as JSON:",
    "score": "Answer with one of these levels alone, the lowest first, as JSON:",
}


def text_of(content: Any) -> str:
    """Return content that is a text or a list of parts as one text."""
    return content if isinstance(content, str) else "\n".join(str(part.text) for part in content)


def values_of(question: Question) -> list[str | bool]:
    """Return the labels of a question."""
    match question:
        case Choice():
            return [one.value for one in question.choices]
        case Score():
            return [one.label for one in question.levels]
    return [True, False]


def _descriptions(question: Question) -> list[str | None]:
    match question:
        case Choice():
            return [one.description for one in question.choices]
        case Score():
            return [one.description for one in question.levels]
    return [None, None]


def _list_name(question: Question) -> str:
    return "choices" if isinstance(question, Choice) else "levels"


def as_json(value: str | bool) -> str:
    return json.dumps(value, ensure_ascii=False)


def asked(question: Question) -> str:
    """Return the text that asks a generating model the question."""
    said = text_of(question.instructions)
    lines = [*([said, ""] if said else []), _ASKS[question.type]]
    if not isinstance(question, Predicate):
        for value, meaning in zip(values_of(question), _descriptions(question), strict=True):
            lines.append(f"- {as_json(value)}{f': {meaning}' if meaning else ''}")
    return "\n".join(lines)


def check(body: DecisionBody, limit: int) -> None:
    """Raise a 400 for labels that are the same, or an output without its call; a 413 for more than `limit` labels."""
    total = 0
    for at, question in enumerate(body.questions):
        values = values_of(question)
        total += len(values)
        seen: set[tuple[type, str | bool]] = set()
        for index, value in enumerate(values):
            if (type(value), value) in seen:
                place = f"questions[{at}].{_list_name(question)}[{index}]"
                raise invalid(f"{place}: {shorten(as_json(value))} is there twice; each must be unique", place)
            seen.add((type(value), value))
    if total > limit:
        message = f"questions have {total} labels in all, more than max_encode_inputs ({limit}); send fewer a request"
        raise too_large(message, "questions", "too_many_inputs")
    calls: set[str] = set()
    for at, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if isinstance(item, InputCall | CustomCall):
            calls.add(item.call_id)
        elif isinstance(item, DecisionOutput | CustomOutput) and item.call_id not in calls:
            place = f"input[{at}].call_id"
            raise invalid(f"{place}: no call before it has the id {shorten(item.call_id)}", place)


def messages(body: DecisionBody) -> list[Json]:
    """Return the input as messages of a chat template."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    found: list[Json] = []
    for item in body.input:
        match item:
            case DecisionMessage():
                found.append({"role": item.role, "content": text_of(item.content)})
            case InputCall() | CustomCall():
                given = item.arguments if isinstance(item, InputCall) else json.dumps({"input": item.input})
                call = call_message(item.call_id, item.name, given)
                if found and found[-1]["role"] == "assistant":
                    found[-1].setdefault("tool_calls", []).append(call)
                else:
                    found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case DecisionOutput() | CustomOutput():
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
    return found


def plain(body: DecisionBody) -> str:
    """Return the input as one text, for models without a chat template."""
    if isinstance(body.input, str):
        return body.input
    lines: list[tuple[str, str]] = []
    for item in body.input:
        match item:
            case DecisionMessage():
                lines.append((item.role, text_of(item.content)))
            case InputCall():
                lines.append(("assistant", f"{item.name}({item.arguments})"))
            case CustomCall():
                lines.append(("assistant", f"{item.name}({item.input})"))
            case DecisionOutput() | CustomOutput():
                lines.append(("tool", text_of(item.output)))
    return lines[0][1] if len(lines) == 1 else "\n".join(f"{role}: {text}" for role, text in lines)


# -- Labels of a generating model.

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTree:
    """The tokens of a question's labels, and the places at which labels part: `branches[path]` can follow `path`."""

    labels: Sequence[Path]
    branches: Mapping[Path, Path]

    def shares(self, found: Mapping[Path, Sequence[float]]) -> tuple[list[float], float]:
        """Return the probability of each label, and of the first tokens together, from the log-probabilities there."""
        by_path = {
            path: dict(zip(self.branches[path], _log_shares(values), strict=True)) for path, values in found.items()
        }
        root = next(iter(self.branches))
        mass = float(np.exp(np.logaddexp.reduce(found[root])))
        logs = [
            sum(by_path[ids[:at]][token] for at, token in enumerate(ids) if ids[:at] in by_path) for ids in self.labels
        ]
        return [math.exp(one) for one in logs], min(1.0, mass)


def _log_shares(values: Sequence[float]) -> list[float]:
    found: list[float] = (np.array(values) - np.logaddexp.reduce(values)).tolist()
    return found


def label_tree(labels: Sequence[Path], question: Question, place: str) -> LabelTree:
    """Return the tree of a question's labels; raises a 400 for labels that tokens do not tell apart."""
    follows: dict[Path, dict[int, None]] = {}
    for ids in labels:
        for at, token in enumerate(ids):
            follows.setdefault(ids[:at], {})[token] = None
    whole = set(labels)
    if len(whole) < len(labels) or any(ids in follows for ids in whole):
        values = values_of(question)
        bad = next(at for at, ids in enumerate(labels) if ids in follows or ids in labels[:at])
        param = f"{place}.{_list_name(question)}[{bad}]"
        message = f"{param}: the tokenizer does not tell {shorten(as_json(values[bad]))} apart from the others"
        raise invalid(message, param)
    branches = {path: tuple(tokens) for path, tokens in follows.items() if len(tokens) > 1}
    return LabelTree(labels, dict(sorted(branches.items(), key=lambda one: len(one[0]))))


# -- Answers.


def answer(question: Question, shares: Sequence[float], **more: float) -> Json:
    """Return the answer of a question whose labels have these probabilities."""
    head: Json = {"type": question.type, "name": question.name}
    if isinstance(question, Predicate):
        return head | {"probability": shares[0], **more}
    values = values_of(question)
    best = max(range(len(shares)), key=shares.__getitem__)
    found: list[Json] = [{"value": value, "probability": one} for value, one in zip(values, shares, strict=True)]
    if isinstance(question, Score):
        found = [
            {"value": at, "label": one["value"], "probability": one["probability"]} for at, one in enumerate(found)
        ]
        shown: Json = {"score": sum(at * one for at, one in enumerate(shares))}
    else:
        shown = {"choice": values[best]}
    return head | shown | {"confidence": shares[best], "probabilities": found, **more}


def reply(model: str, answers: Sequence[Json], tokens: int, cached: int = 0) -> Json:
    """Return the whole reply; nothing is generated, so there are no output tokens."""
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
    return {"object": "decision", "model": model, "answers": [*answers], "usage": usage}


class EncodedQuestions:
    """The questions of a body for a classifier of texts, of one of three kinds.

    A model of entailment reads the input with a statement for each label. A reranker reads each label as the query and
    the input as the document. Any other classifier reads the input once, and the labels must be its own.
    """

    def __init__(self, body: DecisionBody, served: ServedModel) -> None:
        head = served.config.classifier
        assert head is not None
        self._body, self._text = body, plain(body)
        self._labels, self._entails = head.labels, entailment_label(served)
        self._reads_pairs = self._entails is not None or len(head.labels) == 1 or served.pairs is not None
        self._statements = [_statements(one) for one in body.questions]
        if not self._reads_pairs:
            self._places = [
                [self._place(served, value, f"questions[{at}]") for value in _own_values(one)]
                for at, one in enumerate(body.questions)
            ]

    def body(self) -> EncodeBody:
        """Return the body of /encode."""
        fields = fields_of(self._body)
        if not self._reads_pairs:
            return native_encode(fields | {"output": "scores"}, [self._text])
        pairs = []
        for statement in (one for each in self._statements for one in each):
            first, second = (self._text, statement) if self._entails is not None else (statement, self._text)
            pairs.append(TextPair(text=first, text_pair=second))
        return native_encode(fields | {"output": "logits"}, pairs)

    def names(self) -> dict[str, str]:
        """Return the client's names of the inputs of /encode."""
        return {f"input[{at}]": "input" for at in range(sum(map(len, self._statements)))} | NAMES

    def reply(self, plan: EncodePlan, encoded: Json) -> Json:
        """Translate the reply of /encode."""
        rows = iter(np.array([item["scores"] for item in encoded["data"]], np.float64))
        answers = []
        if not self._reads_pairs:
            scores = next(rows)
            for one, places in zip(self._body.questions, self._places, strict=True):
                found = scores[places]
                whole = float(found.sum())
                if isinstance(one, Predicate):
                    answers.append(answer(one, found.tolist()))
                else:
                    answers.append(answer(one, (found / whole).tolist(), mass=whole))
        else:
            for one, statements in zip(self._body.questions, self._statements, strict=True):
                logits = np.stack([next(rows) for _ in statements])
                answers.append(answer(one, self._shares(one, logits)))
        return reply(encoded["model"], answers, plan.prompt_tokens)

    def _shares(self, question: Question, logits: np.ndarray[Any, Any]) -> list[float]:
        """Return the probabilities of labels `[n]` from logits `[n, classes]`, or [1, classes] of a predicate."""
        at = -1 if self._entails is None else self._entails
        against = logits[:, -1 if at == 0 else 0] if logits.shape[1] > 1 else 0.0
        if isinstance(question, Predicate):
            return [float(1 / (1 + np.exp(against - logits[:, at]))[0])]
        odds = logits[:, at] if self._entails is not None else logits[:, at] - against
        shares: list[float] = np.exp(odds - np.logaddexp.reduce(odds)).tolist()
        return shares

    def _place(self, served: ServedModel, value: str | bool, place: str) -> int:
        found = [at for at, label in enumerate(self._labels) if value == label]
        if found:
            return found[0]
        message = f"{place}: model {served.name} has no label {shorten(str(value))}; it has {listed(self._labels)}"
        raise invalid(message, place)


def _own_values(question: Question) -> list[str | bool]:
    """Return the labels that a classifier must have: the instructions of a predicate are one."""
    return [text_of(question.instructions)] if isinstance(question, Predicate) else values_of(question)


def _statements(question: Question) -> list[str]:
    """Return the texts that are read with the input: of a predicate itself, else one for each label."""
    text = text_of(question.instructions)
    if isinstance(question, Predicate):
        return [text]
    pairs = zip(values_of(question), _descriptions(question), strict=True)
    shown = (meaning or (value if isinstance(value, str) else as_json(value)) for value, meaning in pairs)
    return [f"{text} {one}" if text else one for one in shown]


# -- Moderations.

_CATEGORIES = {  # OpenAI's, by their letters
    re.sub(r"[^a-z]", "", name): name
    for name in (
        *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent"),
        *("self-harm", "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors"),
        *("violence", "violence/graphic"),
    )
}
_HARMLESS = re.compile(
    r"(?i)(safe|ok|okay|neutral|normal|clean|benign|harmless|acceptable|none|"
    r"no[nt]?([^a-z].*|(toxic|hate|offensive|abus|spam|harm|violen|sexual|nsfw|threat|insult|obscene).*))$"
)


def is_harmless(label: str) -> bool:
    """Whether a label says that nothing is wrong, such as `safe` or `non-toxic`."""
    return _HARMLESS.match(label) is not None


def moderates(served: ServedModel) -> bool:
    """Whether a model classifies texts into labels with names."""
    head = served.config.classifier
    return head is not None and judges_pairs(served) and not head.spans and has_categories(head.labels)


def moderate(body: ModerationBody) -> EncodeBody:
    """Translate a body; parts are one text."""
    given = body.input
    texts = [given] if isinstance(given, str) else [one for one in given if isinstance(one, str)]
    if not texts:
        texts = [text_of(given)]
    return native_encode(fields_of(body) | {"output": "scores"}, texts)


def moderation_reply(plan: EncodePlan, encoded: Json) -> Json:
    """Return the categories of each text.

    Labels that exclude each other are flagged if they are the likeliest, others from a half on. A label without harm
    is never flagged.
    """
    head = plan.served.config.classifier
    assert head is not None
    names = [_CATEGORIES.get(re.sub(r"[^a-z]", "", label.lower()), label) for label in encoded["labels"]]
    results = []
    for item in encoded["data"]:
        scores = item["scores"]
        high = (
            [one >= 0.5 for one in scores] if head.activation == "Sigmoid" else [one == max(scores) for one in scores]
        )
        flags = {name: high[at] and not is_harmless(name) for at, name in enumerate(names)}
        results.append(
            {
                "flagged": any(flags.values()),
                "categories": flags,
                "category_scores": dict(zip(names, scores, strict=True)),
                "category_applied_input_types": {name: ["text"] for name in names},
            }
        )
    return {"id": f"modr-{encoded['id']}", "model": encoded["model"], "results": results}
