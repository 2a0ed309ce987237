"""Multi-head attention of a sequence to itself, and of a decoder to the encoder's output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.model.attention.base import Preparation, PreparingBackend, ScoreBias
from triptych.model.attention.layer_backends import backend_of
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AttentionConfig, NormSpan, RotaryConfig
from triptych.model.linear.base import LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.adapters import RowAdapters
from triptych.model.network.bounds import bounds_of, project
from triptych.model.network.fused_ops import rotate_both, sigmoid_gated
from triptych.model.network.inputs import StepContext
from triptych.model.network.norms import build_heads_norm, head_norm
from triptych.model.network.positions import rotate


def prepares_heads(config: AttentionConfig) -> bool:
    """Return whether a backend may prepare a layer's heads: it has norms of heads, a rotation or both, and no more."""
    norms = config.qk_norm is not None and config.qk_norm_span is NormSpan.HEAD
    rotates = isinstance(config.position, RotaryConfig)
    return (rotates or norms) and not (config.query_offset or config.rotates_first or config.keys_of is not None)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself; one matrix `[q; k; v]`, or `[q; gate; k; v]`, projects all parts.

    With `keys_as_values` there is no v; a layer that reads another layer's keys has neither k nor v.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        queries, keys = Part(config.num_heads, config.head_dim), Part(config.num_kv_heads, config.head_dim)
        self.sizes = config.projected_sizes
        parts = [queries if at < 2 else keys for at, size in enumerate(self.sizes) if size]
        self.qkv = linear(LinearSpec("qkv", hidden_size, tuple(parts), config.qkv_bias, Split.OUTPUTS))
        self.out = linear(_output(config, hidden_size))
        self.qkv_bounds, self.out_bounds = (bounds_of(one, bounded=config.bounded) for one in (self.qkv, self.out))
        self.offset = nn.Parameter(torch.empty(config.num_heads, config.head_dim)) if config.query_offset else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        if config.qk_norm is not None:
            norm, span, dim = config.qk_norm, config.qk_norm_span, config.head_dim
            self.q_norm = build_heads_norm(norm, span, config.num_heads, dim, linear.collective)
            if config.keys_of is None:
                self.k_norm = build_heads_norm(norm, span, config.num_kv_heads, dim, linear.collective)
        self.v_norm: nn.RMSNorm | None = None
        if config.value_norm is not None:
            self.v_norm = nn.RMSNorm(config.head_dim, eps=config.value_norm.eps, elementwise_affine=False)
        # A backend can compute norms of each head, if all heads have the same gains.
        self.norms_first = config.qk_norm is not None and config.qk_norm_span is not NormSpan.HEAD
        self.prepares = prepares_heads(config)

    def forward(
        self,
        x: Tensor,  # [T, d]
        step: StepContext,
        cache: LayerCache | None,
        bias: ScoreBias | None,
    ) -> Tensor:
        config = self.config
        q, gate, k, v = project(self.qkv, self.qkv_bounds, x, step).split_with_sizes(self.sizes, dim=-1)
        q = q.unflatten(-1, (config.num_heads, config.head_dim))
        if config.keys_of is not None:
            return self._projected(self._read(q, config.keys_of, step, cache).flatten(1), gate, step)
        k = k.unflatten(-1, (config.num_kv_heads, config.head_dim))
        v = k if config.keys_as_values else v.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.norms_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.clip is not None:
            q, k, v = (one.clamp(-config.clip, config.clip) for one in (q, k, v))
        if isinstance(config.position, RotaryConfig) and config.position.growth:
            q = q * step.query_growth(config.position)[:, None, None].to(q.dtype)
        backend, metadata = backend_of(step.backend, config), step.inputs.metadata_of(cache)
        if config.windowed:
            (metadata,) = step.inputs.other_pools
        if isinstance(backend, PreparingBackend) and backend.prepares:
            preparation = self._preparation(step, cache)
            if preparation is not None:
                mixed = backend.forward_unprepared(q, k, v, preparation, cache, metadata, config, bias, self.sinks)
                return self._projected(mixed.flatten(1), gate, step)
        if config.qk_norm is not None and not self.norms_first and not config.rotates_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.offset is not None:
            q = q + self.offset
        if isinstance(config.position, RotaryConfig):
            q, k = rotate_both(q, k, *step.rotary(config.position), config.position.interleaved)
        if config.rotates_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if (read := step.inputs.read_rows) is not None:
            k, v = k[read], v[read]
        if cache is None and step.layer in step.key_owners:
            step.kept[step.layer] = k, v
        mixed = backend.forward(q, k, v, cache, metadata, config, bias, self.sinks)
        return self._projected(mixed.flatten(1), gate, step)

    def _read(self, q: Tensor, owner: int, step: StepContext, cache: LayerCache | None) -> Tensor:
        """Return the attention of queries `[T, H, D]`, before norm and rotation, to the keys of layer `owner`."""
        config, metadata = self.config, step.inputs.metadata_of(cache)
        if config.qk_norm is not None:
            q = self.q_norm(q)
        if isinstance(config.position, RotaryConfig):
            q = rotate(q, step.rotary(config.position), interleaved=config.position.interleaved)
        backend = backend_of(step.backend, config)
        if cache is None:
            return backend.forward(q, *step.kept[owner], None, metadata, config, None, self.sinks)
        return backend.forward(q, None, None, cache, metadata.reading, config, None, self.sinks)

    def _projected(self, mixed: Tensor, gate: Tensor, step: StepContext) -> Tensor:
        """Return the output projection of the heads' results `[T, H D]`, which are gated if there is a gate."""
        mixed = sigmoid_gated(mixed, gate) if self.config.output_gate else mixed
        return project(self.out, self.out_bounds, mixed, step)

    def _preparation(self, step: StepContext, cache: LayerCache | None) -> Preparation | None:
        """Return the norms and the rotation of heads as data; None if a backend cannot prepare the heads."""
        config, position = self.config, self.config.position
        if step.inputs.read_rows is not None or not self.prepares:
            return None
        if cache is None and step.layer in step.key_owners:  # later layers need the prepared keys
            return None
        rotary = step.rotary(position) if isinstance(position, RotaryConfig) else None
        interleaved = isinstance(position, RotaryConfig) and position.interleaved
        if config.qk_norm is None or self.norms_first:
            return Preparation(rotary=rotary, interleaved=interleaved)
        return Preparation(head_norm(self.q_norm), head_norm(self.k_norm), rotary, interleaved)


