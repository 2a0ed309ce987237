"""Counts a checkpoint's parameters and costs from its configuration alone; no weight is read.

Costs are per token. A matrix of p parameters costs 2p FLOPs; attention over a context of c tokens costs 4 c H D a layer
(scores and weighted sum; Kaplan et al. 2020, table 1), and half as much more for each kind of scores between contents
and relative positions (DeBERTa). An embedding lookup costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    GatedDeltaConfig,
    RotaryConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.cache import StateSize, cached_elements, state_bytes
from triptych.model.config.layer import ExpertsConfig, LayerConfig, MLPConfig
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.network.parameter_counts import parameters_by_part

_POSITIONS = {
    RotaryConfig: "rotary",
    AlibiConfig: "slopes of scores",
    BucketBiasConfig: "t5 buckets",
    XLNetRelativeConfig: "xlnet relative",
    DisentangledConfig: "disentangled",
}
_RECURRENCE = 8  # operations on each number of a state: what keys and queries read of it, its decay, its update
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations for one token; over n tokens attention costs O(n^2 d), the rest O(n d^2)."""

    projections: int  # q, k, v and out, of self and cross attention; a convolution
    attention: int  # scores and weighted sums; what a recurrent layer does with its state
    feed_forward: int
    head: int

    @property
    def all(self) -> int:
        return self.projections + self.attention + self.feed_forward + self.head


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A model's parameters by part, and costs derived from them."""

    config: ModelConfig
    parameters: dict[str, int]  # by part; tied and shared weights count once
    multiplied: dict[str, int]  # of a token: weights that layers share once for each layer, of experts its own

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int | None:
        """Return the parameters that a token passes through; None: all, as there are no experts."""
        return sum(self.multiplied.values()) if self.config.has_experts else None

    def weight_bytes(self, dtype: str) -> int:
        return self.total_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of the decoder's self attention; a source token of an encoder-decoder takes as many."""
        return cached_elements(self.config.decoder) * DTYPE_BYTES[dtype]

    def flops(self, stack: str, context: int) -> Flops:
        """Count one token through a stack (the decoder's includes the head) that attends to `context` tokens."""
        config = self.config.stacks[stack]
        parts = ("attention", "cross attention", "convolution", "layer embeddings")
        projections = sum(self.multiplied.get(f"{stack} {part}", 0) for part in parts)
        head = 0
        if stack == "decoder" and self.config.head is not None:
            head = 2 * self.config.embedding.vocab_size * config.output_width
        return Flops(
            projections=2 * projections,
            attention=sum(
                2 * _products(mixer) * _seen(mixer, context, causal=config.causal) * mixer.query_size
                if isinstance(mixer, AttentionConfig)
                else _RECURRENCE * mixer.value_size * mixer.key_dim
                for mixer in (layer.mixer for layer in config.layers)
            ),
            feed_forward=2 * self.multiplied.get(f"{stack} MLP", 0),
            head=head,
        )

    def flops_per_token(self, stack: str, context: int) -> int:
        return self.flops(stack, context).all

    def flops_per_prompt_token(self, stack: str, length: int) -> float:
        """Return the mean over a prompt of `length` tokens; with causal attention a token sees half on average."""
        if not self.config.stacks[stack].causal:
            return self.flops_per_token(stack, length)
        return sum(self.flops_per_token(stack, position + 1) for position in range(length)) / length

    def sequences_that_fit(self, memory: int, length: int, dtype: str) -> int:
        """Return the number of decoder sequences of `length` tokens whose KV cache fits into `memory` bytes, without
        snapshots of states."""
        states = StateSize(1, 0).num_slots * state_bytes(self.config.decoder)
        each = cached_elements(self.config.decoder, length) * DTYPE_BYTES[dtype] + states
        return memory // each if each else 0


def dissect(config: ModelConfig) -> Anatomy:
    """Count a model's parameters by part."""
    return Anatomy(config, parameters_by_part(config), parameters_by_part(config, each_use=True))


def _seen(attention: AttentionConfig, context: int, *, causal: bool) -> int:
    """Return how many keys of `context` one query sees at most; without a causal mask a window has two sides."""
    if attention.window is None:
        return context
    return min(context, attention.window if causal else 2 * attention.window - 1)


