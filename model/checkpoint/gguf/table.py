"""What a table of a GGUF architecture has: settings, names of tensors, and what llama.cpp's conversion does to these.

The names are those of llama.cpp's `gguf/constants.py` and `tensor_mapping.py`, the changes those of its `conversion/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from triptych.model.gguf.container import GGUFModel


class Rope(StrEnum):
    """How an architecture's rotary settings are written to config.json."""

    NONE = "none"
    PLAIN = "plain"  # one set for all layers
    BY_TYPE = "by type"  # one for layers with windows, one for the others


@dataclass(frozen=True, slots=True)
class Order:
    """Which stored row, or column, each wanted one is.

    Wanted rows from `begin` on are counted by `sizes`, the last one fastest; `strides` are how far apart
    these are in the file, from row `begin + offset` on. Rows before `begin` stay where they are.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    begin: int = 0

    @property
    def count(self) -> int:
        return self.begin + math.prod(self.sizes)

    @property
    def last(self) -> int:
        """Return the last stored place of any."""
        steps = zip(self.sizes, self.strides, strict=True)
        return self.begin + self.offset + sum((size - 1) * stride for size, stride in steps)

    def place(self, wanted: int) -> int:
        """Return the stored place of a wanted one."""
        if wanted < self.begin:
            return wanted
        left, place = wanted - self.begin, self.begin + self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            left, at = divmod(left, size)
            place += at * stride
        return place

    def in_groups(self, group: int) -> Order:
        """Return the order of groups of `group` neighbours, which stay together."""
        strides = (*(stride // group for stride in self.strides[:-1]), 1)
        return replace(self, sizes=(*self.sizes[:-1], self.sizes[-1] // group), strides=strides)


@dataclass(frozen=True, slots=True)
class Change:
    """What has to be undone of a tensor."""

    rows: Order | None = None
    columns: Order | None = None
    less: float = 0.0  # what was added to every number
    logarithm: bool = False  # the file has minus the exponentials of the numbers
    shape: tuple[int, ...] | None = None  # that the numbers are published in; None: the file's


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is translated. `{}` in a tensor's name is the layer."""

    model_type: str
    keys: Mapping[str, str]
    names: Mapping[str, str]  # of tensors, without their last part where this is the same; or with it
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that GGUF has no key for
    known: tuple[str, ...] = ()  # keys that `more` looks at, or that change nothing
    rope: Rope = Rope.NONE
    rope_theta: float = 10_000.0  # without a key for it
    paired: tuple[str, ...] = ()  # tensors whose rows have the two halves of a head in turns
    norms_plus_one: bool = False
    norms_as_they_are: tuple[str, ...] = ()  # the exceptions
    encoder: bool = False  # attention in both directions, whatever the key says
    # Matrices that published folders have transposed, or with rows head by head, and GGUF as they are multiplied with.
    in_order: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tensors that stand for several, by `changes`
    followed: Mapping[str, str] = field(
        default_factory=dict
    )  # tensors that published folders have before another's rows
    head_of_table: bool = True  # a head without a matrix of its own multiplies with the token table alone (not: T5)
    # Arrays of metadata with a number for each layer, which published folders have as tensors of these names, shapes.
    arrays: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    # Further settings, of the metadata and the settings that the keys give.
    more: Callable[[GGUFModel, Mapping[str, Any]], dict[str, Any]] = lambda model, raw: {}
    # Further changes, by the tensor's name within its layer, of the settings.
    changes: Callable[[Mapping[str, Any]], Mapping[str, Change]] = lambda raw: {}


SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
LLAMA_KEYS = {
    **SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
CHOSEN_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def layers(before: str, names: Mapping[str, str], ours: str = "blk") -> dict[str, str]:
    """Return names within a layer, which stands in `before`; GGUF calls the layer `ours`."""
    return {f"{ours}.{{}}.{name}": f"{before}.{theirs}" for name, theirs in names.items()}


LLAMA_NAMES = {**OUTSIDE, **layers("model.layers.{}", {**ATTENTION, **GATED, **PRE_NORMS})}


def experts(
    within: str, router: str, names: tuple[str, str, str] = PROJECTIONS, shared: str = "shared_expert"
) -> dict[str, str]:
    """Return a layer's names of experts, which share one tensor: `{}` stays in a name for the expert's number.

    `within` is what holds the experts, `shared` what it calls the one of all tokens; `names` are those of a gate, an up
    and a down projection.
    """
    parts = zip(("gate", "up", "down"), names, strict=True)
    found = {f"ffn_{part}_exps": f"{within}.experts.{{{{}}}}.{name}" for part, name in parts}
    common = {f"ffn_{part}_shexp": f"{within}.{shared}.{part}_proj" for part in ("gate", "up", "down")}
    return {
        **found,
        **common,
        "ffn_gate_inp": f"{within}.{router}",
        "ffn_gate_inp_shexp": f"{within}.shared_expert_gate",
    }


def with_experts(
    within: str, router: str, names: tuple[str, str, str] = PROJECTIONS, shared: str = "shared_expert"
) -> dict[str, str]:
    """Return the names of Llama's layers with experts."""
    return {**LLAMA_NAMES, **layers("model.layers.{}", experts(within, router, names, shared))}
