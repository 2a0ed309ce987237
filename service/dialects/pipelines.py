"""Hugging Face's tasks beside generation, as `InferenceClient` asks for them, and TEI's routes of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from service.dialects.common import fields_of, native
from service.dialects.huggingface import encode_fields
from service.dialects.pipeline_bodies import (
    ClassBody,
    EmbedAllBody,
    EntityBody,
    FillMaskBody,
    ImageBody,
    QuestionBody,
    SimilarityBody,
    ZeroShotBody,
)
from service.http.json_replies import Json
from service.planning.encode import EncodePlan
from service.schemas.encode_bodies import EncodeBody

Show = Callable[[EncodePlan, Json], object]

IMAGE_NAMES = {"input[0].image": "inputs", "input": "inputs"}


def embed_all(body: EmbedAllBody, output: str) -> EncodeBody:
    """Translate a body for vectors of tokens, or for sparse ones."""
    return native(EncodeBody, encode_fields(body) | {"output": output})


def embed_all_reply(plan: EncodePlan, reply: Json) -> object:
    return [item["tokens"] for item in reply["data"]]


def embed_sparse_reply(plan: EncodePlan, reply: Json) -> object:
    """Return each input's vocabulary entries with their weights."""
    return [
        [{"index": index, "value": weight} for index, weight in zip(item["indices"], item["weights"], strict=True)]
        for item in reply["data"]
    ]


def similarity(body: SimilarityBody) -> EncodeBody:
    """Translate a comparison; the sentence that others are compared with is the last input."""
    parameters = body.parameters
    fields: Json = {"input": [*body.inputs.sentences, body.inputs.source_sentence], "normalize": True}
    if parameters is not None:
        side = (parameters.truncation_direction or "right").lower()
        fields |= {"truncate": side if parameters.truncate else None, "prompt_name": parameters.prompt_name}
    return native(EncodeBody, fields_of(body) | fields)


def similarity_names(body: SimilarityBody) -> dict[str, str]:
    """Return native names of fields; the source sentence is the last input."""
    source = {f"input[{len(body.inputs.sentences)}]": "inputs.source_sentence"}
    return source | {"input": "inputs.sentences", "prompt_name": "parameters.prompt_name"}


def similarity_reply(plan: EncodePlan, reply: Json) -> object:
    """Return the cosine of the source sentence and each other one."""
    vectors = np.array([item["embedding"] for item in reply["data"]])
    return (vectors[:-1] @ vectors[-1]).tolist()


def fill_mask(body: FillMaskBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"output": "fill_mask"})


def fill_mask_reply(body: FillMaskBody) -> Show:
    """Return the candidates of each input's mask, in lists where an input has several masks, or there are several."""

    def show(plan: EncodePlan, reply: Json) -> object:
        found: list[Any] = []
        for item in reply["data"]:
            masks = [[_fill(one) for one in mask["candidates"]] for mask in item["masks"]]
            found.append(masks[0] if len(masks) == 1 else masks)
        return found[0] if isinstance(body.inputs, str) else found

    return show


def question(body: QuestionBody) -> EncodeBody:
    pair = {"text": body.inputs.question, "text_pair": body.inputs.context}
    return native(EncodeBody, fields_of(body) | {"input": [pair], "output": "question_answering"})


def question_reply(body: QuestionBody) -> Show:
    """Return the best answer, or with `top_k` above 1 a list."""
    several = body.parameters is not None and (body.parameters.top_k or 1) > 1

    def show(plan: EncodePlan, reply: Json) -> object:
        [item] = reply["data"]
        found = [
            {"score": one["score"], "start": one["start"], "end": one["end"], "answer": one["text"]}
            for one in item["answers"]
        ]
        return found if several else found[0]

    return show


def entities(body: EntityBody) -> EncodeBody:
    fields = fields_of(body)
    fields["aggregation"] = fields["aggregation"] or "simple"
    return native(EncodeBody, fields | {"output": "token_classification"})


def entities_reply(body: EntityBody) -> Show:
    """Return the entities of a text, or a list of those of each."""

    def show(plan: EncodePlan, reply: Json) -> object:
        found = [[_entity(one) for one in item["entities"]] for item in reply["data"]]
        return found[0] if isinstance(body.inputs, str) else found

    return show


def zero_shot(body: ZeroShotBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"output": "zero_shot"})


def zero_shot_reply(plan: EncodePlan, reply: Json) -> object:
    [item] = reply["data"]
    return [{"label": label, "score": score} for label, score in zip(item["labels"], item["scores"], strict=True)]


def classes(body: ClassBody) -> EncodeBody:
    """Translate texts to classify: scores are the model's own, or what a named function makes of its logits."""
    return native(EncodeBody, fields_of(body) | {"output": _numbers_of(body)})


def image(body: ImageBody) -> EncodeBody:
    return native(EncodeBody, fields_of(body) | {"input": [{"image": body.inputs}], "output": _numbers_of(body)})


def _numbers_of(body: ClassBody | ImageBody) -> str:
    """Return the output with what the scores are made of."""
    named = body.parameters is not None and body.parameters.function_to_apply is not None
    return "logits" if named else "scores"


def classes_reply(body: ClassBody | ImageBody) -> Show:
    """Return each text's classes by descending score; in a list of lists, also for one text."""
    parameters = body.parameters
    function = parameters.function_to_apply if parameters is not None else None
    top_k = parameters.top_k if parameters is not None else None

    def show(plan: EncodePlan, reply: Json) -> object:
        scored = _FUNCTIONS[function or "none"]
        found = []
        for item in reply["data"]:
            pairs = zip(scored(item["scores"]), reply["labels"], strict=True)
            ranked = sorted(pairs, key=lambda pair: -float(pair[0]))[:top_k]
            found.append([{"label": label, "score": score} for score, label in ranked])
        return found

    return show


def image_reply(body: ImageBody) -> Show:
    """Return the image's classes by descending score."""
    several = classes_reply(body)

    def show(plan: EncodePlan, reply: Json) -> object:
        [found] = cast("list[object]", several(plan, reply))
        return found

    return show


def _sigmoid(logits: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-logit)) if logit > -700 else 0.0 for logit in logits]


def _softmax(logits: Sequence[float]) -> list[float]:
    """Return probabilities, also of a single class."""
    weights = [math.exp(one - max(logits)) for one in logits]
    return [weight / sum(weights) for weight in weights]


_FUNCTIONS: dict[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "none": list,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def _fill(one: Json) -> Json:
    return {"score": one["score"], "token": one["token"], "token_str": one["text"], "sequence": one["sequence"]}


def _entity(one: Json) -> Json:
    place: Json = {"word": one["text"], "start": one["start"], "end": one["end"]}
    if "position" in one:
        return {"entity": one["label"], "score": one["score"], "index": one["position"], **place}
    return {"entity_group": one["label"], "score": one["score"], **place}
