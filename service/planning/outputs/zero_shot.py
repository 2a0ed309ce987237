"""zero_shot: how well labels fit a text, by a model of entailment (Yin et al. 2019).

Each label makes a hypothesis; the model reads every pair of text and hypothesis.
"""

from __future__ import annotations

import numpy as np

from service.core.errors import invalid
from service.core.models import ServedModel
from service.planning.outputs.base import Found, Json, softmax
from service.planning.outputs.inputs import EncodeInput
from service.schemas.encode_bodies import EncodeBody

_TEMPLATE = "This example is {}."
_PLACE = "{}"


def entailment_label(served: ServedModel) -> int | None:
    """Return which label of the model's classifier means entailment, by its name; None if there is none."""
    head = served.config.classifier
    if head is None or head.per_token:
        return None
    return next((at for at, name in enumerate(head.labels) if name.lower().startswith("entail")), None)


def hypotheses(body: EncodeBody, served: ServedModel, sent: EncodeInput) -> list[EncodeInput]:
    """Return the text with the hypothesis of each label."""
    if not body.labels:
        raise invalid("labels is required with output 'zero_shot'", "labels", "missing_field")
    template = _TEMPLATE if body.hypothesis_template is None else body.hypothesis_template
    if _PLACE not in template:
        raise invalid("hypothesis_template must have {} in the place of the label", "hypothesis_template")
    if not sent.is_text:
        raise invalid(f"{sent.param} must be a text", sent.param)
    return [EncodeInput(sent.param, sent.text, template.replace(_PLACE, label)) for label in body.labels]


def zero_shot_item(found: Found) -> Json:
    """Return the labels with their scores, the best first.

    The scores are a softmax over the labels' entailment. With `multi_label`, or a single label, each is a softmax over
    entailment and contradiction.
    """
    labels, entails = found.body.labels, entailment_label(found.served)
    assert labels is not None and entails is not None
    logits = np.stack([part.values for part in found.parts])  # [labels, classes]
    if found.body.multi_label or len(labels) == 1:
        contradicts = -1 if entails == 0 else 0
        scores = softmax(logits[:, [contradicts, entails]])[:, 1]
    else:
        scores = softmax(logits[:, entails])
    ranked = sorted(zip(scores.tolist(), labels, strict=True), key=lambda pair: -pair[0])
    return {"labels": [label for _, label in ranked], "scores": [score for score, _ in ranked]}
