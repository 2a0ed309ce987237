"""One layer of a Transformer as data: norms, positions, attention, feed-forward. Frozen, validated, without torch.

A stack is a tuple of these (`model.config.model.StackConfig`), and no two of them need be alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from model.errors import ConfigError

MOST_EXPERTS = 4096  # of a layer; a larger number is an error in the file
MOST_EXPERTS_OF_STACK = 131_072  # of all layers
MOST = 2**31 - 1  # of any size or position: kernels in C compute with sums and products of them in 64 bits
MOST_HEADS = 65_536
_MOST_DISTANCE = 65_536  # of bucketed distances, which a table has one by one


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


class Activation(StrEnum):
    RELU = "relu"
    RELU_SQUARED = "relu_squared"  # So et al. 2021: Primer
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    TANH = "tanh"
    # Rare ones, which torch computes: `model.network.feed_forward` has their formulas.
    QUICK_GELU = "quick_gelu"
    CLIPPED_GELU = "clipped_gelu"
    MISH = "mish"
    RELU6 = "relu6"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    HARD_SWISH = "hard_swish"
    LAPLACE = "laplace"
    SQRT_SOFTPLUS = "sqrt_softplus"
    IDENTITY = "identity"


def require_positive(*, most: float = MOST, **sizes: float) -> None:
    """Raise `ConfigError` for a size that is not above 0, or a whole number above `most`."""
    for name, value in sizes.items():
        if value <= 0:
            raise ConfigError(f"{name} must be positive, found {value}")
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name} must be at most {most}, found {value}")


def require_numbers(config: Any, seen: set[int] | None = None) -> None:
    """Raise `ConfigError` for a field, at any depth, that is declared as a number and holds something else."""
    seen = set() if seen is None else seen
    if id(config) in seen or not is_dataclass(config):
        return
    seen.add(id(config))  # the layers of a stack are often one object
    for one in fields(config):
        value = getattr(config, one.name)
        if one.type in ("int", "int | None") and value is not None and type(value) is not int:
            raise ConfigError(f"{one.name} must be a whole number, found {str(value)[:40]}")
        if one.type in ("float", "float | None") and value is not None and not _is_finite(value):
            raise ConfigError(f"{one.name} must be a finite number, found {str(value)[:40]}")
        for part in value if isinstance(value, tuple) else (value,):
            require_numbers(part, seen)


def _is_finite(value: object) -> bool:
    """Return whether the value is a real number: a root of a negative setting is complex."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class NormConfig:
    kind: NormKind
    eps: float
    unit_offset: bool = False  # the gain is stored as its distance from 1 (Gemma)
    bias: bool = True  # LAYER: whether it shifts too (ModernBERT: not)
    gain: bool = True  # LAYER: whether it multiplies, too (OLMo: neither)

    def __post_init__(self) -> None:
        if not self.gain and (self.kind is not NormKind.LAYER or self.bias or self.unit_offset):
            raise ConfigError("a norm without gains is a LayerNorm without a bias")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary positions: which of a head's dimensions turn, how fast, and how the context was stretched."""

    dim: int  # the number of a head's first dimensions
    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_positions: float = 0  # the context before stretching; what it was found from may round it
    length: int = 0  # DYNAMIC: the context that the base is computed for
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of cosine and sine
    long_attention_factor: float | None = None  # LONGROPE: the same beyond the original context; None: no other
    growth: float = 0.0  # queries grow by 1 + growth * ln(1 + floor(position / original context)) (Llama 4)
    interleaved: bool = False  # pairs are neighbours (GPT-J); not: a half apart, as in GPT-NeoX and Llama
    short_factors: tuple[float, ...] = ()  # LONGROPE: of requests that stay within the original context
    long_factors: tuple[float, ...] = ()  # of those that may go beyond it, from their first token on
    turning: int | None = (
        None  # how many of `dim` are rotated, those with the shortest wavelengths (Gemma 4); None: all
    )

    @property
    def by_length(self) -> bool:
        """Whether keys turn otherwise once a sequence leaves the original context."""
        differ = self.short_factors != self.long_factors or self.long_attention_factor is not None
        return self.scaling is RopeScaling.LONGROPE and differ

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
        if self.turning is not None and (self.turning % 2 or not 0 <= self.turning <= self.dim):
            raise ConfigError(f"of {self.dim} rotary dimensions an even number turns, found {self.turning}")
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
    shared: bool = True  # one table for all layers of the stack; not: a table for each layer (umT5)

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
    qk_norm: NormConfig | None = None  # of queries and of keys, before they turn
    qk_norm_span: NormSpan = NormSpan.HEAD
    turns_first: bool = False  # queries and keys turn before their norms (HunYuan)
    query_offset: bool = False  # a learned vector added to every query (XLNet's content bias)
    sinks: bool = False  # a learned score of each head takes part in its softmax, without a value (gpt-oss)
    clip: float | None = None  # projected queries, keys and values stay between -clip and clip (OLMo, MPT)
    output_gate: bool = False  # outputs are multiplied by the sigmoid of a projection of their size (Qwen3-Next)
    value_norm: NormConfig | None = None  # of each head's values: an RMS norm without gains (Gemma 4)
    keys_as_values: bool = False  # values have no projection: they are the keys before their norm (Gemma 4)
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
        grows = isinstance(self.position, RotaryConfig) and self.position.growth
        if grows and self.qk_norm is not None and self.qk_norm_span is NormSpan.HEAD:
            raise ConfigError("queries that grow with their position have no norm of each head")
        if self.turns_first and (self.qk_norm is None or self.qk_norm_span is not NormSpan.HEAD or self.keys_of):
            raise ConfigError("queries and keys that turn first have norms of each head")
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
        """Of one token's keys, and of its values: heads and their width."""
        return self.num_kv_heads, self.head_dim

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """The widths of the parts of a projected row: queries, their gate, keys, values; some may be 0."""
        keys = 0 if self.keys_of is not None else self.kv_size
        values = 0 if self.keys_as_values else keys
        return self.query_size, self.query_size if self.output_gate else 0, keys, values

    @property
    def has_score_bias(self) -> bool:
        """Whether positions are added to the scores."""
        return isinstance(self.position, AlibiConfig | BucketBiasConfig | XLNetRelativeConfig | DisentangledConfig)


