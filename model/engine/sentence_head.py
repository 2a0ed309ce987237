"""The way from an input's hidden states to its vector: pooling, projections, normalisation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from model.api.request import EncodeRequest, EncodeTask, Pooling
from model.checkpoint.sentence_transformers import DenseConfig, SentenceSettings
from model.checkpoint.tensor_files import TensorReader, read_headers
from model.errors import CheckpointError
from model.network.mlp import ACTIVATIONS
from model.network.transformer import Transformer

_TOGETHER = frozenset({Pooling.MEAN, Pooling.LAST, Pooling.CLS, Pooling.MAX, Pooling.MEAN_SQRT_LEN})


class SentenceHead:
    """Computes one model's vectors in float32, by its settings and by what a request asks for instead."""

    def __init__(self, model: Transformer, settings: SentenceSettings, device: torch.device) -> None:
        """Load the projections; raises `CheckpointError` if their tensors do not fit."""
        self.settings = settings
        self._model = model
        self._dense = [(config, load_dense(config, device)) for config in settings.dense]
        late = settings.late.dense if settings.late is not None else ()
        self._token_dense = [(config, load_dense(config, device)) for config in late]

    def __call__(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        """Return the vector `[D]` of hidden states `[L, d]`, or `[L, D]` for a request for tokens' vectors.

        A request with spans gets one vector for each (Günther et al. 2024: late chunking), `[spans, D]`.
        """
        if request.task is EncodeTask.MULTI_VECTOR:
            counted = hidden[list(request.positions)] if request.positions else hidden
            return nn.functional.normalize(_projected(counted, self._token_dense), dim=-1)
        if request.spans:
            vectors = torch.stack([self._vector(request, hidden[start:end]) for start, end in request.spans])
        else:
            vectors = hidden if request.task is EncodeTask.TOKENS else self._vector(request, hidden)
        return self._finished(request, vectors)

    def can_pool_together(self, requests: Sequence[EncodeRequest]) -> bool:
        """Whether the inputs get one vector each in the same way, without a product, whose bits depend on its rows."""
        first = requests[0]
        if first.task is not EncodeTask.EMBEDDING or any(_settings(one) != _settings(first) for one in requests):
            return False
        if first.pooling is None and self._dense:
            return False
        return not first.spans and _TOGETHER.issuperset(self._modes(first))

    def pool_together(self, requests: Sequence[EncodeRequest], hidden: Tensor) -> Tensor:
        """Return the vectors `[n, D]` of the packed hidden states `[T, d]` of inputs that `can_pool_together`.

        Neighbours of equal length are pooled by one operation; the bits are those of each alone.
        """
        pooled, at = [], 0
        for length, run in groupby(request.source.num_positions for request in requests):
            count = len(list(run))
            rows = hidden[at : at + count * length].view(count, length, -1)
            skipped = 0 if requests[0].pooling is not None else requests[0].prompt_tokens
            pooled.append(torch.cat([_pool_rows(rows[:, skipped:], mode) for mode in self._modes(requests[0])], dim=-1))
            at += count * length
        return self._finished(requests[0], torch.cat(pooled))

    def _modes(self, request: EncodeRequest) -> tuple[Pooling, ...]:
        return self.settings.pooling if request.pooling is None else (request.pooling,)

    def _finished(self, request: EncodeRequest, vectors: Tensor) -> Tensor:
        """Return vectors `[..., d]` cut and normalised as the request wants it."""
        if request.dimensions is not None:
            vectors = vectors[..., : request.dimensions]
        default = self.settings.normalize and request.task is EncodeTask.EMBEDDING
        if default if request.normalize is None else request.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _vector(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        if request.pooling is not None:  # the projections were trained behind the model's own pooling
            return self._pool(hidden, request.pooling, 0)
        vector = torch.cat([self._pool(hidden, mode, request.prompt_tokens) for mode in self.settings.pooling])
        return _projected(vector, self._dense)

    def _pool(self, hidden: Tensor, mode: Pooling, skipped: int) -> Tensor:
        """Combine the tokens behind the first `skipped` ones, whose places still count in a weighted mean."""
        tokens = hidden[skipped:]
        if mode in _TOGETHER:
            return _pool_rows(tokens[None], mode)[0]
        if mode is Pooling.WEIGHTED_MEAN:
            weights = torch.arange(skipped + 1, len(hidden) + 1, dtype=torch.float32, device=hidden.device)
            return (weights @ tokens) / weights.sum()
        return self._model.pool(hidden[:1].to(self._model.dtype))[0].float()


def _settings(request: EncodeRequest) -> Hashable:
    """Return what of a request decides how its hidden states become a vector."""
    wanted = (request.task, request.pooling, request.prompt_tokens, request.spans)
    return *wanted, request.normalize, request.dimensions, request.unread


def _pool_rows(rows: Tensor, mode: Pooling) -> Tensor:
    """Combine the tokens of inputs of one length, `[n, L, d]`, each to a vector `[n, d]`."""
    if mode is Pooling.MEAN:
        return rows.mean(dim=1)
    if mode is Pooling.LAST:
        return rows[:, -1]
    if mode is Pooling.CLS:
        return rows[:, 0]
    if mode is Pooling.MAX:
        return rows.amax(dim=1)
    return rows.sum(dim=1) / rows.shape[1] ** 0.5


def _projected(vectors: Tensor, dense: Sequence[tuple[DenseConfig, nn.Linear]]) -> Tensor:
    """Return vectors `[..., d]` through the projections, one after the other."""
    for config, linear in dense:
        found = linear(vectors)
        found = found if config.activation is None else ACTIVATIONS[config.activation](found)
        vectors = found + vectors if config.residual else found
    return vectors


def load_dense(config: DenseConfig, device: torch.device) -> nn.Linear:
    """Load a projection with its weights in float32; raises `CheckpointError` unless exactly its tensors are there."""
    where = f"{config.weights.parent.name}/{config.weights.name}"
    wanted: dict[str, tuple[int, ...]] = {f"{config.prefix}weight": (config.outputs, config.inputs)}
    if config.bias:
        wanted[f"{config.prefix}bias"] = (config.outputs,)
    stored = read_headers([config.weights])
    if config.among_others:
        stored = {name: tensor for name, tensor in stored.items() if name in wanted}
    found = {name: tensor.shape for name, tensor in stored.items()}
    if found != wanted or not all(tensor.holds(None) for tensor in stored.values()):
        raise CheckpointError(f"{where}: expected {wanted}, found {found}")
    state = {}
    with TensorReader(stored) as reader:
        for name, shape in wanted.items():
            width = shape[-1] if len(shape) == 2 else 1
            values = reader.region(name, width, slice(0, width), 0, shape[0])
            state[name.removeprefix(config.prefix)] = values.view(shape)
    with torch.device("meta"):
        linear = nn.Linear(config.inputs, config.outputs, config.bias)
    linear.load_state_dict({name: tensor.float().to(device) for name, tensor in state.items()}, assign=True)
    return linear.requires_grad_(False)
