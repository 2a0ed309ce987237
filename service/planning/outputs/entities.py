"""token_classification: the labels of tokens, of words, or of neighbours together, with their places in the text.

The ways of aggregation are those of the token classification pipeline of `transformers`. Windows of a long text
overlap; of two entities that overlap the longer one stays, of two equally long ones the more certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model.text.tokenizer import Tokenizer
from service.planning.outputs.base import Array, Found, Json, Part, softmax


@dataclass(frozen=True, slots=True)
class _Token:
    name: str  # the vocabulary's entry, or the text of an unknown word
    scores: Array  # [labels]
    start: int
    end: int
    position: int
    continues: bool  # the word of the token before it


@dataclass(frozen=True, slots=True)
class _Labelled:
    """One or several tokens with one label."""

    label: str
    score: float
    name: str
    start: int
    end: int
    position: int | None = None  # of a single token


def entities_item(found: Found) -> Json:
    """Return the entities that have no label to be left out, in the order of the text."""
    ignored = ["O"] if found.body.ignore_labels is None else found.body.ignore_labels
    entities = [one for part in found.parts for one in _entities(found, part) if one["label"] not in ignored]
    return {"entities": _without_overlaps(entities) if len(found.parts) > 1 else entities}


def _entities(found: Found, part: Part) -> Iterator[Json]:
    classifier, way = found.served.config.classifier, found.body.aggregation or "none"
    assert classifier is not None
    tokens, labels = list(_tokens(found.tokenizer, part)), classifier.labels
    if way in ("none", "simple"):
        labelled = [_labelled(labels, one.scores, one.name, [one]) for one in tokens]
    else:
        labelled = [_word(found.tokenizer, labels, word, way) for word in _words(tokens)]
    if way != "none":
        labelled = [_group(found.tokenizer, group) for group in _groups(labelled)]
    for one in labelled:
        item: Json = {"label": one.label, "score": one.score, "start": one.start, "end": one.end, "text": one.name}
        if way == "none":
            item["position"] = one.position
        yield item


def _tokens(tokenizer: Tokenizer, part: Part) -> Iterator[_Token]:
    """Yield the tokens of the text with their probabilities; special tokens are left out."""
    text, located, probabilities = part.sent.text, part.located, softmax(part.values)
    for position, (token, (start, end), of) in enumerate(zip(located.ids, located.offsets, located.texts, strict=True)):
        if of is None:
            continue
        name, written = tokenizer.token_name(token), text[start:end]
        continues = start > 0 and " " not in text[start - 1 : start + 1]
        if tokenizer.marks_subwords:
            continues = len(name) != len(written)
        if token == tokenizer.unknown_id:
            name, continues = written, False
        yield _Token(name, probabilities[position], start, end, position, continues)


def _words(tokens: Sequence[_Token]) -> list[list[_Token]]:
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokenizer: Tokenizer, labels: Sequence[str], word: Sequence[_Token], way: str) -> _Labelled:
    """Give a word the label of its first token, of the most certain one, or of the mean of all."""
    scores = word[0].scores
    if way == "max":
        scores = max(word, key=lambda one: float(one.scores.max())).scores
    if way == "average":
        scores = np.stack([one.scores for one in word]).mean(axis=0)
    return _labelled(labels, scores, tokenizer.join([one.name for one in word]), word)


def _labelled(labels: Sequence[str], scores: Array, name: str, tokens: Sequence[_Token]) -> _Labelled:
    best = int(scores.argmax())
    return _Labelled(labels[best], float(scores[best]), name, tokens[0].start, tokens[-1].end, tokens[0].position)


def _groups(labelled: Sequence[_Labelled]) -> list[list[_Labelled]]:
    """Put neighbours of one label together; a label with B- begins a new group."""
    groups: list[list[_Labelled]] = []
    for one in labelled:
        begins, kind = _kind(one.label)
        if groups and not begins and kind == _kind(groups[-1][-1].label)[1]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and of which kind."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _group(tokenizer: Tokenizer, group: Sequence[_Labelled]) -> _Labelled:
    label = group[0].label.split("-", 1)[-1]
    score = sum(one.score for one in group) / len(group)
    return _Labelled(label, score, tokenizer.join([one.name for one in group]), group[0].start, group[-1].end)


def _without_overlaps(entities: Sequence[Json]) -> list[Json]:
    """Keep of overlapping entities the longest, then the most certain one."""
    kept: list[Json] = []
    for one in sorted(entities, key=lambda entity: int(entity["start"])):
        if not kept or not kept[-1]["start"] <= one["start"] < kept[-1]["end"]:
            kept.append(one)
        elif (one["end"] - one["start"], one["score"]) > (kept[-1]["end"] - kept[-1]["start"], kept[-1]["score"]):
            kept[-1] = one
    return kept
