"""A stack of layers, from embedded tokens to hidden states."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.model.attention.base import AttentionBackend
from triptych.model.cache.kv_cache import KVCache
from triptych.model.config.attention import BucketBiasConfig
from triptych.model.config.model import EmbeddingConfig
from triptych.model.config.stack import PositionKind, StackConfig
from triptych.model.linear.base import Linear, LinearSpec, Part
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.activation_dump import PassDump, Write
from triptych.model.network.adapters import MaskedAdapters
from triptych.model.network.disentangled import RelativeTable
from triptych.model.network.embeddings import (
    Convolution,
    LayerEmbeddings,
    LearnedPositions,
    SinusoidalPositions,
    TokenTable,
)
from triptych.model.network.inputs import CrossInput, GivenRows, StackInput, StepContext
from triptych.model.network.layer import Layer, Residual
from triptych.model.network.norms import build_norm
from triptych.model.network.positions import BucketBias


class StackRunner(Protocol):
    """A computation of a stack's layers that replaces its modules (in C)."""

    def covers(self, cache: KVCache | None, cross: CrossInput | None) -> bool:
        """Whether it can compute a step with this cache and encoder output."""

    def __call__(
        self,
        x: Tensor,  # [T, d] float32, contiguous
        context: StepContext,
        cache: KVCache | None,
        layers: range,
    ) -> None:
        """Take `x` through these layers in place, then through the final norm if the last layer is among them."""


