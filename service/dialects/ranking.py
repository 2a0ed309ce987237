"""Reranking, scores and classes as Cohere, Jina and vLLM have them.

A classifier of texts reads a pair as one input; its last class means relevant, and scores are by the activation that
its folder says. Any other model embeds the texts, and the score is the cosine of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from service.core.errors import invalid
from service.core.models import ServedModel
from service.dialects.common import fields_of, native
from service.dialects.ranking_bodies import ClassifyBody, RankBody, ScoreBody
from service.http.json_replies import Json
from service.planning.encode import EncodePlan
from service.schemas.encode_bodies import EncodeBody

Show = Callable[[EncodePlan, Json], object]

RANK_NAMES = {"input": "documents", "output": "model", "truncate": "truncation"}
SCORE_NAMES = {"input": "text_2", "output": "model"}
CLASSIFY_NAMES = {"output": "model"}


def judges_pairs(served: ServedModel) -> bool:
    """Return whether a model has a classifier of whole texts."""
    head = served.config.classifier
    return head is not None and not head.per_token and served.config.image is None


class Judgement:
    """Scores pairs of texts: each of `seconds` with the one of `firsts` in its place, or with the only one."""

    def __init__(self, served: ServedModel, firsts: Sequence[str], seconds: Sequence[str]) -> None:
        self._pairs = judges_pairs(served)
        self._firsts = firsts
        self._seconds = seconds

    @property
    def uncounted(self) -> int:
        """How many inputs are there to compare others with: a query is no document."""
        return 0 if self._pairs else len(self._firsts)

    def first_names(self, places: Sequence[str]) -> dict[str, str]:
        """Return the names of the inputs that are `firsts`, which have these places in the client's body."""
        if self._pairs:
            return {}
        return {f"input[{len(self._seconds) + at}]": place for at, place in enumerate(places)}

    def body(self, fields: Json) -> EncodeBody:
        """Return the body for /encode; `input[i]` is about `seconds[i]`."""
        if self._pairs:
            firsts = self._firsts if len(self._firsts) > 1 else [*self._firsts] * len(self._seconds)
            pairs = [{"text": one, "text_pair": other} for one, other in zip(firsts, self._seconds, strict=True)]
            return native(EncodeBody, fields | {"input": pairs, "output": "scores"})
        return native(EncodeBody, fields | {"input": [*self._seconds, *self._firsts], "normalize": True})

    def scores(self, reply: Json) -> list[float]:
        """Return a score for each of `seconds`."""
        if self._pairs:
            return [item["scores"][-1] for item in reply["data"]]
        vectors = np.array([item["embedding"] for item in reply["data"]])
        seconds, firsts = vectors[: len(self._seconds)], vectors[len(self._seconds) :]
        scores: list[float] = (seconds * firsts).sum(axis=-1).tolist()
        return scores


def documents(body: RankBody) -> list[str]:
    """Return the documents' texts."""
    return [one if isinstance(one, str) else one.text for one in body.documents]


class Asked(NamedTuple):
    """A body of /encode, how to show its reply, and what is special about the inputs that others are compared with."""

    body: EncodeBody
    show: Show
    uncounted: int
    names: Mapping[str, str]  # of fields, for errors


def rank(body: RankBody, served: ServedModel, read: Sequence[str] | None = None) -> Asked:
    """Translate a body, and show the reply as Cohere, Jina and vLLM all read it.

    The model may `read` less of each document than the reply repeats.
    """
    texts = documents(body)
    judgement = Judgement(served, [body.query], texts if read is None else read)

    def show(plan: EncodePlan, reply: Json) -> object:
        found: list[Json] = []
        for index, score in enumerate(judgement.scores(reply)):
            document = {"document": {"text": texts[index]}} if body.return_documents else {}
            found.append({"index": index, "relevance_score": score, **document})
        found.sort(key=lambda one: -float(one["relevance_score"]))
        head = {"id": reply["id"], "model": reply["model"], "object": "list"}
        return head | {"results": found[: body.top_n], "usage": _usage(reply)}

    side = None if body.truncation is False else "right"
    names = judgement.first_names(["query"]) | RANK_NAMES
    return Asked(judgement.body(fields_of(body) | {"truncate": side}), show, judgement.uncounted, names)


def score(body: ScoreBody, served: ServedModel) -> Asked:
    """Translate a body of pairs; raises a 400 if the numbers of texts do not fit."""
    firsts, seconds = _list(body.text_1), _list(body.text_2)
    if len(firsts) not in (1, len(seconds)) or not seconds:
        message = f"text_2 has {len(seconds)} texts, expected {len(firsts)} as text_1, or text_1 to be one text"
        raise invalid(message, "text_2")
    judgement = Judgement(served, firsts, seconds)

    def show(plan: EncodePlan, reply: Json) -> object:
        scores = enumerate(judgement.scores(reply))
        return _listed(reply, [{"index": index, "object": "score", "score": one} for index, one in scores])

    places = ["text_1"] if isinstance(body.text_1, str) else [f"text_1[{at}]" for at in range(len(firsts))]
    names = judgement.first_names(places) | SCORE_NAMES
    return Asked(judgement.body(fields_of(body)), show, judgement.uncounted, names)


def classify(body: ClassifyBody) -> EncodeBody:
    """Translate a body of texts to classify."""
    return native(EncodeBody, fields_of(body) | {"input": body.input, "output": "scores"})


def classify_reply(plan: EncodePlan, reply: Json) -> Json:
    """Return each text's most likely class, and the scores of all."""
    data = []
    for item in reply["data"]:
        probs = item["scores"]
        label = reply["labels"][max(range(len(probs)), key=probs.__getitem__)]
        data.append({"index": item["index"], "label": label, "probs": probs, "num_classes": len(probs)})
    return _listed(reply, data)


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _listed(reply: Json, data: list[Json]) -> Json:
    head = {"id": reply["id"], "object": "list", "created": reply["created"], "model": reply["model"]}
    return head | {"data": data, "usage": _usage(reply)}


def _usage(reply: Json) -> Json:
    return {name: reply["usage"][name] for name in ("prompt_tokens", "total_tokens")}
