"""The way from an input's hidden states to its vector: pooling, projections, normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.api.request import EncodeRequest, EncodeTask, Pooling
from model.checkpoint.sentence_transformers import DenseConfig, SentenceSettings
from model.checkpoint.tensor_files import TensorReader, read_headers
from model.errors import CheckpointError
from model.network.mlp import ACTIVATIONS
from model.network.transformer import Transformer


class SentenceHead:
    """Computes one model's vectors in float32, by its settings and by what a request asks for instead."""

    def __init__(self, model: Transformer, settings: SentenceSettings, device: torch.device) -> None:
        """Load the projections; raises `CheckpointError` if their tensors do not fit."""
        self.settings = settings
        self._model = model
        self._dense = [(config, load_dense(config, device)) for config in settings.dense]

    def __call__(self, request: EncodeRequest, hidden: Tensor) -> Tensor:
        """Return the vector `[D]` of hidden states `[L, d]`, or `[L, D]` for a request for tokens' vectors."""
        vectors = hidden if request.task is EncodeTask.TOKENS else self._vector(request, hidden)
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
        for config, linear in self._dense:
            found = linear(vector)
            found = found if config.activation is None else ACTIVATIONS[config.activation](found)
            vector = found + vector if config.residual else found
        return vector

    def _pool(self, hidden: Tensor, mode: Pooling, skipped: int) -> Tensor:
        """Combine the tokens behind the first `skipped` ones, whose places still count in a weighted mean."""
        tokens = hidden[skipped:]
        if mode is Pooling.MEAN:
            return tokens.mean(dim=0)
        if mode is Pooling.LAST:
            return tokens[-1]
        if mode is Pooling.CLS:
            return tokens[0]
        if mode is Pooling.MAX:
            return tokens.amax(dim=0)
        if mode is Pooling.MEAN_SQRT_LEN:
            return tokens.sum(dim=0) / len(tokens) ** 0.5
        if mode is Pooling.WEIGHTED_MEAN:
            weights = torch.arange(skipped + 1, len(hidden) + 1, dtype=torch.float32, device=hidden.device)
            return (weights @ tokens) / weights.sum()
        return self._model.pool(hidden[:1].to(self._model.dtype))[0].float()


def load_dense(config: DenseConfig, device: torch.device) -> nn.Linear:
    """Load a projection with its weights in float32; raises `CheckpointError` unless exactly its tensors are there."""
    where = f"{config.weights.parent.name}/{config.weights.name}"
    stored = read_headers([config.weights])
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": (config.outputs, config.inputs)}
    if config.bias:
        wanted["linear.bias"] = (config.outputs,)
    found = {name: tensor.shape for name, tensor in stored.items()}
    if found != wanted or not all(tensor.holds(None) for tensor in stored.values()):
        raise CheckpointError(f"{where}: expected {wanted}, found {found}")
    state = {}
    with TensorReader(stored) as reader:
        for name, shape in wanted.items():
            width = shape[-1] if len(shape) == 2 else 1
            state[name.removeprefix("linear.")] = reader.region(name, width, slice(0, width), 0, shape[0]).view(shape)
    with torch.device("meta"):
        linear = nn.Linear(config.inputs, config.outputs, config.bias)
    linear.load_state_dict({name: tensor.float().to(device) for name, tensor in state.items()}, assign=True)
    return linear.requires_grad_(False)
