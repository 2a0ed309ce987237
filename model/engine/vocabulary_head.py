"""The way from hidden states to results over the vocabulary: candidates for masked tokens, and sparse vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.api.request import EncodeRequest
from model.checkpoint.sentence_transformers import SentenceSettings
from model.engine.sentence_head import load_dense
from model.network.transformer import Transformer

_CPU_ROWS = 32  # of every product with the vocabulary, so that a row's result does not depend on its neighbours
_GPU_ROWS = 1024


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What the engine computed for one input: numbers, and the token ids that they belong to, if they do."""

    values: Tensor
    indices: Tensor | None = None  # of the same shape


class VocabularyHead:
    """Computes one model's results over the vocabulary, by its masked-language-model head, in blocks of rows.

    A block's logits `[rows, V]` are the largest thing that is kept, however many inputs there are.
    """

    def __init__(self, model: Transformer, sentences: SentenceSettings, device: torch.device) -> None:
        """Load the weights of tokens, if there are any; raises `CheckpointError` if they do not fit."""
        self._model = model
        self._splade = sentences.splade
        weight = sentences.token_weight
        self._weight = load_dense(weight, device) if weight is not None else None
        self._rows = _CPU_ROWS if device.type == "cpu" else _GPU_ROWS

    def fill(self, requests: Sequence[EncodeRequest], hidden: Sequence[Tensor]) -> list[EncodeResult]:
        """Return the most likely tokens `[positions, k]` at each input's masked positions, with their probabilities."""
        masked = [rows[list(request.positions)] for request, rows in zip(requests, hidden, strict=True)]
        owners = [request for request, rows in zip(requests, masked, strict=True) for _ in rows]
        found = []
        for start, logits in self._blocks(torch.cat(masked)):
            probabilities = logits.softmax(dim=-1)
            found += [_best(row, request) for row, request in zip(probabilities, owners[start:], strict=False)]
        results, at = [], 0
        for rows in masked:
            values, indices = zip(*found[at : at + len(rows)], strict=True)
            results.append(EncodeResult(torch.stack(values), torch.stack(indices)))
            at += len(rows)
        return results

    def sparse(self, requests: Sequence[EncodeRequest], hidden: Sequence[Tensor]) -> list[EncodeResult]:
        """Return the weights above 0 of each input, by ascending token id.

        They are a maximum over all tokens' logits (Formal et al. 2021: SPLADE), or each token's own weight (BGE-M3).
        """
        if self._weight is not None:
            return [self._own_weights(request, rows.float()) for request, rows in zip(requests, hidden, strict=True)]
        ends = torch.tensor([len(rows) for rows in hidden]).cumsum(0).tolist()
        results: list[EncodeResult] = []
        weights: Tensor | None = None  # [V] of the first input that is not finished
        for start, logits in self._blocks(torch.cat(list(hidden))):
            activations = functional.relu(logits).log1p_()
            if self._splade.twice:
                activations = activations.log1p_()
            at, stop = start, start + len(logits)
            while at < stop:
                end = ends[len(results)]
                rows = activations[at - start : end - start]
                pooled = rows.sum(dim=0) if self._splade.sums else rows.amax(dim=0)
                weights = pooled if weights is None else self._joined(weights, pooled)
                at = min(end, stop)
                if at == end:
                    results.append(heaviest(weights, requests[len(results)].top_k))
                    weights = None
        return results

    def _own_weights(self, request: EncodeRequest, hidden: Tensor) -> EncodeResult:
        """Return the tokens that count, each with the highest of its weights (Chen et al. 2024: BGE-M3)."""
        assert self._weight is not None
        at = list(request.positions)
        ids = torch.tensor([request.source.token_ids[one] for one in at], dtype=torch.int64, device=hidden.device)
        weights = torch.zeros(self._model.config.embedding.vocab_size, device=hidden.device)
        weights.scatter_reduce_(0, ids, functional.relu(self._weight(hidden[at]))[:, 0], "amax")
        return heaviest(weights, request.top_k)

    def _joined(self, weights: Tensor, more: Tensor) -> Tensor:
        return weights + more if self._splade.sums else torch.maximum(weights, more)

    def _blocks(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits `[n, V]` of rows `[start, start + n)` in float32; on a CPU the last block is filled up."""
        for start in range(0, len(hidden), self._rows):
            rows = hidden[start : start + self._rows]
            count = len(rows)
            if self._rows == _CPU_ROWS and count < self._rows:
                rows = functional.pad(rows, (0, 0, 0, self._rows - count))
            yield start, self._model.masked_logits(rows)[:count].float()


def heaviest(weights: Tensor, top_k: int) -> EncodeResult:
    """Return the entries of `[V]` above 0, by ascending id; of more than `top_k` (0: any number) the heaviest."""
    if 0 < top_k < len(weights):
        kept = torch.zeros_like(weights)
        values, indices = weights.topk(top_k)
        weights = kept.index_copy(0, indices, values)
    indices = weights.nonzero().flatten()
    return EncodeResult(weights[indices], indices)


def _best(probabilities: Tensor, request: EncodeRequest) -> tuple[Tensor, Tensor]:
    """Return the highest of the probabilities `[V]`, and their token ids, among the request's candidates."""
    if not request.candidates:
        values, indices = probabilities.topk(min(request.top_k, len(probabilities)))
        return values, indices
    candidates = torch.tensor(request.candidates, device=probabilities.device)
    values, order = probabilities[candidates].topk(min(request.top_k, len(candidates)))
    return values, candidates[order]
