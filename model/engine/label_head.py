"""Turns hidden states into scores over labels, by the classifier of a model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.model.api.request import EncodeRequest, EncodeTask
from triptych.model.config.model import ClassifierInput
from triptych.model.engine.output_heads import EncodeResult
from triptych.model.network.transformer import Transformer


class LabelHead:
    """Computes one model's scores of inputs.

    On a CPU each input is computed alone, so that its bits do not depend on the others. On a GPU, where every operation
    is a launch, inputs with one row each for the classifier are computed together.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model = model
        self._activation = _activation(model)
        self.together = device.type != "cpu"

    @property
    def reads_decoder(self) -> bool:
        """Whether the classifier reads the decoder's states."""
        classifier = self._model.config.classifier
        return classifier is not None and classifier.input is ClassifierInput.EOS

    def __call__(self, requests: Sequence[EncodeRequest], hidden: Sequence[Tensor]) -> list[EncodeResult]:
        """Return the logits or scores `[labels]` of each input, or `[L, labels]` of its tokens."""
        hidden = [rows[: self._read(request)] for request, rows in zip(requests, hidden, strict=True)]
        found = [self._model.lora.get(request.model) for request in requests]
        apart = any(one is not None and one.changes_heads for one in found)
        row = self._model.classified_row if self.together and not apart else None
        if row is None:
            logits = [self._model.classify(rows, one).float() for rows, one in zip(hidden, found, strict=True)]
        else:
            logits = list(self._model.classify_rows(torch.stack([rows[row] for rows in hidden])).float()[:, None])
        of_tokens = self._model.config.classifies_tokens
        results = []
        for request, numbers in zip(requests, logits, strict=True):
            scores = self._activation(numbers) if request.task is EncodeTask.SCORES else numbers
            results.append(EncodeResult(scores if of_tokens else scores[0]))
        return results

    def _read(self, request: EncodeRequest) -> int | None:
        """Return how many of an input's tokens the classifier reads; None: all."""
        config = self._model.config
        source = None if config.classifier is None else config.classifier.input
        if source is ClassifierInput.EOS:
            return _behind_last(request.source.token_ids, config.eos_token_ids)
        if source is ClassifierInput.LAST_UNPADDED:
            return _before_padding(request.source.token_ids, config.pad_token_id)
        return None


def _activation(model: Transformer) -> nn.Module:
    """Return what makes scores `[..., labels]` of a classifier's logits."""
    head = model.config.classifier
    kind = getattr(nn, "Identity" if head is None else head.activation)
    over_labels = {"dim": -1} if "dim" in inspect.signature(kind).parameters else {}
    found: nn.Module = kind(**over_labels)
    return found


def _behind_last(ids: Sequence[int], ends: Sequence[int]) -> int:
    """Return the index after the last end-of-sequence token; without one, that after the last token."""
    return next((at for at in range(len(ids), 0, -1) if ids[at - 1] in ends), len(ids))


def _before_padding(ids: Sequence[int], pad: int | None) -> int:
    """Return the index after the last token that is not `pad`; of nothing else, that after the first one.

    Models whose padding is the end of sequence were trained to leave out the end that their texts have.
    """
    return next((at for at in range(len(ids), 0, -1) if ids[at - 1] != pad), 1)
