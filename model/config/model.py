"""What a Transformer is, as data: stacks, norms, positions, heads. Frozen, validated, without torch.

A family (`model.families`) turns a config.json into a `ModelConfig`; `model.network.transformer` builds the network
from it. A field exists only because a family needs it. Sizes count elements, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from model.config.layer import (
    Activation,
    AttentionConfig,
    MLPConfig,
    NormConfig,
    PositionConfig,
    PositionKind,
    RopeScaling,
    require_positive,
)
from model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The token table, shared by the stacks; `embedding_size` other than a stack's width is projected (ALBERT).

    A `vocab_size` of 0 is a model that reads no tokens, only images.
    """

    vocab_size: int
    embedding_size: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, embedding_size=self.embedding_size)
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size must not be negative, found {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image as a sequence: square patches in rows, behind one classifier token (Dosovitskiy et al. 2021)."""

    size: int  # pixels a side
    patch: int
    channels: int = 3

    def __post_init__(self) -> None:
        require_positive(self, size=self.size, patch=self.patch, channels=self.channels)
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
        require_positive(self, num_layers=self.num_layers, hidden_size=self.hidden_size)
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
