"""The one Transformer: every family is this network under another `ModelConfig`.

Everything is packed: `[T]` token ids of all sequences of a step, one after the other, and metadata that says where each
begins. The network keeps no state between calls; keys and values live in the pool that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention.base import AttentionBackend, AttentionMetadata, ScoreBias
from model.cache.paged import KVCache, LayerCache
from model.config.model import (
    ClassifierConfig,
    ClassifierInput,
    EmbeddingConfig,
    ImageConfig,
    ModelConfig,
    PositionKind,
    StackConfig,
)
from model.linear.native import PackedLinear
from model.native.library import Kind, Library
from model.network.attention import ACTIVATIONS, MLP, CrossAttention, SelfAttention, build_norm
from model.network.fused_ops import add_norm
from model.network.native_stack import NativeStack
from model.network.score_bias import (
    BucketBias,
    LearnedPositions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
    StepBias,
)


@dataclass(frozen=True, slots=True)
class StackInput:
    """What a stack reads: one row a token."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    metadata: AttentionMetadata
    token_types: Tensor | None = None  # [T]; None: all of segment 0
    pixels: Tensor | None = None  # [B, channels, size, size] instead of token ids, normalised


@dataclass(frozen=True, slots=True)
class CrossInput:
    """What a decoder attends to: the memory itself, or nothing where its keys and values are in the pool."""

    metadata: AttentionMetadata
    memory: Tensor | None = None  # [S, d]


class Block(nn.Module):
    """`x = out(x + sublayer(in(x)))` for attention, cross attention and MLP; an empty norm slot is the identity."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()

        def slot(filled: bool) -> nn.Module:
            return build_norm(config.norm, config.hidden_size) if filled else nn.Identity()

        self.parallel = config.parallel
        self.attn_in, self.attn_out = slot(config.pre_norm), slot(config.post_norm)
        self.attn = SelfAttention(config.attention, config.hidden_size, config.norm)
        per_layer = config.position.kind is PositionKind.T5_BUCKETS and config.position.per_layer
        self.bias = _bucket_bias(config) if per_layer else None
        self.relative: RelativeBias | None = None
        if config.position.kind is PositionKind.XLNET_RELATIVE:
            self.relative = RelativeBias(config.attention, config.hidden_size)
        self.cross: CrossAttention | None = None
        if config.cross_attention:
            self.cross_in, self.cross_out = slot(config.pre_norm), slot(config.post_norm)
            self.cross = CrossAttention(config.attention, config.hidden_size)
        self.ffn_in, self.ffn_out = slot(config.pre_norm), slot(config.post_norm)
        self.mlp = MLP(config.mlp, config.hidden_size)

    def forward(
        self,
        x: Tensor,  # [T, d]
        inputs: StackInput,
        backend: AttentionBackend,
        cache: LayerCache | None,
        rotary: tuple[Tensor, Tensor] | None,
        bias: ScoreBias | None,
        cross: CrossInput | None,
    ) -> Tensor:
        mixed = self.attn(self.attn_in(x), backend, inputs.metadata, cache, rotary, self._own_bias(inputs) or bias)
        if self.parallel:
            return x + mixed + self.mlp(self.ffn_in(x))
        following = self.ffn_in if self.cross is None else self.cross_in
        x, read = _join(x, mixed, self.attn_out, following)
        if self.cross is not None:
            assert cross is not None
            mixed = self.cross(read, backend, cross.metadata, cache, cross.memory)
            x, read = _join(x, mixed, self.cross_out, self.ffn_in)
        return self.ffn_out(x + self.mlp(read))

    def _own_bias(self, inputs: StackInput) -> ScoreBias | None:
        """The bias of a layer that does not share its stack's."""
        relative, offset = self.relative, self.attn.offset
        if relative is None or offset is None:
            return self.bias
        return lambda query, group: relative.scores(query, group, offset, inputs.token_types)


def _join(x: Tensor, mixed: Tensor, norm: nn.Module, following: nn.Module) -> tuple[Tensor, Tensor]:
    """`norm(x + mixed)`, and that as the next sublayer reads it; whichever norm is there comes with the sum."""
    if isinstance(norm, nn.Identity):
        return add_norm(x, mixed, following)
    x = add_norm(x, mixed, norm)[1]
    return x, following(x)


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
            self.bias = _bucket_bias(config)
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


class TokenTable(nn.Embedding):
    """Token vectors, which may be kept in a narrower dtype than the network computes in."""

    def __init__(self, rows: int, size: int) -> None:
        # Not drawn at random: for that, on the meta device, torch would load its compiler, a second or two.
        super().__init__(rows, size, _weight=torch.empty(rows, size))
        self.vector_dtype: torch.dtype | None = None  # None: the table's own

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, E]
        vectors = super().forward(ids)
        return vectors if self.vector_dtype is None else vectors.to(self.vector_dtype)


def _bucket_bias(config: StackConfig) -> BucketBias:
    return BucketBias(config.position, config.attention.num_heads, bidirectional=not config.causal)


def _added_positions(config: StackConfig, size: int) -> nn.Module | None:
    if config.position.kind is PositionKind.LEARNED:
        return LearnedPositions(config.position, size)
    if config.position.kind is PositionKind.SINUSOIDAL:
        return SinusoidalPositions(config.position, size)
    return None