class Stack(nn.Module):
    """A stack of layers with its embedding of positions and its final norm."""

    def __init__(
        self, config: StackConfig, embedding: EmbeddingConfig, linear: LinearFactory, source_size: int | None = None
    ) -> None:
        """`source_size` is the width of what cross attention reads; None: the stack's own."""
        super().__init__()
        self.config = config
        size = embedding.embedding_size
        self.positions = _added_positions(config, config.hidden_size if config.positions_last else size)
        added = config.token_types and not config.has_xlnet_layers
        self.types = TokenTable(config.token_types, size) if added else None
        self.task = nn.Parameter(torch.empty(size)) if config.tasks else None
        self._types_name = f"{linear.prefix}types"
        self.embed_norm = build_norm(config.embed_norm, config.hidden_size if config.embed_norm_last else size)
        self.project: nn.Module = nn.Identity()
        if config.projects(size):
            self.project = linear(LinearSpec("project", size, (Part(config.hidden_size),), config.project_bias))
        self.bias = _shared_bias(config)
        self.relative: RelativeTable | None = None
        if config.relative_span is not None:
            self.relative = RelativeTable(config.relative_span, config.relative_norm, config.hidden_size)
        self.convolution: Convolution | None = None
        if config.convolution is not None:
            self.convolution = Convolution(config.convolution, config.hidden_size, linear.within("convolution"))
        self.layer_embeddings: LayerEmbeddings | None = None
        if config.layer_embedding is not None:
            within = linear.within("layer_embeddings")
            self.layer_embeddings = LayerEmbeddings(config.layer_embedding, embedding, config.num_layers, within)
        self.layers = nn.ModuleList(
            Layer(
                layer,
                config.hidden_size,
                linear.within(f"layers.{index}"),
                causal=config.causal,
                source_size=source_size or config.hidden_size,
            )
            for index, layer in enumerate(config.distinct_layers)
        )
        self.final_norm = build_norm(config.final_norm, config.hidden_size)
        self.output: Linear | None = None
        if config.output_size is not None:
            part = Part(config.output_size)
            self.output = linear(LinearSpec("output", config.hidden_size, (part,), bias=False))
        self._weights_of = config.weights_of
        self.runner: StackRunner | None = None  # computes the layers if it covers them; set once the weights are loaded
        self.dump: Write | None = None  # takes the hidden states of each pass, for debugging

    @property
    def distinct_layers(self) -> list[Layer]:
        """The layers that have weights of their own."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def layer(self, index: int) -> Layer:
        """Return the module of layer `index`; layers that share weights have the same one."""
        layer = self.layers[self._weights_of[index]]
        assert isinstance(layer, Layer)
        return layer

    def embed(self, tokens: Tensor, inputs: StackInput) -> Tensor:
        """Return token vectors `[T, E]` plus position and segment, normalised and projected to `[T, d]`."""
        if self.positions is not None and not self.config.positions_last:
            tokens = tokens + self.positions(inputs.positions).to(tokens.dtype)
        if self.types is not None:
            types = inputs.token_types
            added = self.types.weight[0] if types is None else self.types(types)
            if inputs.adapters is not None:
                ids = torch.zeros_like(inputs.input_ids) if types is None else types
                added = inputs.adapters.embedded(self._types_name, ids, added)
            tokens = tokens + added
        if self.task is not None:
            tokens = tokens + self.task
        last = self.config.embed_norm_last
        x: Tensor = self.embed_norm(self.project(tokens)) if last else self.project(self.embed_norm(tokens))
        if self.positions is not None and self.config.positions_last:
            x = x + self.positions(inputs.positions).to(x.dtype)
        return x

    def forward(
        self,
        tokens: Tensor,  # [T, E]
        inputs: StackInput,
        backend: AttentionBackend,
        cache: KVCache | None = None,
        cross: CrossInput | None = None,
    ) -> Tensor:
        return StackPass(self, tokens, inputs, backend, cache, cross).finish()


class StackPass:
    """A pass of rows through the layers of a stack, which may be interrupted between two layers."""

    def __init__(
        self,
        stack: Stack,
        tokens: Tensor,  # [T, E]
        inputs: StackInput,
        backend: AttentionBackend,
        cache: KVCache | None = None,
        cross: CrossInput | None = None,
    ) -> None:
        self.layers_done = 0
        self._stack, self._cache = stack, cache
        self._given = inputs.given
        x = stack.embed(tokens, inputs)
        plain = inputs.read_rows is None and not isinstance(inputs.adapters, MaskedAdapters)
        covers = plain and stack.runner is not None and stack.runner.covers(cache, cross)
        self._runner = stack.runner if covers else None
        x = x if self._runner is None else x.float().contiguous()
        self._residual = Residual(x)
        self._dump = PassDump(stack.dump, inputs.input_ids, x) if stack.dump is not None else None
        vectors = None
        if stack.layer_embeddings is not None:
            ids, given = inputs.input_ids, inputs.given
            if given is not None and given.layer_token is not None:
                ids = ids.index_fill(0, given.rows, given.layer_token)
            vectors = stack.layer_embeddings(ids, tokens)
        owners = stack.config.key_owners
        self._step = StepContext(inputs, backend, cross, x.dtype, stack.bias, stack.relative, owners, vectors)

    @property
    def layers_left(self) -> int:
        return self._stack.config.num_layers - self.layers_done

    def advance(self, layers: int) -> None:
        """Compute the next `layers` layers, or all remaining ones; the last one includes the final norm."""
        layers = min(layers, self.layers_left)
        if self._dump is not None:
            while layers > 0 and self.layers_left > 1:
                self._compute(1)
                self._dump.add_layer(self.layers_done - 1, self._residual.whole)
                layers -= 1
        if layers > 0:
            self._compute(layers)

    def _add(self, given: GivenRows, layer: int) -> None:
        """Add the vectors that are given for a layer (`GivenRows.added`) to its output."""
        x = self._residual.whole
        self._residual = Residual(x.index_add(0, given.rows, given.added[layer].to(x.dtype)))

    @property
    def hidden(self) -> Tensor:
        """The hidden states `[T, d]` after the layers that are done; a later step may overwrite them."""
        return self._residual.whole

    def _compute(self, layers: int) -> None:
        while self._given is not None and layers > 0 and self.layers_done < len(self._given.added):
            self._run(1)
            self._add(self._given, self.layers_done - 1)
            layers -= 1
        if layers > 0:
            self._run(layers)

    def _run(self, layers: int) -> None:
        first = self.layers_done
        self.layers_done += layers
        if self._runner is not None:
            self._runner(self._residual.x, self._step, self._cache, range(first, self.layers_done))
            return
        for index in range(first, self.layers_done):
            self._layer(index)
        if not self.layers_left:
            self._residual = Residual(self._residual.normed(self._stack.final_norm)[1])

    def finish(self) -> Tensor:
        """Return the hidden states `[T, output_width]` after the final norm; float32 where the layers run in C."""
        if self.layers_left:
            self.advance(self.layers_left)
        hidden, output = self._residual.whole, self._stack.output
        hidden = hidden if output is None else output(hidden.to(output.dtype))
        if self._dump is not None:
            self._dump.finish(hidden)
        return hidden

    def _layer(self, index: int) -> None:
        stack, step, before = self._stack, self._step, self._residual
        if index > 0 and stack.positions is not None and stack.config.position.every_layer:
            x = before.whole
            before = Residual(x + stack.positions(step.inputs.positions).to(x.dtype))
        cache = self._cache.of_layer(index) if self._cache is not None else None
        step.layer = index
        self._residual = stack.layer(index).advance(before, step, cache)
        if index == 0 and stack.convolution is not None:
            self._residual = Residual(stack.convolution(before.whole, self._residual.whole, step.inputs.metadata))


def _shared_bias(config: StackConfig) -> BucketBias | None:
    """Return the table of bucketed biases that the layers share (T5), if there is one."""
    if (shared := config.shared_bias) is None:
        return None
    attention = shared.attention
    assert isinstance(attention.position, BucketBiasConfig)
    return BucketBias(attention.position, attention.num_heads, bidirectional=not config.causal)


def _added_positions(config: StackConfig, size: int) -> nn.Module | None:
    if config.position.kind is PositionKind.LEARNED:
        return LearnedPositions(config.position, size)
    if config.position.kind is PositionKind.SINUSOIDAL:
        return SinusoidalPositions(config.position, size)
    return None
