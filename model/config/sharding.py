"""Which part of every parameter a rank holds, as data (Shoeybi et al. 2019, section 3). Pure; opens no file, no torch.

Matrices that output heads or MLP columns are split by rows, those that read them by columns: in between a rank needs
nothing from other ranks, and a sum over ranks ends each sublayer. A projection's `LinearSpec` says how it is split
(`triptych.model.linear.base`). The token table and the head are split by vocabulary. `_SPLITS` lists the other
parameters that are split; each rank has the rest whole (norms, positions, classifiers, biases of sums).

A rank's network has a smaller configuration (`Shard.config`), and takes its sums over all ranks
(`triptych.model.network.transformer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from triptych.model.config.attention import AlibiConfig, AttentionConfig, GatedDeltaConfig, NormSpan
from triptych.model.config.layer import ExpertsConfig, LayerConfig, MLPConfig
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.errors import ConfigError

Shape = tuple[int, ...]
Range = tuple[int, int]
Index = tuple[slice, ...]

# Parameters other than projections that ranks divide: the dimension that is split, and what it counts.
_SPLITS: tuple[tuple[str, int, str], ...] = (
    ("*.attn.offset", 0, "heads"),
    ("*.attn.sinks", 0, "heads"),
    ("*.attn.q_norm.weight", 0, "normed heads"),
    ("*.attn.k_norm.weight", 0, "normed key heads"),
    ("*.delta.convolution", 0, "channels"),
    ("*.delta.decay", 0, "value heads"),
    ("*.delta.dt_bias", 0, "value heads"),
    ("*.bias.weight", 1, "heads"),  # T5's buckets
    ("*.relative.*_offset", 0, "heads"),
    ("*.relative.segments", 1, "heads"),
    ("tokens.weight", 0, "vocabulary"),
    ("*.layer_embeddings.tokens.weight", 0, "vocabulary"),
    ("source_tokens.weight", 0, "source vocabulary"),
)


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The part of a parameter that a rank has: consecutive `ranges` of dimension `dim`."""

    dim: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`, and the part of the network that it has."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise `ConfigError` for a model that cannot be split over this many ranks."""
        block = _block_of(config)
        if config.vision is not None and self.size > 1:
            raise ConfigError(
                f"tensor_parallel_size {self.size}: a {config.model_type} with a stack for images is not split"
            )
        for name, stack in config.stacks.items() if self.size > 1 else ():
            for layer in stack.distinct_layers:
                self._check_layer(name, layer, block)

    def _check_layer(self, name: str, layer: LayerConfig, block: int) -> None:
        if isinstance(layer.mixer, GatedDeltaConfig) and layer.mixer.num_key_heads % self.size:
            heads = layer.mixer.num_key_heads
            raise ConfigError(f"tensor_parallel_size {self.size} must divide the {heads} recurrent heads of the {name}")
        for attention in (layer.mixer, layer.cross):
            if not isinstance(attention, AttentionConfig):
                continue
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            if heads % self.size:
                raise ConfigError(f"tensor_parallel_size {self.size} must divide the {heads} heads of the {name}")
            if kv_heads % self.size and self.size % kv_heads:
                raise ConfigError(
                    f"tensor_parallel_size {self.size} must divide the {kv_heads} key and value heads of the {name}, "
                    "or be a multiple of them"
                )
        mlps = layer.feed_forward
        if isinstance(mlps, ExpertsConfig):
            divided = self.held_experts(mlps.count, mlps.mlp.intermediate_size, block) is None
            found = [*([mlps.mlp] if divided else []), *([mlps.shared] if mlps.shared is not None else [])]
        else:
            found = [mlps]
        for mlp in found:
            columns, together = mlp.intermediate_size, _together(mlp.intermediate_size, block)
            if columns // together < self.size:
                blocks = f" in blocks of {together} that share a scale" if together > 1 else ""
                raise ConfigError(
                    f"tensor_parallel_size {self.size} is more than the columns of the {name}'s MLP: {columns}{blocks}"
                )

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's network."""
        block = _block_of(whole)

        def own(layer: LayerConfig) -> LayerConfig:
            return self._layer(layer, block)

        return replace(
            whole,
            embedding=self._embedding(whole.embedding),
            source_embedding=whole.source_embedding and self._embedding(whole.source_embedding),
            encoder=whole.encoder and whole.encoder.with_layers(own),
            decoder=whole.decoder and whole.decoder.with_layers(own),
        )

    def _embedding(self, whole: EmbeddingConfig) -> EmbeddingConfig:
        first, last = self.shard_range(whole.vocab_size)
        return replace(whole, vocab_size=last - first)

    def shard_range(self, count: int, block: int = 1) -> Range:
        """Return this rank's range of `count` items, divided as evenly as whole blocks allow.

        If there are fewer blocks than ranks, several ranks have the same block.
        """
        blocks = count // block
        first, last = self.rank * blocks // self.size, (self.rank + 1) * blocks // self.size
        return (first * block, max(last, first + 1) * block) if count else (0, 0)

    def held_experts(self, count: int, columns: int, block: int) -> Range | None:
        """Return the range of experts that this rank has whole; None if it has some columns of each expert.

        Dividing columns is better: ranks have equal work whatever the routes. But if whole blocks of columns would give
        a rank a tenth more than its part, experts are divided, if that is possible.
        """
        blocks = columns // _together(columns, block)
        most = -(-blocks // self.size) * self.size  # blocks, if all ranks had as many as the one with the most
        if 10 * most <= 11 * blocks or count % self.size or count < 2 * self.size:
            return None
        return self.shard_range(count)

    def shard_slice(self, config: ModelConfig, name: str) -> ShardSlice | None:
        """Return the slice of a parameter that belongs to no projection; None: all of it."""
        found = next(((dim, things) for pattern, dim, things in _SPLITS if fnmatchcase(name, pattern)), None)
        if found is None or self.size == 1:
            return None
        dim, things = found
        if things == "source vocabulary":
            return ShardSlice(dim, (self.shard_range(config.source_vocab_size),))
        if things == "vocabulary":
            return ShardSlice(dim, (self.shard_range(config.embedding.vocab_size),))
        mixer = _layer_of(config, name).mixer
        if isinstance(mixer, GatedDeltaConfig):
            return ShardSlice(dim, self._recurrent_ranges(mixer, things))
        if things != "heads" and mixer.qk_norm_span is NormSpan.HEAD:
            return None  # one gain for all of them
        heads = mixer.num_kv_heads if things == "normed key heads" else mixer.num_heads
        return ShardSlice(dim, (self.shard_range(heads),))

    def _layer(self, layer: LayerConfig, block: int) -> LayerConfig:
        mlp = layer.feed_forward
        return replace(
            layer,
            mixer=self._mixer(layer.mixer),
            cross=layer.cross and self._attention(layer.cross),
            feed_forward=self._experts(mlp, block) if isinstance(mlp, ExpertsConfig) else self._mlp(mlp, block),
        )

    def _experts(self, experts: ExpertsConfig, block: int) -> ExpertsConfig:
        held = self.held_experts(experts.count, experts.mlp.intermediate_size, block)
        each = (self if held is None else WHOLE)._mlp(experts.mlp, block)
        return replace(experts, mlp=each, shared=experts.shared and self._mlp(experts.shared, block), held=held)

    def _mlp(self, mlp: MLPConfig, block: int) -> MLPConfig:
        block = _together(mlp.intermediate_size, block)
        first, last = self.shard_range(mlp.intermediate_size, block)
        return replace(mlp, intermediate_size=last - first, block=block)

    def _mixer(self, mixer: AttentionConfig | GatedDeltaConfig) -> AttentionConfig | GatedDeltaConfig:
        if isinstance(mixer, AttentionConfig):
            return self._attention(mixer)
        keys, values = mixer.num_key_heads // self.size, mixer.num_value_heads // self.size
        return replace(mixer, num_key_heads=keys, num_value_heads=values)

    def _recurrent_ranges(self, mixer: GatedDeltaConfig, things: str) -> tuple[Range, ...]:
        """Return this rank's ranges of value heads, or of the channels of queries, keys and values."""
        first, last = self.shard_range(mixer.num_value_heads)
        if things == "value heads":
            return ((first, last),)
        keys, begin = mixer.key_size // self.size, 2 * mixer.key_size
        both = ((start + self.rank * keys, start + (self.rank + 1) * keys) for start in (0, mixer.key_size))
        return (*both, (begin + first * mixer.value_dim, begin + last * mixer.value_dim))

    def _attention(self, attention: AttentionConfig) -> AttentionConfig:
        queries, keys = self.shard_range(attention.num_heads), self.shard_range(attention.num_kv_heads)
        position = attention.position
        if isinstance(position, AlibiConfig):
            position = AlibiConfig(position.slopes[queries[0] : queries[1]])
        heads, kv_heads = queries[1] - queries[0], keys[1] - keys[0]
        return replace(attention, num_heads=heads, num_kv_heads=kv_heads, position=position)


WHOLE = Shard()


def _block_of(config: ModelConfig) -> int:
    """Return how many inputs of the MLPs' last projections share a stored scale."""
    return math.lcm(*(one.block[1] or 1 for name, one in config.stored_as.items() if name.endswith(".down")))


def _together(columns: int, block: int) -> int:
    """Return how many of an MLP's columns must stay on one rank: a block, or 1 if the last block is not whole."""
    return block if columns % block == 0 else 1


def local_shape(shape: Shape, shard_slice: ShardSlice | None) -> Shape:
    """Return the shape of a rank's part of a parameter of this shape."""
    if shard_slice is None:
        return shape
    length = sum(stop - start for start, stop in shard_slice.ranges)
    return (*shape[: shard_slice.dim], length, *shape[shard_slice.dim + 1 :])


def cuts(shape: Shape, rows: Range, shard_slice: ShardSlice | None) -> Iterator[tuple[Index, Index]]:
    """Yield how a tensor with rows `[start, stop)` of a parameter fills a rank's part of it, as (from, to) indices."""
    start, stop = rows
    if shard_slice is None:
        yield (slice(0, stop - start),), (slice(start, stop),)
        return
    filled = 0
    for first, last in shard_slice.ranges:
        if shard_slice.dim == 0:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield (slice(low - start, high - start),), (slice(filled + low - first, filled + high - first),)
        else:
            whole = tuple(slice(0, size) for size in shape[1 : shard_slice.dim])
            source, target = slice(first, last), slice(filled, filled + last - first)
            yield (slice(0, stop - start), *whole, source), (slice(start, stop), *whole, target)
        filled += last - first


def _layer_of(config: ModelConfig, name: str) -> LayerConfig:
    """Return the layer of the parameter `name`, or one of those that share it."""
    stack_name, kind, index, *_ = name.split(".")
    stack = config.stacks[stack_name]
    if kind == "layers":
        return stack.distinct_layers[int(index)]
    assert stack.shared_bias is not None, name
    return stack.shared_bias
