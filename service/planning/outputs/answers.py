"""question_answering: the best spans of a context, by the scores of their first and last tokens.

A context that is too long is read in windows that overlap. As in the question answering pipeline of `transformers`, the
scores of a window are softmaxes over the context's tokens and the first token, which stands for "no answer here"; a
span's score is the product of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from model.text.tokenizer import Encoded, Located
from service.core.errors import invalid
from service.core.models import ServedModel
from service.planning.outputs.base import Array, Found, Json, Part, at_most, softmax
from service.planning.outputs.inputs import EncodeInput
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits

_DEFAULT_LENGTH = 15  # tokens of an answer


def answer_settings(
    body: EncodeBody, served: ServedModel, sent: EncodeInput, encoded: Encoded, limits: Limits
) -> Mapping[str, Any]:
    """Check what cannot be known before; the engine returns the scores of all tokens."""
    at_most("top_k", body.top_k, limits.max_top_k)
    return {}


def question(body: EncodeBody, served: ServedModel, sent: EncodeInput) -> list[EncodeInput]:
    """Refuse an input that is no pair of question and context."""
    if sent.pair is None:
        raise invalid(f"{sent.param} must be {{text: question, text_pair: context}}", sent.param)
    return [sent]


def answers_item(found: Found) -> Json:
    """Return the best answers of all windows, the best first; the empty text is "no answer"."""
    top_k = found.body.top_k or 1
    answers: dict[tuple[int, int], Json] = {}
    no_answer = 1.0
    for part in found.parts:
        nothing, spans = _spans(part, top_k, found.body.max_answer_length or _DEFAULT_LENGTH)
        no_answer = min(no_answer, nothing)
        for score, first, last in spans:
            answer = _answer(part, score, first, last, widened=found.body.align_to_words is not False)
            place = answer["start"], answer["end"]
            if place not in answers or answers[place]["score"] < score:  # windows overlap
                answers[place] = answer
    all_answers = list(answers.values())
    if found.body.no_answer:
        all_answers.append({"score": no_answer, "start": 0, "end": 0, "text": ""})
    return {"answers": sorted(all_answers, key=lambda one: -float(one["score"]))[:top_k]}


def _spans(part: Part, top_k: int, longest: int) -> tuple[float, list[tuple[float, int, int]]]:
    """Return the score of "no answer", and the best spans as (score, first token, last token)."""
    inside = np.array([of == 1 for of in part.located.texts])
    readable = inside.copy()
    readable[0] = True
    logits = np.where(readable[:, None], part.values, np.float32(-10_000))
    starts, ends = softmax(logits.T)
    nothing = float(starts[0]) * float(ends[0])
    scores = _products(np.where(inside, starts, 0), np.where(inside, ends, 0), longest)
    count = min(top_k, scores.size)
    best = np.argpartition(-scores.ravel(), count - 1)[:count]
    length, first = np.unravel_index(best, scores.shape)
    spans = zip(scores[length, first].tolist(), first.tolist(), (first + length).tolist(), strict=True)
    return nothing, sorted((span for span in spans if inside[span[1]] and span[2] < len(inside)), reverse=True)


def _products(starts: Array, ends: Array, longest: int) -> Array:
    """Return the score of each span `[length - 1, first token]`; 0 where it would end outside."""
    lengths = min(longest, len(starts))
    scores = np.zeros((lengths, len(starts)), dtype=np.float32)
    for length in range(lengths):
        scores[length, : len(starts) - length] = starts[: len(starts) - length] * ends[length:]
    return scores


def _answer(part: Part, score: float, first: int, last: int, *, widened: bool) -> Json:
    located: Located = part.located
    start, end = located.offsets[first][0], located.offsets[last][1]
    if widened:
        start, end = _word(located, first)[0], _word(located, last)[1]
    context = part.sent.pair or ""
    return {"score": score, "start": start, "end": end, "text": context[start:end]}


def _word(located: Located, at: int) -> tuple[int, int]:
    """Return the characters of the word that a token is part of."""
    word, text = located.words[at], located.texts[at]
    if word is None:
        return located.offsets[at]
    same = [
        offsets
        for offsets, one, of in zip(located.offsets, located.words, located.texts, strict=True)
        if one == word and of == text
    ]
    return same[0][0], same[-1][1]
