"""What a Transformer is, as data: stacks, norms, positions, heads. Frozen, validated, without torch.

A family (`triptych.model.families`) turns a config.json into a `ModelConfig`; `triptych.model.network.transformer`
builds the network from it. A field exists only because a family needs it. Sizes count elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.model.config.attention import (
    AttentionConfig,
    NormConfig,
    RopeScaling,
    RotaryConfig,
)
from triptych.model.config.bounds import require_numbers, require_positive
from triptych.model.config.formats import Storage
from triptych.model.config.layer import Activation, ExpertsConfig, LayerConfig, MLPConfig
from triptych.model.config.pictures import PicturesConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MaskDropout:
    """Masked tokens count as dropped out: their vectors are zeros, and the others make up for them (ESM).

    In training a share of the tokens was masked; a text in which another share is masked has its vectors multiplied by
    `(1 - share) / (1 - its share)`.
    """

    mask_token_id: int
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"the share of masked tokens is from 0 to 1, found {self.share}")


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The token table, shared by the stacks; `embedding_size` other than a stack's width is projected (ALBERT).

    A `vocab_size` of 0 is a model that reads no tokens, only images.
    """

    vocab_size: int
    embedding_size: int
    scale: float = 1.0
    mask_dropout: MaskDropout | None = None

    def __post_init__(self) -> None:
        require_positive(embedding_size=self.embedding_size)
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size must not be negative, found {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image as a sequence: square patches in rows, after one classifier token (Dosovitskiy et al. 2021).

    After that token there may be one of distillation, or registers, which have no positions (Darcet et al. 2024).
    Pixels beyond the last whole patch are not read.
    """

    size: int  # pixels a side
    patch: int
    channels: int = 3
    distilled: bool = False  # there is a token of distillation (DeiT)
    registers: int = 0
    # Patches along a side that have stored positions, which are stretched to those of `size`; None: as many (ViT).
    grid: int | None = None
    antialias: bool = False  # of the stretching, which is bicubic, of images of any proportions bilinear
    # The most patches of an image of any proportions (NaFlex, SigLIP 2); None: images are square, of `size`.
    most_patches: int | None = None
    class_token: bool = True  # False: there are only patches (SigLIP)
    bias: bool = True  # of the projection of patches

    def __post_init__(self) -> None:
        require_positive(size=self.size, patch=self.patch, channels=self.channels, most_patches=self.most_patches or 1)
        if self.size < self.patch:
            raise ConfigError(f"image size {self.size} is less than the patch size {self.patch}")
        if self.most_patches is not None and (self.class_token or self.grid is None):
            raise ConfigError("images of any proportions have patches alone, and stretched positions")
        stretched = self.grid is not None and self.most_patches is None
        if not self.class_token and (self.distilled or self.registers or stretched):
            raise ConfigError("other learned tokens, and stretched positions, follow a classifier token")

    @property
    def side(self) -> int:
        """The number of patches along a side."""
        return self.size // self.patch

    @property
    def first_tokens(self) -> int:
        """The learned tokens before the patches."""
        return self.class_token + self.distilled + self.registers

    @property
    def num_tokens(self) -> int:
        return self.side**2 + self.first_tokens if self.most_patches is None else self.most_patches

    @property
    def patch_elements(self) -> int:
        return self.channels * self.patch**2

    @property
    def pixel_bytes(self) -> int:
        """The most bytes of an image, with 8 bits a channel."""
        return self.channels * (self.size**2 if self.most_patches is None else self.most_patches * self.patch**2)


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """Attention of one learned query over all rows, then `x + mlp(norm(x))` (Zhai et al. 2023: SigLIP)."""

    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig


@dataclass(frozen=True, slots=True)
class JointConfig:
    """How texts and images get vectors of one space, which are compared by their cosine (Radford et al. 2021: CLIP).

    The similarity of a text and an image is `exp(scale) cos + bias`, of learned numbers. With `exclusive` their softmax
    over the texts is the probability of each, else the sigmoid of each.
    """

    size: int  # of the vectors
    exclusive: bool
    text_bias: bool = False  # of the projection of texts
    projects_images: bool = True
    probe: ProbeConfig | None = None  # pools an image's rows; None: its classifier token counts
    end_id: int | None = None  # a text's first such token counts; None: its last one does
    padded: bool = False  # texts are filled up to all positions, and what fills them up is read

    def __post_init__(self) -> None:
        require_positive(size=self.size)


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """A window of sound as a sequence: two convolutions over its log-mel frames (Radford et al. 2022, 2.2).

    Both see a frame and its neighbours, with zeros beyond the ends; the second takes every other frame.
    """

    num_mel_bins: int
    num_positions: int  # rows of a window; all windows are equally long

    def __post_init__(self) -> None:
        require_positive(num_mel_bins=self.num_mel_bins, num_positions=self.num_positions)

    @property
    def num_frames(self) -> int:
        return 2 * self.num_positions


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Hidden states to logits over the vocabulary."""

    tied: bool  # the embedding table is the output matrix
    bias: bool = False
    scale: float = 1.0  # of the hidden states before the product
    softcap: float | None = None  # logits stay between -softcap and softcap (Gemma 2)
    repeats_table: bool = False  # its own matrix has the table's numbers, which a file stores once

    def __post_init__(self) -> None:
        if self.softcap is not None:
            require_positive(softcap=self.softcap)


@dataclass(frozen=True, slots=True)
class MaskedHeadConfig:
    """Hidden states of an encoder to logits over the vocabulary: `out(norm(act(dense(x))))` (Devlin et al. 2019).

    Without an activation there are no layers before the output, `out(x)` alone (EuroBERT).
    """

    size: int  # after `dense`: the width of the token table's rows
    activation: Activation | None
    norm: NormConfig | None
    tied: bool = True  # the token table is the output matrix
    dense_bias: bool = True
    bias: bool = True  # of the output


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Low-rank adapters of every matrix of a network; an input may choose one (Hu et al. 2021: LoRA)."""

    names: tuple[str, ...]
    rank: int
    scale: float

    def __post_init__(self) -> None:
        if not self.names or self.rank < 1 or len(set(self.names)) < len(self.names):
            raise ConfigError(f"adapters need different names and a rank, found {self.names} of rank {self.rank}")


class ClassifierInput(StrEnum):
    """Which vectors a classifier reads."""

    FIRST = "first"
    LAST = "last"
    LAST_UNPADDED = "last unpadded"  # the last that is no padding token, wherever that comes from (decoders)
    POOLER = "pooler"
    MEAN = "mean"  # of all tokens
    EVERY = "every"  # one decision a token
    ALL = "all"  # the mean of every token's scores
    FIRST_AND_MEAN = "first and mean"  # side by side: of an image's first token, and the mean of its patches (DINOv2)
    FIRST_TWO = "first two"  # the mean of two decisions, each of one token (DeiT with a teacher)
    EOS = "eos"  # of an encoder-decoder that reads the source twice: the decoder's at its last end of sequence (BART)


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """Hidden states to scores over labels: `out(norm(act(dense(x))))`, or `out(x)` alone."""

    labels: tuple[str, ...]
    input: ClassifierInput
    dense: Activation | None = None  # of a layer of the hidden width in between; None: there is none
    bias: bool = True  # of the last layer
    activation: str = "Softmax"  # of torch.nn: logits to scores; labels that do not exclude each other have Sigmoid
    dense_bias: bool = True
    norm: NormConfig | None = None  # after the dense layer (ModernBERT)
    spans: bool = False  # its two labels are the first and the last token of an answer
    tokens: tuple[int, ...] = ()  # a label's score is that token's logit, less that of a second token (LogitScore)
    tied: bool = False  # these tokens' rows are those of the token table
    wraps: bool = False  # the decoder begins with the last token of the source, not with its start token (mBART)
    entailment: int | None = None  # the label of a text that follows from the other; None: there is none

    def __post_init__(self) -> None:
        if self.tokens and (len(self.labels) != 1 or len(self.tokens) > 2 or self.bias or self.dense is not None):
            raise ConfigError("the logits of one or two tokens are the score of one label, without more layers")

    @property
    def per_token(self) -> bool:
        return self.input is ClassifierInput.EVERY

    def scored_by(self, activation: str | None) -> ClassifierConfig:
        """Return the head with a cross-encoder's own activation; None: the folder names none.

        For several labels Identity is sentence-transformers' default, so it replaces nothing.
        """
        if activation is None or (activation == "Identity" and len(self.labels) > 1):
            return self
        return replace(self, activation=activation)


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """The rules of a checkpoint for all outputs; the comments have their names in generation_config.json."""

    forced_first: int | None = None  # forced_bos_token_id: right after the decoder's start token alone
    forced_last: int | None = None  # forced_eos_token_id: as the last token that the length allows
    suppressed: tuple[int, ...] = ()  # suppress_tokens, and bad_words_ids of one token
    suppressed_first: tuple[int, ...] = ()  # begin_suppress_tokens
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # bad_words_ids of several
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()  # sequence_bias: added to the logit of a sequence's last

    @property
    def reads_output(self) -> bool:
        """Whether what is banned or biased depends on the tokens before."""
        return bool(self.banned_sequences) or any(len(tokens) > 1 for tokens, _ in self.biases)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model with an encoder, a decoder or both, which determines its form.

    With `vision` it has another stack, which reads images. Without it, an encoder with `image` reads those, not tokens.
    """

    model_type: str
    embedding: EmbeddingConfig
    text_type: str | None = None  # of a model that reads images too: the type of its language model
    source_embedding: EmbeddingConfig | None = None  # of the encoder, where its token table is not the decoder's
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    head: HeadConfig | None = None
    pooler: bool = False  # tanh(W x_0) over the first token (BERT)
    classifier: ClassifierConfig | None = None
    masked_head: MaskedHeadConfig | None = None  # predicts masked tokens
    adapters: AdapterConfig | None = None
    image: ImageConfig | None = None
    vision: StackConfig | None = None
    joint: JointConfig | None = None
    pictures: PicturesConfig | None = None  # the pictures that a decoder reads in its prompts
    unread_pictures: str = ""  # why a model that has a tower reads none
    audio: AudioConfig | None = None  # windows of sound, which the encoder reads in place of tokens
    max_positions: int | None = None  # the longest input that the positions allow; None: unlimited
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    generation: GenerationRules = field(default_factory=GenerationRules)
    float16_overflows: bool = False  # activations of published weights exceed 65,504 (T5, Pegasus)
    # Projections that the checkpoint does not store as floats, by their names in the network.
    stored_as: Mapping[str, Storage] = field(default_factory=dict, hash=False)
    # Projections whose rows and columns the checkpoint has in the network's order already (GGUF).
    in_order: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        require_numbers(self)
        if self.encoder is None and self.decoder is None:
            raise ConfigError("a model needs an encoder, a decoder or both")
        if (self.embedding.vocab_size == 0) != self.only_images:
            raise ConfigError("a model reads tokens, or images by its encoder")
        if (self.joint is not None) != (self.vision is not None) or (self.vision is not None and self.image is None):
            raise ConfigError("a stack for images needs their patches, and makes vectors of a space with texts")
        if self.pictures is not None and not (self.form == "decoder-only" and self.head is not None):
            raise ConfigError("a model that reads pictures in its prompts is a decoder that generates")
        if self.pictures is not None and not 0 <= self.pictures.token_id < self.embedding.vocab_size:
            found = f"found {self.pictures.token_id}"
            raise ConfigError(f"image_token_id must be one of the {self.embedding.vocab_size} tokens, {found}")
        if (
            self.pictures is not None
            and self.decoder is not None
            and len(self.pictures.deep) >= len(self.decoder.layers)
        ):
            raise ConfigError(f"outputs of {len(self.pictures.deep)} layers of a tower are too many for the decoder")
        if self.audio is not None and self.form != "encoder-decoder":
            raise ConfigError("a model that reads sound is an encoder-decoder")
        if self.form == "encoder-decoder" and self.decoder_start_token_id is None:
            raise ConfigError("an encoder-decoder needs decoder_start_token_id")
        if self.max_positions is not None and self.max_positions < 1:
            raise ConfigError(f"a model needs at least one position, found {self.max_positions}")

    @property
    def form(self) -> str:
        if self.encoder is None:
            return "decoder-only"
        return "encoder-only" if self.decoder is None else "encoder-decoder"

    @property
    def is_tied(self) -> bool:
        """Whether every output uses the token table as its matrix."""
        return all(head is None or head.tied for head in (self.head, self.masked_head))

    @property
    def source_vocab_size(self) -> int:
        """The vocabulary of sources, which differs from that of outputs in some Marian models."""
        return (self.source_embedding or self.embedding).vocab_size

    @property
    def stacks(self) -> dict[str, StackConfig]:
        tower = None if self.pictures is None else self.pictures.tower
        named = {"encoder": self.encoder, "decoder": self.decoder, "vision": self.vision, "tower": tower}
        return {name: stack for name, stack in named.items() if stack is not None}

    @property
    def source_padding(self) -> int | None:
        """The padding token of sources, which has no position; None: each token has one."""
        return self.text_stack.position.padding

    @property
    def source_positions(self) -> int | None:
        """The rows of an image or a window of sound, which are equally long; None for texts."""
        if self.only_images and self.image is not None:
            return self.image.num_tokens
        return self.audio.num_positions if self.audio is not None else None

    @property
    def only_images(self) -> bool:
        """Whether it reads only images."""
        return self.image is not None and self.vision is None

    @property
    def encoder_stack(self) -> StackConfig:
        """The encoder of a model that is known to have one."""
        assert self.encoder is not None
        return self.encoder

    @property
    def decoder_stack(self) -> StackConfig:
        """The decoder of a model that is known to have one."""
        assert self.decoder is not None
        return self.decoder

    @property
    def text_stack(self) -> StackConfig:
        """The first stack, which reads tokens, or images or sound in their place."""
        return next(iter(self.stacks.values()))

    @property
    def vector_size(self) -> int:
        """The width of hidden states, or of vectors in a space of texts and images."""
        return self.text_stack.output_width if self.joint is None else self.joint.size

    @property
    def has_experts(self) -> bool:
        """Whether any layer's feed-forward is a mixture of experts."""
        layers = (layer for stack in self.stacks.values() for layer in stack.layers)
        return any(isinstance(layer.feed_forward, ExpertsConfig) for layer in layers)

    @property
    def classifies_tokens(self) -> bool:
        """Whether its classifier labels each token, not the whole input."""
        return self.classifier is not None and self.classifier.per_token

    @property
    def longest_context(self) -> int | None:
        """The longest context that its positions allow when stretched; None: unlimited."""
        rotaries = self.decoder.rotaries if self.decoder is not None else ()
        if self.max_positions is None:
            return None
        return min((rotary.reach(self.max_positions) for rotary in rotaries), default=self.max_positions)

    @property
    def short_context(self) -> int | None:
        """The length up to which sequences have rotary frequencies of their own (LongRoPE); None: there is none.

        The length decides for all tokens of a sequence. A sequence that leaves the short context is recomputed.
        """
        rotaries = self.decoder.rotaries if self.decoder is not None else ()
        found = [int(one.original_max_positions) for one in rotaries if one.by_length]
        return min(found, default=None)

    def stretched(self, context: int) -> ModelConfig:
        """Return the config for sequences of up to `context` tokens: dynamic rotary bases are those for this length."""

        def stretch(layer: LayerConfig) -> LayerConfig:
            mixer = layer.mixer
            if not isinstance(mixer, AttentionConfig) or not isinstance(rotary := mixer.position, RotaryConfig):
                return layer
            if rotary.scaling is not RopeScaling.DYNAMIC:
                return layer
            return replace(layer, mixer=replace(mixer, position=replace(rotary, length=context)))

        return self if self.decoder is None else replace(self, decoder=self.decoder.with_layers(stretch))

    def at_image_size(self, size: int) -> ModelConfig:
        """Return the config for images of `size` pixels a side; positions are stretched to that."""
        if self.image is None or self.image.grid is None or self.image.most_patches is not None:
            return self
        image = replace(self.image, size=size)
        return replace(self, image=image, max_positions=image.num_tokens)

    @property
    def can_generate(self) -> bool:
        return self.decoder is not None and self.head is not None