@dataclass(frozen=True, slots=True)
class GateClamp:
    """Bounds of a gated unit: `(clip(u, -limit, limit) + 1) * g * sigmoid(gain * g)`, g = min(gate, limit)."""

    limit: float
    gain: float

    def __post_init__(self) -> None:
        require_positive(limit=self.limit, gain=self.gain)


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
        """That go through the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Of what a sequence keeps: the states of all heads, and the last tokens' channels before the convolution."""
        return (self.num_value_heads, self.key_dim, self.value_dim), (self.kernel - 1, self.channels)

    @property
    def state_elements(self) -> int:
        """Numbers that a sequence keeps, whatever its length."""
        return self.value_size * self.key_dim + (self.kernel - 1) * self.channels


@dataclass(frozen=True, slots=True)
class MLPConfig:
    intermediate_size: int
    activation: Activation
    gated: bool = False  # Shazeer 2020: act(x W_gate) * (x W_up)
    bias: bool = True
    down_bias: bool | None = None  # of the last projection; None: as `bias` (GTE: it alone has one)
    clamp: GateClamp | None = None  # of a gated SiLU
    xielu: bool = False  # the activation is xIELU, which has learned numbers (Huang & Schlag 2024; Apertus)

    def __post_init__(self) -> None:
        require_positive(intermediate_size=self.intermediate_size)
        if self.xielu and (self.gated or self.activation is not Activation.IDENTITY):
            raise ConfigError("an MLP with xIELU has no gate and no other activation")
        if self.clamp is not None and not (self.gated and self.activation is Activation.SILU):
            raise ConfigError("bounds of a gated unit are those of a gated SiLU")


