"""Outputs of /encode that are answers: spans of a text, scores of given labels, masked tokens, and entities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.model.text.tokenizer import Encoded, Located, Tokenizer
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.planning.outputs.base import (
    Array,
    CheckedInputs,
    EncodeInput,
    InputResult,
    Json,
    PartResult,
    at_most,
    softmax,
)
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.settings.service_settings import Limits

# -- question_answering: the best spans of a context, by the scores of their first and last tokens. A context that is
# too long is read in windows that overlap. As in the question answering pipeline of `transformers`, the scores of a
# window are softmaxes over the context's tokens and the first token, which stands for "no answer here". The score of a
# span is the product of the scores of its first and last tokens.

_DEFAULT_LENGTH = 15  # maximum tokens of an answer
_WINDOW = 384  # tokens of question and context that are read together, as in training


def window(checked: CheckedInputs) -> int:
    """Return the most tokens of a window, as in that pipeline."""
    return _WINDOW


def answer_settings(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Check `top_k`; the engine returns the scores of all tokens."""
    body, limits = checked.body, checked.limits
    at_most("top_k", body.top_k, limits.max_top_k)
    return {}


def question(checked: CheckedInputs, sent: EncodeInput) -> list[EncodeInput]:
    """Refuse an input that is not a pair of question and context."""
    if sent.pair is None:
        raise invalid(f"{sent.param} must be {{text: question, text_pair: context}}", sent.param)
    return [sent]


def answers_item(result: InputResult) -> Json:
    """Return the best answers of all windows, best first; an empty text means "no answer"."""
    top_k = result.body.top_k or 1
    answers: dict[tuple[int, int], Json] = {}
    no_answer = 1.0
    for part in result.parts:
        nothing, spans = _spans(part, top_k, result.body.max_answer_length or _DEFAULT_LENGTH)
        no_answer = min(no_answer, nothing)
        for score, first, last in spans:
            answer = _answer(part, score, first, last, widened=result.body.align_to_words is not False)
            place = answer["start"], answer["end"]
            if place not in answers or answers[place]["score"] < score:  # windows overlap
                answers[place] = answer
    all_answers = list(answers.values())
    if result.body.no_answer:
        all_answers.append({"score": no_answer, "start": 0, "end": 0, "text": ""})
    return {"answers": sorted(all_answers, key=lambda one: -float(one["score"]))[:top_k]}


def _spans(part: PartResult, top_k: int, longest: int) -> tuple[float, list[tuple[float, int, int]]]:
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
    """Return the score of each span `[length - 1, first token]`; 0 if it would end outside the text."""
    lengths = min(longest, len(starts))
    scores = np.zeros((lengths, len(starts)), dtype=np.float32)
    for length in range(lengths):
        scores[length, : len(starts) - length] = starts[: len(starts) - length] * ends[length:]
    return scores


def _answer(part: PartResult, score: float, first: int, last: int, *, widened: bool) -> Json:
    located: Located = part.located
    start, end = located.offsets[first][0], located.offsets[last][1]
    if widened:
        start, end = _word(located, first)[0], _word(located, last)[1]
    context = part.sent.pair or ""
    return {"score": score, "start": start, "end": end, "text": context[start:end]}


def _word(located: Located, at: int) -> tuple[int, int]:
    """Return the range of characters of the word that contains a token."""
    word, text = located.words[at], located.texts[at]
    if word is None:
        return located.offsets[at]
    same = [
        offsets
        for offsets, one, of in zip(located.offsets, located.words, located.texts, strict=True)
        if one == word and of == text
    ]
    return same[0][0], same[-1][1]


# -- zero_shot: how well labels fit a text, by an entailment model (Yin et al. 2019). Each label becomes a hypothesis;
# the model scores every pair of text and hypothesis.

_TEMPLATE, _IMAGE_TEMPLATE = "This example is {}.", "This is a photo of {}."
_PLACE = "{}"


def entailment_label(served: ServedModel) -> int | None:
    """Return the index of the classifier's label for entailment, found by its name; None if there is none."""
    head = served.config.classifier
    return None if head is None else head.entailment


def hypotheses(checked: CheckedInputs, sent: EncodeInput) -> list[EncodeInput]:
    """Return a pair of text and hypothesis for each label."""
    sentences = _sentences(checked.body, _TEMPLATE)
    if not sent.is_text:
        raise invalid(f"{sent.param} must be a text", sent.param)
    return [EncodeInput(sent.param, sent.text, sentence) for sentence in sentences]