class CrossAttention(nn.Module):
    """Multi-head attention of the decoder to the encoder's output, whose keys and values are computed once."""

    def __init__(self, config: AttentionConfig, hidden_size: int, source_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        queries, keys = Part(config.num_heads, config.head_dim), Part(config.num_kv_heads, config.head_dim)
        self.q = linear(LinearSpec("q", hidden_size, (queries,), config.qkv_bias, Split.OUTPUTS))
        self.kv = linear(LinearSpec("kv", source_size, (keys, keys), config.qkv_bias, Split.OUTPUTS))
        self.out = linear(_output(config, hidden_size))

    def keys_and_values(self, encoder_output: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """Return keys, then values, `[S, 2 K D]` of the encoder output `[S, d]`, whose rows may have adapters."""
        rows: Tensor = self.kv(encoder_output)
        return rows if adapters is None else adapters.added(self.kv.spec.name, encoder_output, rows)

    def project(self, encoder_output: Tensor, adapters: RowAdapters | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values `[S, K, D]` of the encoder output `[S, d]`."""
        k, v = (
            self.keys_and_values(encoder_output, adapters)
            .unflatten(-1, (2, self.config.num_kv_heads, self.config.head_dim))
            .unbind(-3)
        )
        return k, v

    def forward(self, x: Tensor, step: StepContext, cache: LayerCache | None) -> Tensor:  # [T, d] -> [T, d]
        assert step.cross is not None
        q = step.project(self.q, x).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        step.keep_queries(q)
        k, v = None, None
        if step.cross.encoder_output is not None:
            k, v = self.project(step.cross.encoder_output, step.cross.adapters)
        mixed = step.backend.forward(q, k, v, cache, step.cross.metadata_of(cache), self.config).flatten(1)
        return step.project(self.out, mixed)


def _output(config: AttentionConfig, hidden_size: int) -> LinearSpec:
    """Return the output projection."""
    return LinearSpec("out", config.query_size, (Part(hidden_size),), config.out_bias, Split.INPUTS)