def _products(attention: AttentionConfig) -> int:
    """Return how many products of a head's width a query and a key take: scores, those of positions, the sum."""
    position = attention.position
    if not isinstance(position, DisentangledConfig):
        return 2
    return 2 + position.content_to_position + position.position_to_content


def describe_stack(config: StackConfig) -> dict[str, str]:
    """Describe a stack in words; where its layers differ, each property names its layers."""
    sharing = f", {len(config.distinct_layers)} distinct" if len(config.distinct_layers) != config.num_layers else ""

    def described(describe: Callable[[LayerConfig], str]) -> str:
        """Describe each layer and group equal descriptions: `a`, or `a (layers 0-4, 6); b (layer 5)`."""
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(config.layers):
            groups.setdefault(describe(layer), []).append(index)
        if len(groups) == 1:
            return next(iter(groups))
        return "; ".join(f"{words} ({_in_layers(indices)})" for words, indices in groups.items())

    def attention(layer: LayerConfig) -> str:
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaConfig):
            return f"gated delta rule, convolution over {mixer.kernel}"
        window = f", window {mixer.window}" if mixer.window else ""
        softcap = f", softcap {mixer.softcap:g}" if mixer.softcap else ""
        gate = ", output gate" if mixer.output_gate else ""
        cross = " + cross" if layer.cross is not None else ""
        return ("causal" if config.causal else "bidirectional") + window + softcap + gate + cross

    if not config.layers:
        return {"layers": "none: vectors of tokens alone", "width": str(config.hidden_size)}
    return {
        "layers": f"{config.num_layers}{sharing}",
        "width": str(config.hidden_size),
        "attention": described(attention),
        "heads": described(lambda layer: _heads(layer.mixer)),
        "positions": described(lambda layer: _positions(config, layer)),
        "norms": described(_norms) + (", final norm" if config.final_norm else ""),
        "MLP": described(lambda layer: _feed_forward(layer.feed_forward)),
    }


def _in_layers(indices: Sequence[int]) -> str:
    """`layer 5`, or `layers 0-4, 6-10`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(names)}"


def _heads(attention: AttentionConfig | GatedDeltaConfig) -> str:
    if isinstance(attention, GatedDeltaConfig):
        keys = f", {attention.num_key_heads} key heads of {attention.key_dim}"
        return f"{attention.num_value_heads} of {attention.value_dim}{keys}"
    heads = f"{attention.num_heads} of {attention.head_dim}"
    if attention.num_kv_heads != attention.num_heads:
        heads += f", {attention.num_kv_heads} key/value heads"
    return heads


def _positions(config: StackConfig, layer: LayerConfig) -> str:
    position = layer.mixer.position if isinstance(layer.mixer, AttentionConfig) else None
    if position is None:
        return config.position.kind.value
    words = _POSITIONS[type(position)]
    if isinstance(position, RotaryConfig) and position.interleaved:
        words += " of neighbours"
    if isinstance(position, RotaryConfig) and len(config.rotaries) > 1:
        words += f" of base {position.theta:g}"
    return words


def _norms(layer: LayerConfig) -> str:
    """`rms pre-norm`, or `layer pre and post-norm`."""
    slots = {
        name: norm for norms in layer.norms for name in ("pre", "output", "post") if (norm := getattr(norms, name))
    }
    kinds = " and ".join(dict.fromkeys(norm.kind.value for norm in slots.values()))
    return f"{kinds} {' and '.join(slots)}-norm" + " for both sublayers" * layer.one_norm


def _feed_forward(config: MLPConfig | ExpertsConfig) -> str:
    """`48, gated silu`, or `8 experts of 48, gated silu, 2 a token, one of 96 shared`."""
    if isinstance(config, MLPConfig):
        return _mlp(config)
    shared = f", one of {config.shared.intermediate_size} shared" if config.shared is not None else ""
    return f"{config.count} experts of {_mlp(config.mlp)}, {config.per_token} a token{shared}"


def _mlp(mlp: MLPConfig) -> str:
    return f"{mlp.intermediate_size}, {'gated ' if mlp.gated else ''}{mlp.activation.value.replace('_', ' ')}"