def _sentences(body: EncodeBody, template: str) -> list[str]:
    """Return the sentence of each label, by the body's template or else `template`; raises a 400."""
    if not body.labels:
        raise invalid("labels is required with output 'zero_shot'", "labels", "missing_field")
    template = template if body.hypothesis_template is None else body.hypothesis_template
    if _PLACE not in template:
        raise invalid("hypothesis_template must have {} in the place of the label", "hypothesis_template")
    return [template.replace(_PLACE, label) for label in body.labels]


def zero_shot_item(result: InputResult) -> Json:
    """Return the labels with their scores, best first.

    The scores are a softmax over the labels' entailment. With `multi_label`, or a single label, each is a softmax over
    entailment and contradiction.
    """
    labels, entails = result.body.labels, entailment_label(result.served)
    assert labels is not None and entails is not None
    logits = np.stack([part.values for part in result.parts])  # [labels, classes]
    if result.body.multi_label or len(labels) == 1:
        contradicts = -1 if entails == 0 else 0
        scores = softmax(logits[:, [contradicts, entails]])[:, 1]
    else:
        scores = softmax(logits[:, entails])
    return _ranked(labels, scores)


def image_labels(checked: CheckedInputs) -> list[EncodeInput]:
    """Return a sentence for each label, as CLIP's authors classify images by labels; raises a 400 without images."""
    for sent in checked.inputs:
        if sent.image is None:
            raise invalid(f"{sent.param} must be an image: model {checked.served.name} labels images", sent.param)
    sentences = _sentences(checked.body, _IMAGE_TEMPLATE)
    return [EncodeInput(f"labels[{at}]", one) for at, one in enumerate(sentences)]


def image_labels_item(result: InputResult) -> Json:
    """Return the labels with their scores, best first: a softmax over all, or with SigLIP a sigmoid of each."""
    labels, joint, similarity = result.body.labels, result.served.config.joint, result.info.similarity
    assert labels is not None and joint is not None and similarity is not None
    vectors = np.stack([part.values for part in result.parts]).astype(np.float64)  # of the image, then of the labels
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    scale, bias = similarity
    logits = scale * (vectors[1:] @ vectors[0]) + bias
    scores = softmax(logits) if joint.exclusive else 1 / (1 + np.exp(-logits))
    return _ranked(labels, scores)


def _ranked(labels: Sequence[str], scores: Array) -> Json:
    ranked = sorted(zip(scores.tolist(), labels, strict=True), key=lambda pair: -pair[0])
    return {"labels": [label for _, label in ranked], "scores": [score for score, _ in ranked]}


# -- fill_mask: the most likely tokens for each mask token.

_DEFAULT_TOP_K = 5


