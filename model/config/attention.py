"""Attention and recurrent layers as data: norms, heads, positions, biases, and the states of Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from triptych.model.config.bounds import MOST_HEADS, require_positive
from triptych.model.errors import ConfigError

_MOST_DISTANCE = 65_536  # of bucketed distances; a table has an entry for each


class NormKind(StrEnum):
    LAYER = "layer"  # Ba et al. 2016
    RMS = "rms"  # Zhang & Sennrich 2019


class RopeScaling(StrEnum):
    """How a rotary model was stretched beyond the context it was first trained on."""

    NONE = "none"
    LINEAR = "linear"  # positions divided by the factor (Chen et al. 2023)
    DYNAMIC = "dynamic"  # the base grows with the length ("NTK-aware")
    NTK = "ntk"  # the base times the factor, and every position divided by factor^(2 / dim) (GTE)
    LLAMA3 = "llama3"  # only long wavelengths are stretched (Llama 3.1)
    YARN = "yarn"  # a ramp between stretched and not (Peng et al. 2023)
    LONGROPE = "longrope"  # a factor a pair, of two lists: for short and for long contexts (Ding et al. 2024)


class NormSpan(StrEnum):
    """What a norm of queries and keys is taken over, and how many gains it has."""

    HEAD = "head"  # each head, all with the same gains (Qwen3, Gemma 3)
    OWN_GAINS = "own gains"  # each head, with gains of its own (Cohere, StableLM)
    ALL_HEADS = "all heads"  # all heads of a token together (OLMo 2)


@dataclass(frozen=True, slots=True)
class NormConfig:
    kind: NormKind
    eps: float
    unit_offset: bool = False  # the gain is stored as its distance from 1 (Gemma)
    bias: bool = True  # LAYER: whether it shifts too (ModernBERT: not)
    gain: bool = True  # whether it multiplies, too (OLMo, the pictures of Gemma 4: neither)

    def __post_init__(self) -> None:
        if not self.gain and ((self.kind is NormKind.LAYER and self.bias) or self.unit_offset):
            raise ConfigError("a norm without gains has no bias either")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary positions: which of a head's dimensions turn, how fast, and how the context was stretched."""

    dim: int  # the number of a head's first dimensions
    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_positions: float = 0  # the context before stretching; a fraction if settings were rounded
    length: int = 0  # DYNAMIC: the context that the base is computed for
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cosine and sine
    long_attention_factor: float | None = None  # LONGROPE: the same beyond the original context; None: equal
    growth: float = 0.0  # queries grow by 1 + growth * ln(1 + floor(position / original context)) (Llama 4)
    interleaved: bool = False  # pairs are neighbours (GPT-J); else they are half of `dim` apart (GPT-NeoX, Llama)
    short_factors: tuple[float, ...] = ()  # LONGROPE: of requests that stay within the original context
    long_factors: tuple[float, ...] = ()  # of those that may go beyond it, from their first token on
    rotated: int | None = None  # how many of `dim`, those with the shortest wavelengths (Gemma 4); None: all

    # How many pairs of dimensions each coordinate of a position rotates, in this order; empty: all by the same. Of a
    # text the coordinates are equal.
    sections: tuple[int, ...] = ()
    in_turn: bool = (
        False  # pairs alternate while a later section has any left, the others are the first one's (Qwen3-VL)
    )
    frequencies_again: bool = False  # each section has the same frequencies, from the first on (towers)
    frequencies_in_turn: bool = False  # sections, of one size, get them in turn: the first one the fastest (Pixtral)

    @property
    def by_length(self) -> bool:
        """Whether keys are rotated differently once a sequence leaves the original context."""
        differ = self.short_factors != self.long_factors or self.long_attention_factor is not None
        return self.scaling is RopeScaling.LONGROPE and differ

    def reach(self, context: int) -> int:
        """Return how many tokens it is stretched to, where a model says `context`, which may leave out the stretch."""
        if self.scaling in (RopeScaling.DYNAMIC, RopeScaling.LINEAR):
            return max(context, int(context * self.factor))
        if self.scaling is RopeScaling.YARN:
            return max(context, int(self.original_max_positions * self.factor))
        return context

    def __post_init__(self) -> None:
        require_positive(dim=self.dim, theta=self.theta, factor=self.factor)
        require_positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        if self.scaling is RopeScaling.YARN and self.theta == 1:
            raise ConfigError("rope_theta of rope type yarn must not be 1")
        if self.scaling is RopeScaling.LLAMA3 and not 0 < self.low_freq_factor < self.high_freq_factor:
            found = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise ConfigError(f"low_freq_factor must be positive and below high_freq_factor, found {found}")
        if self.scaling is RopeScaling.DYNAMIC and self.dim == 2:
            raise ConfigError("rope type dynamic needs more than 2 rotary dimensions")
        if self.dim % 2:
            raise ConfigError(f"rotary dimensions come in pairs, found {self.dim}")
        if self.scaling is not RopeScaling.NONE and self.original_max_positions <= 0:
            raise ConfigError(f"rope scaling {self.scaling} needs the original context")
        if self.sections and not self.in_turn and sum(self.sections) != self.dim // 2:
            raise ConfigError(f"coordinates rotate {self.dim // 2} pairs of dimensions, found {sum(self.sections)}")
        if self.rotated is not None and (self.rotated % 2 or not 0 <= self.rotated <= self.dim):
            raise ConfigError(f"of {self.dim} rotary dimensions an even number is rotated, found {self.rotated}")
        lists = (self.short_factors, self.long_factors)
        if self.scaling is RopeScaling.LONGROPE and any(len(factors) != self.dim // 2 for factors in lists):
            raise ConfigError(f"longrope needs two lists of {self.dim // 2} factors, found {[*map(len, lists)]}")


@dataclass(frozen=True, slots=True)
class AlibiConfig:
    """Scores fall linearly with the distance: `-slope * (i - j)` of a query at i and a key at j (Press et al. 2022)."""

    slopes: tuple[float, ...]  # of each head

    @classmethod
    def of_heads(cls, num_heads: int, max_bias: float = 8.0) -> AlibiConfig:
        """Make the slopes `2^(-max_bias k / n)` for k = 1 to n; of a number of heads that is no power of two, those
        of the power below it, then every second one of twice that power, from the first on (section 3 and the
        authors' code)."""
        if not 0 < num_heads <= MOST_HEADS:
            raise ConfigError(f"the number of attention heads must be from 1 to {MOST_HEADS}, found {num_heads}")
        below = 1 << (num_heads.bit_length() - 1)
        steps = [2 * k for k in range(1, below + 1)] + [2 * k + 1 for k in range(num_heads - below)]
        return cls(tuple(2.0 ** (-max_bias * step / (2 * below)) for step in steps))

    def __post_init__(self) -> None:
        require_positive(slopes=min(self.slopes, default=0.0))


@dataclass(frozen=True, slots=True)
class BucketBiasConfig:
    """A learned bias of scores, one for each head and bucket of the distance (T5, Raffel et al. 2020)."""

    num_buckets: int = 32
    max_distance: int = 128
    shared: bool = True  # one table for all layers of the stack, instead of one for each layer (umT5)

    def __post_init__(self) -> None:
        require_positive(num_buckets=self.num_buckets, max_distance=self.max_distance, most=_MOST_DISTANCE)
        if self.num_buckets < 4 or self.max_distance <= self.num_buckets // 2:
            raise ConfigError(
                "relative positions need 4 buckets or more, and half of them must not reach the largest distance, "
                f"found {self.num_buckets} buckets up to distance {self.max_distance}"
            )


@dataclass(frozen=True, slots=True)
class XLNetRelativeConfig:
    """Scores from a projected sinusoid of the distance, and from segments (Dai et al. 2019, Yang et al. 2019)."""


@dataclass(frozen=True, slots=True)
class DisentangledConfig:
    """Scores from contents and from relative positions, which have vectors of their own (He et al. 2021, section 3.1).

    A query at i and a key at j add `q_i . K(i - j)` (content to position) and `k_j . Q(i - j)` (position to content),
    where K and Q are projections of the stack's table of relative positions.
    """

    span: int  # rows of the table before distance 0; as many are from it on
    max_distance: int | None = None  # beyond span / 2, rows are logarithmic buckets up to it; None: a row a distance
    content_to_position: bool = True
    position_to_content: bool = True
    shared: bool = False  # the matrices of the layer's keys and queries project the table too
    key_bias: bool = True  # of the table's own projection to keys

    def __post_init__(self) -> None:
        require_positive(span=self.span)
        if self.max_distance is not None and self.max_distance <= self.span // 2 + 1:
            raise ConfigError(
                f"buckets up to distance {self.max_distance} do not reach beyond {self.span // 2} exact ones"
            )
        if not (self.content_to_position or self.position_to_content):
            raise ConfigError("disentangled attention needs one kind of scores from positions")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Multi-head attention: `num_kv_heads` < `num_heads` is grouped-query, 1 multi-query.

    Scores are `q k^T * scale`; with a softcap `softcap * tanh(score / softcap)` (Gemma 2). A bias by position is added
    to that.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    # None: none of its own
    position: RotaryConfig | AlibiConfig | BucketBiasConfig | XLNetRelativeConfig | DisentangledConfig | None = None
    window: int | None = None  # each token sees itself, window - 1 before it and, unless causal, window - 1 after it
    softcap: float | None = None  # scores stay between -softcap and softcap
    qk_norm: NormConfig | None = None  # of queries and of keys, before their rotation
    qk_norm_span: NormSpan = NormSpan.HEAD
    rotates_first: bool = False  # queries and keys are rotated before their norms (HunYuan)
    query_offset: bool = False  # a learned vector added to every query (XLNet's content bias)
    sinks: bool = False  # a learned score of each head takes part in its softmax, without a value (gpt-oss)
    clip: float | None = None  # projected queries, keys and values stay between -clip and clip (OLMo, MPT)
    output_gate: bool = False  # outputs are multiplied by the sigmoid of a projection of their size (Qwen3-Next)
    value_norm: NormConfig | None = None  # of each head's values: an RMS norm without gains (Gemma 4)
    keys_as_values: bool = False  # values have no projection: they are the keys before their norm (Gemma 4)
    bounded: bool = False  # inputs and outputs of each projection stay within stored bounds (Gemma 4's tower)
    windowed: bool = False  # of a picture's tower: sees the patches of its own window alone (Qwen2.5-VL)
    keys_of: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own (Gemma 4)

    def __post_init__(self) -> None:
        require_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, most=MOST_HEADS)
        require_positive(head_dim=self.head_dim)
        if self.window is not None:
            require_positive(window=self.window)
        if self.softcap is not None:
            require_positive(softcap=self.softcap)
        if self.clip is not None:
            require_positive(clip=self.clip)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if isinstance(self.position, RotaryConfig) and self.position.dim > self.head_dim:
            raise ConfigError(f"{self.position.dim} rotary dimensions are more than the {self.head_dim} of a head")
        norms_heads = self.qk_norm is not None and self.qk_norm_span is NormSpan.HEAD
        grows = isinstance(self.position, RotaryConfig) and self.position.growth
        if grows and norms_heads:
            raise ConfigError("queries that grow with their position have no norm of each head")
        if self.rotates_first and not (norms_heads and self.keys_of is None):
            raise ConfigError("queries and keys that are rotated first have norms of each head")
        own = self.keys_of is None and self.value_norm is None
        if self.clip is not None and not (own and (self.qk_norm is None or self.qk_norm_span is NormSpan.ALL_HEADS)):
            raise ConfigError("queries, keys and values with a bound have norms over all heads, or none")
        if self.value_norm is not None and self.value_norm.kind is not NormKind.RMS:
            raise ConfigError("norms of values are RMS norms")
        if self.keys_of is not None and (self.keys_as_values or self.value_norm is not None):
            raise ConfigError("a layer that reads another one's keys and values makes none")
        if self.keys_of is not None and self.qk_norm_span is not NormSpan.HEAD:
            raise ConfigError("a layer that reads another one's keys has norms of each head")
        if isinstance(self.position, AlibiConfig) and len(self.position.slopes) != self.num_heads:
            raise ConfigError(f"{len(self.position.slopes)} slopes are not one for each of {self.num_heads} heads")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The shape of one token's keys, and of its values: heads, and the width of each."""
        return self.num_kv_heads, self.head_dim

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """The widths of the parts of a projected row: queries, their gate, keys, values; some may be 0."""
        keys = 0 if self.keys_of is not None else self.kv_size
        values = 0 if self.keys_as_values else keys
        return self.query_size, self.query_size if self.output_gate else 0, keys, values


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """A recurrent layer by the gated delta rule (Yang et al. 2025: Gated DeltaNet), over a short causal convolution.

    Each value head has a state S `[key_dim, value_dim]`; `num_value_heads / num_key_heads` neighbours share queries
    and keys, which are normalised to length 1. With queries scaled by `key_dim^-0.5`, a decay g and a rate b:

        S_t = g_t S_(t-1) + b_t k_t (v_t - g_t S_(t-1)^T k_t)^T        o_t = S_t^T q_t
        g_t = exp(-exp(decay) * softplus(a_t + dt_bias))              b_t = sigmoid(b'_t)

    Outputs are normalised head by head and multiplied by silu of a gate. Queries, keys and values are projections
    through a convolution over `kernel` tokens of each channel, and silu.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float  # of the norm of outputs

    def __post_init__(self) -> None:
        require_positive(num_key_heads=self.num_key_heads, num_value_heads=self.num_value_heads, most=MOST_HEADS)
        require_positive(key_dim=self.key_dim, value_dim=self.value_dim)
        if self.kernel < 2:
            raise ConfigError(f"a recurrent layer's convolution sees 2 tokens or more, found {self.kernel}")
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"num_value_heads ({self.num_value_heads}) must be a multiple of num_key_heads ({self.num_key_heads})"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """The shapes of a sequence's state: that of all heads, and the last tokens' channels before the convolution."""
        return (self.num_value_heads, self.key_dim, self.value_dim), (self.kernel - 1, self.channels)

    @property
    def state_elements(self) -> int:
        """The size of a sequence's state in numbers, whatever its length."""
        return self.value_size * self.key_dim + (self.kernel - 1) * self.channels
