"""One layer of a Transformer as data: norms, positions, attention, feed-forward. Frozen, validated, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from model.errors import ConfigError


class NormKind(StrEnum):
    LAYER = "layer"  # Ba et al. 2016
    RMS = "rms"  # Zhang & Sennrich 2019


class PositionKind(StrEnum):
    NONE = "none"
    LEARNED = "learned"  # a table added to the embeddings
    SINUSOIDAL = "sinusoidal"  # Vaswani et al. 2017, [sin | cos] halves
    ROTARY = "rotary"  # Su et al. 2021
    T5_BUCKETS = "t5_buckets"  # Raffel et al. 2020: a learned bias per head and distance bucket
    XLNET_RELATIVE = "xlnet_relative"  # Dai et al. 2019: the query meets a projected sinusoid of the distance


class RopeScaling(StrEnum):
    """How a rotary model was stretched beyond the context it was first trained on."""

    NONE = "none"
    LINEAR = "linear"  # positions divided by the factor (Chen et al. 2023)
    DYNAMIC = "dynamic"  # the base grows with the length ("NTK-aware")
    LLAMA3 = "llama3"  # only long wavelengths are stretched (Llama 3.1)
    YARN = "yarn"  # a ramp between stretched and not (Peng et al. 2023)


class Activation(StrEnum):
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    TANH = "tanh"


def require_positive(owner: object, **sizes: int) -> None:
    for name, value in sizes.items():
        if value <= 0:
            raise ConfigError(f"{type(owner).__name__}.{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True)
class NormConfig:
    kind: NormKind
    eps: float
    unit_offset: bool = False  # the gain is stored as its distance from 1 (Gemma)


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary positions: which of a head's dimensions turn, how fast, and how the context was stretched."""

    dim: int  # the first so many of a head's dimensions
    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_positions: int = 0  # the context before stretching
    length: int = 0  # DYNAMIC: the context that the base is computed for
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cosine and sine

    def __post_init__(self) -> None:
        require_positive(self, dim=self.dim)
        if self.dim % 2:
            raise ConfigError(f"rotary dimensions come in pairs, found {self.dim}")
        if self.scaling is not RopeScaling.NONE and self.original_max_positions <= 0:
            raise ConfigError(f"rope scaling {self.scaling} needs the original context")


@dataclass(frozen=True, slots=True)
class PositionConfig:
    """How order enters: added to embeddings (learned, sinusoidal), turned into q and k (rotary), or added to scores."""

    kind: PositionKind = PositionKind.NONE
    max_positions: int = 0  # rows of a learned table, offset not counted; 0: unlimited
    offset: int = 0  # added to positions: rows of a table before position 0 (BART 2, RoBERTa pad + 1)
    rotary: RotaryConfig | None = None
    interleaved: bool = False  # sinusoidal: sine and cosine in turn, as the paper has it, not in halves
    inclusive: bool = False  # sinusoidal: wavelengths end at exactly 10000 (fairseq), not one step before
    num_buckets: int = 32
    max_distance: int = 128
    every_layer: bool = False  # learned, sinusoidal: added before every block, not only before the first
    per_layer: bool = False  # T5 buckets: a table for every layer (umT5), not one for the stack

    def __post_init__(self) -> None:
        if (self.kind is PositionKind.ROTARY) != (self.rotary is not None):
            raise ConfigError("rotary positions and their settings go together")
        if self.kind is PositionKind.LEARNED:
            require_positive(self, max_positions=self.max_positions)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Multi-head attention: `num_kv_heads` < `num_heads` is grouped-query, 1 multi-query."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    query_offset: bool = False  # a learned vector added to every query (XLNet's content bias)
    window: int | None = None  # each token sees itself, window - 1 before it and, unless causal, as many behind it

    def __post_init__(self) -> None:
        require_positive(self, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.window is not None:
            require_positive(self, window=self.window)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MLPConfig:
    intermediate_size: int
    activation: Activation
    gated: bool = False  # Shazeer 2020: act(x W_gate) * (x W_up)
    bias: bool = True

    def __post_init__(self) -> None:
        require_positive(self, intermediate_size=self.intermediate_size)