def mask_settings(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Return the positions of the masks and their candidates; raises a 400 for an input without a mask."""
    body, served, limits = checked.body, checked.served, checked.limits
    tokenizer = served.require_tokenizer(sent.param)
    at_most("top_k", body.top_k, limits.max_top_k)
    positions = tuple(at for at, token in enumerate(encoded.ids) if token == tokenizer.mask_id)
    if not positions:
        raise invalid(f"{sent.param} has no mask token {tokenizer.mask_token}", sent.param, "no_mask")
    top_k = body.top_k or _DEFAULT_TOP_K
    if len(positions) * top_k > limits.max_candidates:
        message = f"{sent.param} has {len(positions)} masks x {top_k} top_k, more than {limits.max_candidates}"
        raise invalid(message, sent.param)
    return {"positions": positions, "top_k": top_k, "candidates": _candidates(body, tokenizer, limits)}


def _candidates(body: EncodeBody, tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    targets = body.targets or []
    if len(targets) > limits.max_candidates:
        raise invalid(f"targets has {len(targets)} entries, more than {limits.max_candidates}", "targets")
    found: dict[int, None] = {}
    for index, text in enumerate(targets):
        token = tokenizer.token_id(text)
        ids = (token,) if token is not None else tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            message = f"targets[{index}] is {len(ids)} tokens, expected a single one of the vocabulary"
            raise invalid(message, f"targets[{index}]")
        found[ids[0]] = None
    return tuple(found)


def mask_item(result: InputResult) -> Json:
    """Return the candidates of each mask, best first, each with the text that it completes.

    That text still contains the other masks.
    """
    [part] = result.parts
    tokenizer, ids = result.tokenizer, list(part.encoded.ids)
    positions = [at for at, token in enumerate(ids) if token == tokenizer.mask_id]
    masks = []
    for position, scores, tokens in zip(positions, part.values.tolist(), part.indices.tolist(), strict=True):
        candidates = []
        for score, token in zip(scores, tokens, strict=True):
            filled = [*ids[:position], token, *ids[position + 1 :]]
            candidates.append(
                {
                    "token": token,
                    "text": tokenizer.token_text(token),
                    "score": score,
                    "sequence": tokenizer.decode(filled, skip_special_tokens=len(positions) == 1),
                }
            )
        masks.append({"position": position, "candidates": candidates})
    return {"masks": masks}


# -- token_classification: the labels of tokens, of words, or of groups of adjacent words, and their places in the text,
# aggregated as in the token classification pipeline of `transformers`. Windows of a long text overlap; of two
# overlapping entities the longer one is kept, of two equally long ones the one with the higher score.


@dataclass(frozen=True, slots=True)
class _Token:
    name: str  # the vocabulary entry, or the text of an unknown word
    scores: Array  # [labels]
    start: int
    end: int
    position: int
    continues: bool  # whether it continues the word of the previous token


@dataclass(frozen=True, slots=True)
class _Labelled:
    """One or more tokens with one label."""

    label: str
    score: float
    name: str
    start: int
    end: int
    position: int | None = None  # of a single token


def entities_item(result: InputResult) -> Json:
    """Return the entities in the order of the text, without those whose label is in `ignore_labels`."""
    ignored = ["O"] if result.body.ignore_labels is None else result.body.ignore_labels
    entities = [one for part in result.parts for one in _entities(result, part) if one["label"] not in ignored]
    return {"entities": _without_overlaps(entities) if len(result.parts) > 1 else entities}


def _entities(result: InputResult, part: PartResult) -> Iterator[Json]:
    classifier, way = result.served.config.classifier, result.body.aggregation or "none"
    assert classifier is not None
    tokens, labels = list(_tokens(result.tokenizer, part)), classifier.labels
    if way in ("none", "simple"):
        labelled = [_labelled(labels, one.scores, one.name, [one]) for one in tokens]
    else:
        labelled = [_entity_word(result.tokenizer, labels, word, way) for word in _words(tokens)]
    if way != "none":
        labelled = [_group(result.tokenizer, group) for group in _groups(labelled)]
    for one in labelled:
        item: Json = {"label": one.label, "score": one.score, "start": one.start, "end": one.end, "text": one.name}
        if way == "none":
            item["position"] = one.position
        yield item


def _tokens(tokenizer: Tokenizer, part: PartResult) -> Iterator[_Token]:
    """Yield the tokens of the text with their probabilities, without special tokens."""
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


def _entity_word(tokenizer: Tokenizer, labels: Sequence[str], word: Sequence[_Token], way: str) -> _Labelled:
    """Give a word the label of its first token, of its token with the highest score, or of the mean of all."""
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
    """Group adjacent tokens or words with one label; a label with B- begins a new group."""
    groups: list[list[_Labelled]] = []
    for one in labelled:
        begins, kind = _kind(one.label)
        if groups and not begins and kind == _kind(groups[-1][-1].label)[1]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the kind of entity."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _group(tokenizer: Tokenizer, group: Sequence[_Labelled]) -> _Labelled:
    label = group[0].label.split("-", 1)[-1]
    score = sum(one.score for one in group) / len(group)
    return _Labelled(label, score, tokenizer.join([one.name for one in group]), group[0].start, group[-1].end)


def _without_overlaps(entities: Sequence[Json]) -> list[Json]:
    """Keep of overlapping entities the longest, then the one with the highest score."""
    kept: list[Json] = []
    for one in sorted(entities, key=lambda entity: int(entity["start"])):
        if not kept or not kept[-1]["start"] <= one["start"] < kept[-1]["end"]:
            kept.append(one)
        elif (one["end"] - one["start"], one["score"]) > (kept[-1]["end"] - kept[-1]["start"], kept[-1]["score"]):
            kept[-1] = one
    return kept