@dataclass(frozen=True, slots=True)
class ChoiceConfig:
    """How a router chooses experts where the largest logits alone do not decide (DeepSeek-AI 2024: DeepSeek-V3).

    Scores are the sigmoid of each logit, or the softmax of all. A learned bias of each expert is added to its score for
    the choice alone. Experts are in groups, and a token chooses within the groups whose two best experts are the best.
    """

    sigmoid: bool = True
    groups: int = 1
    groups_per_token: int = 1
    factor: float = 1.0  # of the chosen scores in the end
    least: float = 1e-20  # what renormalised scores are divided by at least

    def __post_init__(self) -> None:
        require_positive(groups=self.groups, groups_per_token=self.groups_per_token, least=self.least)
        if self.groups_per_token > self.groups:
            raise ConfigError(f"a token cannot choose {self.groups_per_token} of {self.groups} groups of experts")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: of `count` MLPs a router chooses `per_token` for each token (Shazeer et al. 2017).

    A token's scores are the softmax of its router's logits over all experts, in float32. Its experts are those with the
    largest scores, of equal ones the first; their outputs are added up, each times its score. `renormalised` scores are
    divided by the sum of the chosen ones, which is the softmax over the chosen logits alone (Mixtral, gpt-oss).
    """

    count: int
    per_token: int
    mlp: MLPConfig  # each of them
    renormalised: bool
    router_bias: bool = False
    shared: MLPConfig | None = None  # one more, for every token
    shared_gate: bool = False  # which is multiplied by the sigmoid of a projection to one number (Qwen2-MoE)
    # Both sides have norms of their own before and after them; the router has a norm and a scale (Gemma 4).
    own_norms: NormConfig | None = None
    router_scale: float = 1.0
    expert_scales: bool = False  # what an expert counts is multiplied by a learned number of it (Gemma 4)
    choice: ChoiceConfig | None = None  # None: the largest logits, and their softmax
    # SparseMixer's tolerance (Liu et al. 2024): an expert's score is its softmax over the logits that are left and at
    # most twice this share below it. None: scores are not found so.
    mixer_tolerance: float | None = None

    def __post_init__(self) -> None:
        require_positive(per_token=self.per_token)
        if self.mixer_tolerance is not None and (self.choice is not None or self.per_token != 2):
            raise ConfigError(f"SparseMixer chooses 2 experts of a token by logits alone, found {self.per_token}")
        if self.count < 2 or self.per_token > self.count:
            raise ConfigError(f"a token cannot choose {self.per_token} of {self.count} experts")
        if self.count > MOST_EXPERTS:
            raise ConfigError(f"a layer has at most {MOST_EXPERTS} experts, found {self.count}")
        if self.choice is not None and self.choice.groups > 1:
            size, odd = divmod(self.count, self.choice.groups)
            if odd or size < 2 or self.choice.groups_per_token * size < self.per_token:
                raise ConfigError(
                    f"{self.count} experts in {self.choice.groups} groups are too few for {self.per_token} of a token"
                )
        if self.shared_gate and self.shared is None:
            raise ConfigError("a gate of shared experts needs them")
        if self.own_norms is not None and (self.shared is None or self.shared_gate):
            raise ConfigError("norms of two sides need a shared expert, without a gate")


@dataclass(frozen=True, slots=True)
class LayerEmbeddingConfig:
    """A vector of each token for each layer, which a last sublayer lets into x (Gemma 3n, Gemma 4).

    `x + norm(project(act(gate(x)) * v))` for the token's vector v, which is `(e sqrt(size) + norm(W x_0 / sqrt(d))) /
    sqrt(2)` of a row e of the layer's own part of a second token table and of the embedded token x_0, of width d.
    """

    size: int
    activation: Activation
    norm: NormConfig  # of both norms

    def __post_init__(self) -> None:
        require_positive(size=self.size)


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one sublayer: `x = post(x + output(sublayer(pre(x))))`; None is the identity.

    Pre-norm fills `pre` (Xiong et al. 2020), post-norm `post` (Vaswani et al. 2017), sandwich norm `pre` and `output`
    (Ding et al. 2021).
    """

    pre: NormConfig | None = None
    output: NormConfig | None = None
    post: NormConfig | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: a token mixer (attention, or a recurrence), in decoders of two stacks cross attention, then a
    feed-forward.

    Each is a sublayer with a residual sum and `Norms` of its own. Of a `parallel` layer both sublayers read the same x:
    `x + output(mixer(pre(x))) + output(feed_forward(pre(x)))` (GPT-NeoX); with `one_norm` they read the same norm of
    it, the mixer's (GPT-J).
    """

    mixer: AttentionConfig | GatedDeltaConfig
    feed_forward: MLPConfig | ExpertsConfig
    norms: tuple[Norms, ...]  # one a sublayer, in their order
    cross: AttentionConfig | None = None
    parallel: bool = False
    one_norm: bool = False  # of a parallel layer
    normed_residual: bool = (
        False  # x = pre(x) + sublayer(pre(x)): what a sublayer gives is added to what it read (BLOOM)
    )
    residual_scale: float = 1.0  # of what each sublayer adds to x (Granite)
    channel_scales: bool = False  # of the same, a learned number for each channel (LayerScale, Touvron et al. 2021)
    embedding: LayerEmbeddingConfig | None = None  # a vector of each token for this layer
    scaled: bool = False  # x is multiplied by a learned number in the end (Gemma 4)
    shares_weights_with: int | None = None  # the earlier layer that has this one's weights (ALBERT); None: its own

    def __post_init__(self) -> None:
        sublayers = 2 if self.cross is None else 3
        if len(self.norms) != sublayers:
            raise ConfigError(f"a layer of {sublayers} sublayers needs as many norms, found {len(self.norms)}")
        if self.cross is not None and (self.cross.position is not None or self.cross.window is not None):
            raise ConfigError("cross attention has neither positions nor a window")
        if self.parallel and (self.cross is not None or any(norms.post for norms in self.norms)):
            raise ConfigError("a parallel layer has neither cross attention nor norms after its sum")
        if self.one_norm and not (self.parallel and self.norms[0].pre and not self.norms[1].pre):
            raise ConfigError("one norm for both sublayers is the mixer's, in a parallel layer")
        if self.channel_scales and (self.cross is not None or any(norms.post or norms.output for norms in self.norms)):
            raise ConfigError("a layer with scales of channels is pre-norm, without cross attention")
        if self.normed_residual and (self.parallel or self.cross is not None):
            raise ConfigError(
                "sums with what sublayers read are of layers that are neither parallel nor cross-attending"
            )
        if self.residual_scale != 1.0 and any(norms.output for norms in self.norms):
            raise ConfigError("a layer with output norms scales nothing after them")
        if (self.embedding is not None or self.scaled) and (self.parallel or any(norms.post for norms in self.norms)):
            raise ConfigError("a layer with vectors or a scale of its own is neither parallel nor post-norm")

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer that is known to have attention."""
        assert isinstance(self.mixer, AttentionConfig)
        return self.mixer

    @property
    def mlp(self) -> MLPConfig:
        """Its feed-forward, of a layer without experts."""
        assert isinstance(self.feed_forward, MLPConfig)
        return self.feed_forward