class Head(nn.Module):
    """Hidden states to logits; the matrix is the token table's where they are tied."""

    def __init__(self, config: ModelConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.head is not None
        vocab = config.embedding.vocab_size
        self.scale = config.head.scale
        self.weight = None if config.head.tied else nn.Parameter(torch.empty(vocab, hidden_size))
        self.bias = nn.Parameter(torch.zeros(vocab)) if config.head.bias else None
        self.packed: PackedLinear | None = None

    def pack(self, library: Library, table: Tensor, kind: Kind | None) -> None:
        """Compute in C from now on; matrix and bias are given up, a tied table stays for the embeddings.

        On the meta device that is room, as in `PackedLinear`.
        """
        weight = table if self.weight is None else self.weight
        self.packed = PackedLinear(library, weight, self.bias, kind)
        self.weight = self.bias = None

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.packed is not None:
            return self.packed(hidden)
        return nn.functional.linear(hidden, table if self.weight is None else self.weight, self.bias)


class Classifier(nn.Module):
    """Vectors to scores over labels."""

    def __init__(self, config: ClassifierConfig, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size) if config.dense is not None else None
        self.activation = ACTIVATIONS[config.dense] if config.dense is not None else None
        self.out = nn.Linear(hidden_size, len(config.labels), bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # [N, d] -> [N, labels]
        if self.dense is not None and self.activation is not None:
            x = self.activation(self.dense(x))
        return self.out(x)


class PatchEmbedding(nn.Module):
    """Images to token vectors: one matrix over the flattened patches, behind a learned first token."""

    def __init__(self, config: ImageConfig, size: int) -> None:
        super().__init__()
        self.patch = config.patch
        self.first = nn.Parameter(torch.empty(size))
        self.project = nn.Linear(config.patch_elements, size)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, C, S, S] -> [B * (1 + patches), E]
        patches = nn.functional.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)  # [B, N, C * P * P]
        first = self.first.expand(len(pixels), 1, -1)
        return torch.cat((first, self.project(patches)), dim=1).flatten(0, 1)


class Transformer(nn.Module):
    """Encoder, decoder or both over one token table."""

    can_pause = True  # passes may be interrupted between layers

    def __init__(self, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        size = config.embedding.embedding_size
        vocab = config.embedding.vocab_size
        self.tokens: nn.Embedding | None = TokenTable(vocab, size) if vocab else None
        self.patches = PatchEmbedding(config.image, size) if config.image is not None else None
        self.encoder = Stack(config.encoder, config.embedding) if config.encoder is not None else None
        self.decoder = Stack(config.decoder, config.embedding) if config.decoder is not None else None
        hidden_size = next(reversed(config.stacks.values())).hidden_size
        self.head = Head(config, hidden_size) if config.head is not None else None
        self.classifier = Classifier(config.classifier, hidden_size) if config.classifier is not None else None
        self.pooler = nn.Linear(hidden_size, hidden_size) if config.pooler else None

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; of quantised matrices, what their rows come and go in."""
        return next(parameter for name, parameter in self.named_parameters() if name != "tokens.weight").dtype

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        assert self.tokens is not None
        vectors = self.tokens(input_ids)  # [T, E]
        return vectors * self.config.embedding.scale if self.config.embedding.scale != 1.0 else vectors

    def encode(self, inputs: StackInput) -> Tensor:
        """The encoder's hidden states `[T, d]`, every token seeing its whole segment."""
        assert self.encoder is not None
        return self.encoder(self._embedded(inputs), inputs, self.backend)

    def begin(self, inputs: StackInput) -> StackPass:
        """A pass through the first stack, without a cache, that may be interrupted between layers."""
        stack = self.encoder if self.encoder is not None else self.decoder
        assert stack is not None
        return StackPass(stack, self._embedded(inputs), inputs, self.backend)

    def _embedded(self, inputs: StackInput) -> Tensor:
        """Vectors `[T, E]` of tokens or image patches."""
        if inputs.pixels is None:
            return self.embed_tokens(inputs.input_ids)
        assert self.patches is not None
        return self.patches(inputs.pixels.to(self.dtype))

    def write_memory(self, memory: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Put each decoder layer's cross keys and values of `memory` `[S, d]` at `slots` `[S]` of the pool."""
        assert self.decoder is not None
        for index, layer_cache in enumerate(cache.layers):
            cross = self.decoder.block(index).cross
            assert cross is not None
            layer_cache.write(slots, *cross.project(memory))

    def decode(self, inputs: StackInput, cache: KVCache | None = None, cross: CrossInput | None = None) -> Tensor:
        """The decoder's hidden states `[T, d]`."""
        assert self.decoder is not None
        return self.decoder(self.embed_tokens(inputs.input_ids), inputs, self.backend, cache, cross)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary `[N, V]` of hidden states `[N, d]`."""
        assert self.head is not None
        assert self.tokens is not None
        return self.head(hidden, self.tokens.weight)

    def pool(self, first: Tensor) -> Tensor:
        """The pooler's `tanh(W x + b)` of first tokens `[B, d]`."""
        assert self.pooler is not None
        return torch.tanh(self.pooler(first.to(self.dtype)))

    def classify(self, hidden: Tensor) -> Tensor:
        """Scores over the labels of one segment's hidden states `[L, d]`: `[1, labels]`, or `[L, labels]` of tokens."""
        assert self.classifier is not None and self.config.classifier is not None
        source = self.config.classifier.input
        hidden = hidden.to(self.dtype)  # stacks in C give float32
        if source is ClassifierInput.EVERY:
            return self.classifier(hidden)
        vector = hidden[-1:] if source is ClassifierInput.LAST else hidden[:1]
        return self.classifier(self.pool(vector) if source is ClassifierInput.POOLER else vector)
