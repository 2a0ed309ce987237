"""What a Transformer is, as data: stacks, norms, positions, heads. Frozen, validated, without torch.

A family (`model.families`) turns a config.json into a `ModelConfig`; `model.network.transformer` builds the network
from it.
 A field exists only because a family needs it. Sizes count elements, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum


class ConfigError(ValueError):
    """A configuration that cannot be served; the message says what, where, what was found and what is expected."""


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


def _positive(owner: object, **sizes: int) -> None:
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
        _positive(self, dim=self.dim)
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
            _positive(self, max_positions=self.max_positions)


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
        _positive(self, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.window is not None:
            _positive(self, window=self.window)
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
        _positive(self, intermediate_size=self.intermediate_size)


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The token table, shared by the stacks; `embedding_size` other than a stack's width is projected (ALBERT).

    A `vocab_size` of 0 is a model that reads no tokens, only images.
    """

    vocab_size: int
    embedding_size: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, embedding_size=self.embedding_size)
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size must not be negative, found {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image as a sequence: square patches in rows, behind one classifier token (Dosovitskiy et al. 2021)."""

    size: int  # pixels a side
    patch: int
    channels: int = 3

    def __post_init__(self) -> None:
        _positive(self, size=self.size, patch=self.patch, channels=self.channels)
        if self.size % self.patch:
            raise ConfigError(f"image size {self.size} is not a multiple of the patch size {self.patch}")

    @property
    def num_tokens(self) -> int:
        return (self.size // self.patch) ** 2 + 1

    @property
    def patch_elements(self) -> int:
        return self.channels * self.patch**2

    @property
    def pixel_bytes(self) -> int:
        """Of one image with 8 bits a channel."""
        return self.channels * self.size**2


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One stack of equal blocks.

    A block is `x = attn_out(x + attn(attn_in(x)))`, the same for cross attention and the MLP; `pre_norm` fills the
    `*_in` slots, `post_norm` the `*_out` slots, an empty slot is the identity.
    """

    num_layers: int
    hidden_size: int
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    position: PositionConfig
    causal: bool
    pre_norm: bool
    post_norm: bool
    final_norm: bool
    cross_attention: bool = False
    embed_norm: bool = False  # over the sum of token, position and segment embeddings
    token_types: int = 0  # segments that are told apart (BERT 2)
    parallel: bool = False  # attention and MLP read the same x: `x + attn(attn_in(x)) + mlp(ffn_in(x))` (GPT-NeoX)
    unique_layers: int | None = None  # ALBERT: how many distinct blocks the layers cycle through; None: all

    def __post_init__(self) -> None:
        _positive(self, num_layers=self.num_layers, hidden_size=self.hidden_size)
        if self.num_layers % self.distinct_layers:
            raise ConfigError(
                f"num_layers ({self.num_layers}) must be a multiple of unique_layers ({self.unique_layers})"
            )
        if self.hidden_size % 2 and self.position.kind in (PositionKind.SINUSOIDAL, PositionKind.XLNET_RELATIVE):
            raise ConfigError(f"sinusoidal positions come in pairs of dimensions, found {self.hidden_size}")

    @property
    def distinct_layers(self) -> int:
        return self.unique_layers or self.num_layers


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Hidden states to logits over the vocabulary."""

    tied: bool  # the embedding table is the output matrix
    bias: bool = False
    scale: float = 1.0  # of the hidden states before the product


class ClassifierInput(StrEnum):
    """Which vectors a classifier reads."""

    FIRST = "first"
    LAST = "last"
    POOLER = "pooler"
    EVERY = "every"  # one decision a token


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """Hidden states to scores over labels: `out(act(dense(x)))`, or `out(x)` alone."""

    labels: tuple[str, ...]
    input: ClassifierInput
    dense: Activation | None = None  # of a layer of the hidden width in between; None: there is none
    bias: bool = True  # of the last layer
    multi_label: bool = False  # labels do not exclude each other

    @property
    def per_token(self) -> bool:
        return self.input is ClassifierInput.EVERY


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """What a checkpoint demands of every generation, whoever asks; generation_config.json's names in comments."""

    forced_first: int | None = None  # forced_bos_token_id: right after the decoder's start token alone
    forced_last: int | None = None  # forced_eos_token_id: as the last token that the length allows
    suppressed: tuple[int, ...] = ()  # suppress_tokens, and bad_words_ids of one token
    suppressed_first: tuple[int, ...] = ()  # begin_suppress_tokens
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # bad_words_ids of several


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of one to two stacks; which of them exist is its form."""

    model_type: str
    embedding: EmbeddingConfig
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    head: HeadConfig | None = None
    pooler: bool = False  # tanh(W x_0) over the first token (BERT)
    classifier: ClassifierConfig | None = None
    image: ImageConfig | None = None  # what the encoder reads instead of tokens
    max_positions: int | None = None  # the longest input that the positions allow; None: unlimited
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    generation: GenerationRules = field(default_factory=GenerationRules)
    float16_overflows: bool = False  # activations of published weights exceed 65,504 (T5, Pegasus)

    def __post_init__(self) -> None:
        if self.encoder is None and self.decoder is None:
            raise ConfigError("a model needs an encoder, a decoder or both")
        if (self.embedding.vocab_size == 0) != (self.image is not None):
            raise ConfigError("a model reads either tokens or images")
        if self.form == "encoder-decoder" and self.decoder_start_token_id is None:
            raise ConfigError("an encoder-decoder needs decoder_start_token_id")

    @property
    def form(self) -> str:
        if self.encoder is None:
            return "decoder-only"
        return "encoder-only" if self.decoder is None else "encoder-decoder"

    @property
    def stacks(self) -> dict[str, StackConfig]:
        named = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in named.items() if stack is not None}

    @property
    def classifies_tokens(self) -> bool:
        """Whether its classifier decides for every token, not once for the input."""
        return self.classifier is not None and self.classifier.per_token

    @property
    def longest_context(self) -> int | None:
        """Tokens up to which it can be stretched; None: unlimited. `max_positions` is what it is without."""
        rotary = self.decoder.position.rotary if self.decoder is not None else None
        if self.max_positions is None or rotary is None or rotary.scaling is not RopeScaling.DYNAMIC:
            return self.max_positions
        return int(self.max_positions * rotary.factor)

    def stretched(self, context: int) -> ModelConfig:
        """For sequences of up to `context` tokens: a dynamic rotary base is then the one for that length."""
        if self.decoder is None or self.decoder.position.rotary is None:
            return self
        rotary = replace(self.decoder.position.rotary, length=context)
        position = replace(self.decoder.position, rotary=rotary)
        return replace(self, decoder=replace(self.decoder, position=position))

    @property
    def can_generate(self) -> bool:
        return self.decoder is not None and self.head is not None

    @property
    def kv_elements_per_token(self) -> int:
        """K and V elements that one token of the decoder's self attention keeps over all layers."""
        if self.decoder is None:
            return 0
        return 2 * self.decoder.num_layers * self.decoder.attention.kv_size
