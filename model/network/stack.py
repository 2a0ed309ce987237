"""A stack of layers, from embedded tokens to hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from model.attention.base import AttentionBackend
from model.cache.paged import KVCache
from model.config.layer import PositionKind
from model.config.model import EmbeddingConfig, StackConfig
from model.network.embeddings import LearnedPositions, SinusoidalPositions, TokenTable
from model.network.inputs import CrossInput, StackInput
from model.network.layer import Block
from model.network.native_stack import NativeStack
from model.network.norms import build_norm
from model.network.rotary import RotaryPositions
from model.network.score_bias import BucketBias, StepBias, bucket_bias


class Stack(nn.Module):
    """Embedded tokens through `num_layers` blocks."""

    def __init__(self, config: StackConfig, embedding: EmbeddingConfig) -> None:
        super().__init__()
        self.config = config
        size = embedding.embedding_size
        self.positions = _added_positions(config, size)
        added = config.token_types and config.position.kind is not PositionKind.XLNET_RELATIVE
        self.types = TokenTable(config.token_types, size) if added else None
        self.embed_norm = build_norm(config.norm, size) if config.embed_norm else nn.Identity()
        self.project = nn.Linear(size, config.hidden_size) if size != config.hidden_size else nn.Identity()
        self.rotary: RotaryPositions | None = None
        self.bias: BucketBias | None = None
        if config.position.rotary is not None:
            self.rotary = RotaryPositions(config.position.rotary)
        buckets = config.position.kind is PositionKind.T5_BUCKETS
        if buckets and not config.position.per_layer:
            self.bias = bucket_bias(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.distinct_layers))
        self.final_norm = build_norm(config.norm, config.hidden_size) if config.final_norm else nn.Identity()
        self.native: NativeStack | None = None  # what runs the layers in C once their weights are packed

    def block(self, index: int) -> Block:
        """The block that layer `index` runs through; layers share blocks where `unique_layers` says so."""
        block = self.layers[index % len(self.layers)]
        assert isinstance(block, Block)
        return block

    def embed(self, tokens: Tensor, inputs: StackInput) -> Tensor:
        """Token vectors `[T, E]` plus position and segment, normalised and projected to `[T, d]`."""
        if self.positions is not None:
            tokens = tokens + self.positions(inputs.positions).to(tokens.dtype)
        if self.types is not None:
            types = inputs.token_types
            tokens = tokens + (self.types.weight[0] if types is None else self.types(types))
        return self.project(self.embed_norm(tokens))

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
    """Rows on their way through the layers of a stack; the way may be interrupted between two layers."""

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
        self._stack, self._inputs, self._backend, self._cache, self._cross = stack, inputs, backend, cache, cross
        x = stack.embed(tokens, inputs)
        self._native = stack.native if stack.native is not None and stack.native.covers(cache, cross) else None
        self._x = x if self._native is None else x.float().contiguous()
        self._rotary = stack.rotary(inputs.positions, self._x.dtype) if stack.rotary is not None else None
        self._bias = StepBias(stack.bias) if stack.bias is not None else None

    @property
    def layers_left(self) -> int:
        return self._stack.config.num_layers - self.layers_done

    def advance(self, layers: int) -> None:
        """Compute the next so many layers, or all that are left."""
        first = self.layers_done
        self.layers_done += min(layers, self.layers_left)
        if self._native is not None:
            path = range(first, self.layers_done)
            self._native(self._x, self._inputs, self._cache, self._cross, self._rotary, path)
            return
        for index in range(first, self.layers_done):
            self._block(index)
        if not self.layers_left:
            self._x = self._stack.final_norm(self._x)

    def finish(self) -> Tensor:
        """The hidden states `[T, d]` behind the final norm; float32 where the layers run in C."""
        if self.layers_left:
            self.advance(self.layers_left)
        return self._x

    def _block(self, index: int) -> None:
        stack, inputs = self._stack, self._inputs
        if index > 0 and stack.positions is not None and stack.config.position.every_layer:
            self._x = self._x + stack.positions(inputs.positions).to(self._x.dtype)
        cache = self._cache.layers[index] if self._cache is not None else None
        block = stack.block(index)
        self._x = block(self._x, inputs, self._backend, cache, self._rotary, self._bias, self._cross)


def _added_positions(config: StackConfig, size: int) -> nn.Module | None:
    if config.position.kind is PositionKind.LEARNED:
        return LearnedPositions(config.position, size)
    if config.position.kind is PositionKind.SINUSOIDAL:
        return SinusoidalPositions(config.position, size)
    return None
