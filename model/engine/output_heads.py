"""Turns hidden states into results: vectors of whole inputs, candidates for masked tokens, sparse vectors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.api.request import EncodeRequest, EncodeTask, Pooling
from triptych.model.checkpoint.sentence_modules import DenseConfig, UnitLength, VectorNorm, VectorStep
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.checkpoint.tensor_files import TensorReader, read_headers
from triptych.model.errors import CheckpointError
from triptych.model.network.transformer import Transformer
from triptych.model.system.devices import to_device

# -- From an input's hidden states to its vector: pooling, the modules after it, truncation.

_RESIDUAL = "residual.weight"
_TOGETHER = frozenset({Pooling.MEAN, Pooling.LAST, Pooling.CLS, Pooling.MAX, Pooling.MEAN_SQRT_LEN})


class SentenceHead:
    """Computes one model's vectors in float32, by its settings and those of a request."""

    def __init__(self, model: Transformer, settings: SentenceSettings, device: torch.device) -> None:
        """Load the modules after the pooling; raises `CheckpointError` if their tensors do not fit."""
        self.settings = settings
        self.together = device.type != "cpu"
        self._model = model
        self._steps = [load_step(step, device) for step in settings.steps]
        late = settings.late.dense if settings.late is not None else ()
        self._token_steps = [load_step(step, device) for step in late]

    def __call__(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        """Return the vector `[D]` of hidden states `[L, d]`, or `[L, D]` for a request for tokens' vectors.

        A request with spans gets one vector for each (Günther et al. 2024: late chunking), `[spans, D]`.
        """
        if request.task is EncodeTask.MULTI_VECTOR:
            counted = hidden[list(request.positions)] if request.positions else hidden
            return nn.functional.normalize(_stepped(counted, self._token_steps), dim=-1)
        if request.spans:
            vectors = torch.stack([self._vector(request, hidden[start:end]) for start, end in request.spans])
        else:
            vectors = hidden if request.task is EncodeTask.TOKENS else self._vector(request, hidden)
        return self._finished(request, vectors)

    def can_pool_together(self, requests: Sequence[EncodeRequest]) -> bool:
        """Whether the inputs get one vector each in the same way, without a product: its bits depend on the rows."""
        first, others = requests[0], requests[1:]
        if first.task is not EncodeTask.EMBEDDING:
            return False
        settings = _settings(first)
        if any(_settings(one) != settings for one in others):
            return False
        if first.pooling is None and (self._steps or self._model.joint is not None):
            return False
        return not first.spans and _TOGETHER.issuperset(self._modes(first))

    def pool_together(self, requests: Sequence[EncodeRequest], hidden: Tensor) -> Tensor:
        """Return the vectors `[n, D]` of the packed hidden states `[T, d]` of inputs that `can_pool_together`.

        Neighbours of equal length are pooled by one operation; the bits are those of each alone. On a GPU inputs of
        different lengths are pooled by a few operations.
        """
        pooled, at = [], 0
        skipped = 0 if requests[0].pooling is not None else requests[0].prompt_tokens
        lengths = [request.source.num_positions for request in requests]
        if self.together and len(set(lengths)) > 1:
            return self._finished(requests[0], _pool_packed(hidden, lengths, skipped, self._modes(requests[0])))
        for length, run in groupby(lengths):
            count = len(list(run))
            rows = hidden[at : at + count * length].view(count, length, -1)
            pooled.append(torch.cat([_pool_rows(rows[:, skipped:], mode) for mode in self._modes(requests[0])], dim=-1))
            at += count * length
        return self._finished(requests[0], torch.cat(pooled))

    def _modes(self, request: EncodeRequest) -> tuple[Pooling, ...]:
        return self.settings.pooling if request.pooling is None else (request.pooling,)

    def _finished(self, request: EncodeRequest, vectors: Tensor) -> Tensor:
        """Return vectors `[..., d]` cut and normalised as the request wants it."""
        own = request.task is EncodeTask.EMBEDDING and request.pooling is None
        cut = self.settings.truncate_dim if own else None
        default = self.settings.normalize and request.task is EncodeTask.EMBEDDING
        if cut is not None and request.dimensions is None and request.normalize is None:
            # As in sentence-transformers: cut after the normalisation, so vectors are shorter than 1.
            whole = nn.functional.normalize(vectors, dim=-1) if default else vectors
            return whole[..., :cut]
        vectors = vectors[..., : request.dimensions or cut]
        if default if request.normalize is None else request.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _vector(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        if request.pooling is not None:  # the projections were trained for the model's own pooling
            return self._pool(request, hidden, request.pooling, 0)
        if (joint := self._model.joint) is not None:
            rows, ids = hidden.to(self._model.dtype), request.source.token_ids
            vector = (joint.of_text(rows, ids) if ids else joint.of_image(rows)).float()
        else:
            vector = torch.cat(
                [self._pool(request, hidden, mode, request.prompt_tokens) for mode in self.settings.pooling]
            )
        return _stepped(vector, self._steps)

    def _pool(self, request: EncodeRequest, hidden: Tensor, mode: Pooling, skipped: int) -> Tensor:
        """Combine the tokens after the first `skipped` ones; in a weighted mean they keep their positions."""
        tokens = hidden[skipped:]
        if mode in _TOGETHER:
            return _pool_rows(tokens[None], mode)[0]
        if mode is Pooling.WEIGHTED_MEAN:
            weights = torch.arange(skipped + 1, len(hidden) + 1, dtype=torch.float32, device=hidden.device)
            return (weights @ tokens) / weights.sum()
        adapter = self._model.lora.get(request.model)
        return self._model.pool(hidden[:1].to(self._model.dtype), adapter)[0].float()


def _settings(request: EncodeRequest) -> Hashable:
    """Return the fields of a request that decide how its hidden states become a vector."""
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


def _pool_packed(hidden: Tensor, lengths: Sequence[int], skipped: int, modes: Sequence[Pooling]) -> Tensor:
    """Combine the tokens of packed inputs of any lengths, `[T, d]`, but the first `skipped` of each, to `[n, D]`."""
    counts = np.array(lengths) - skipped
    rows = np.arange(len(hidden))
    if skipped:
        rows = np.concatenate([rows[end - count : end] for count, end in zip(counts, np.cumsum(lengths), strict=True)])
    ends = np.cumsum(counts)
    numbers = to_device(torch.from_numpy(np.concatenate((rows, ends - counts, ends - 1, counts))), hidden.device)
    rows_read, first, last, count = numbers.split([len(rows), *[len(lengths)] * 3])

    def pooled(mode: Pooling) -> Tensor:
        if mode in (Pooling.CLS, Pooling.LAST):
            return hidden[rows_read[first if mode is Pooling.CLS else last]]
        how = "max" if mode is Pooling.MAX else "mean"
        vectors = functional.embedding_bag(rows_read, hidden, first, mode=how)
        return vectors * count[:, None].float().sqrt() if mode is Pooling.MEAN_SQRT_LEN else vectors

    return torch.cat([pooled(mode) for mode in modes], dim=-1)


def _stepped(vectors: Tensor, steps: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Return vectors `[..., d]` after the steps, one after the other."""
    for step in steps:
        vectors = step(vectors)
    return vectors


def load_step(step: VectorStep, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function of vectors `[..., d]`, weights in float32; raises `CheckpointError` if they do not fit."""
    if isinstance(step, UnitLength):
        return partial(nn.functional.normalize, dim=-1)
    if isinstance(step, VectorNorm):
        found = _loaded(step.weights, {f"norm.{name}": (step.size,) for name in ("weight", "bias")}, device)
        weight, bias = found["norm.weight"], found["norm.bias"]
        return lambda vectors: nn.functional.layer_norm(vectors, (step.size,), weight, bias)
    return Projection(step, device)


class Projection:
    """Computes `activation(W x + b)`, plus x or a projection of x."""

    def __init__(self, config: DenseConfig, device: torch.device) -> None:
        """Load the weights; raises `CheckpointError` unless exactly its tensors are there."""
        self._linear = load_dense(config, device)
        self._activation: nn.Module = getattr(nn, config.activation)()
        self._residual: Tensor | None = None
        self._adds = config.residual
        if projected(config):
            self._residual = _loaded(config.weights, _tensors(config), device)[_RESIDUAL]

    def __call__(self, vectors: Tensor) -> Tensor:
        found: Tensor = self._activation(self._linear(vectors))
        if not self._adds:
            return found
        return found + (vectors if self._residual is None else vectors @ self._residual.t())


def projected(config: DenseConfig) -> bool:
    """Whether the residual has a matrix of its own, because the width changes."""
    return config.residual and config.inputs != config.outputs


def _tensors(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    wanted: dict[str, tuple[int, ...]] = {f"{config.prefix}weight": (config.outputs, config.inputs)}
    if config.bias:
        wanted[f"{config.prefix}bias"] = (config.outputs,)
    if projected(config):
        wanted[_RESIDUAL] = (config.outputs, config.inputs)
    return wanted


def load_dense(config: DenseConfig, device: torch.device) -> nn.Linear:
    """Load a projection with its weights in float32; raises `CheckpointError` unless exactly its tensors are there."""
    tensors = _loaded(config.weights, _tensors(config), device, among_others=config.among_others)
    with torch.device("meta"):
        linear = nn.Linear(config.inputs, config.outputs, config.bias)
    state = {name.removeprefix(config.prefix): tensor for name, tensor in tensors.items() if name != _RESIDUAL}
    linear.load_state_dict(state, assign=True)
    return linear.requires_grad_(False)


def _loaded(
    file: Path, wanted: Mapping[str, tuple[int, ...]], device: torch.device, *, among_others: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a module's file in float32; raises `CheckpointError` unless exactly these are there."""
    stored = read_headers([file])
    if among_others:
        stored = {name: tensor for name, tensor in stored.items() if name in wanted}
    found = {name: tensor.shape for name, tensor in stored.items()}
    if found != wanted or not all(tensor.holds(None) for tensor in stored.values()):
        raise CheckpointError(f"{file.parent.name}/{file.name}: expected {wanted}, found {found}")
    values = {}
    with TensorReader(stored) as reader:
        for name, shape in wanted.items():
            width = shape[-1] if len(shape) == 2 else 1
            values[name] = reader.region(name, width, slice(0, width), 0, shape[0]).view(shape).float().to(device)
    return values


# -- From hidden states to results over the vocabulary: candidates for masked tokens, and sparse vectors.

_CPU_ROWS = 32  # rows of every product with the vocabulary, so that a row's bits do not depend on its neighbours
_GPU_ROWS = 1024


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """The numbers of one input, and the token ids that they belong to, if there are any."""

    values: Tensor
    indices: Tensor | None = None  # same shape


class VocabularyHead:
    """Computes one model's results over the vocabulary, by its masked-language-model head, in blocks of rows.

    The largest tensor is a block's logits `[rows, V]`, whatever the number of inputs.
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
