"""One stack of layers as data, with its embedding and its final norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    GatedDeltaConfig,
    NormConfig,
    RotaryConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.bounds import require_positive
from triptych.model.config.layer import (
    MOST_EXPERTS_OF_STACK,
    Activation,
    ExpertsConfig,
    LayerConfig,
    LayerEmbeddingConfig,
)
from triptych.model.errors import ConfigError


class PositionKind(StrEnum):
    NONE = "none"  # or positions of each layer (`AttentionConfig.position`)
    LEARNED = "learned"  # a table
    SINUSOIDAL = "sinusoidal"  # Vaswani et al. 2017, [sin | cos] halves


@dataclass(frozen=True, slots=True)
class PositionConfig:
    """Positions that are added to the embeddings."""

    kind: PositionKind = PositionKind.NONE
    max_positions: int = 0  # rows of a learned table, offset not counted; 0: unlimited
    offset: int = 0  # added to positions: rows of a table before position 0 (BART 2, RoBERTa pad + 1)
    interleaved: bool = False  # sinusoidal: sine and cosine in turn, as the paper has it, not in halves
    inclusive: bool = False  # sinusoidal: wavelengths end at exactly 10000 (fairseq), not one step before
    every_layer: bool = False  # added before every layer, not only before the first
    padding: int | None = None  # a token that gets the row before the first, and is not counted (RoBERTa)

    def __post_init__(self) -> None:
        if self.kind is PositionKind.LEARNED:
            require_positive(max_positions=self.max_positions)


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """A convolution over the tokens of a sequence, parallel to the first layer (DeBERTa-v2).

    `x_1 = norm(layer(x_0) + act(conv(x_0)))`, with zeros beyond both ends of a sequence.
    """

    width: int  # tokens that an output reads; the middle one is its own
    activation: Activation
    eps: float  # of its LayerNorm

    def __post_init__(self) -> None:
        require_positive(width=self.width)
        if self.width % 2 == 0:
            raise ConfigError(f"a convolution sees as many tokens on both sides, found a width of {self.width}")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One stack: its layers, its embedding, and its final norm."""

    layers: tuple[LayerConfig, ...]  # equal ones are one object
    hidden_size: int
    causal: bool
    position: PositionConfig = field(default_factory=PositionConfig)
    embed_norm: NormConfig | None = None  # over the sum of token, position and segment embeddings
    final_norm: NormConfig | None = None
    token_types: int = 0  # number of segments (BERT: 2)
    tasks: int = 0  # stored vectors of tasks; the first is added to every token (ERNIE)
    embed_norm_last: bool = False  # after the projection of narrower embeddings, not before it
    project_bias: bool = True  # of that projection
    project_equal: bool = False  # even if embeddings have the width of the stack (ALBERT)
    positions_last: bool = False  # added after the norm and the projection of embeddings, not before (OPT-350M)
    output_size: int | None = None  # the width of a last projection without bias (OPT-350M); None: there is none
    relative_norm: NormConfig | None = None  # over the table of relative positions (DeBERTa-v2)
    convolution: ConvolutionConfig | None = None

    def __post_init__(self) -> None:
        require_positive(hidden_size=self.hidden_size)
        if self.causal:  # an encoder may have none: vectors of tokens alone
            require_positive(layers=len(self.layers))
        if self.token_types < 0:
            raise ConfigError(f"the number of token types must not be negative, found {self.token_types}")
        for index, layer in enumerate(self.layers):
            self._check_sharing(index, layer)
            self._check_keys(index, layer)
        if self.layers and not self.attentions:
            raise ConfigError("a stack needs a layer with attention")
        if self.recurrences and (not self.causal or self.has_cross_attention):
            raise ConfigError("recurrent layers are of causal stacks without cross attention")
        positions = [attention.position for attention in self.attentions]
        if not self.causal and any(isinstance(position, AlibiConfig) for position in positions):
            raise ConfigError("slopes of scores are of causal stacks")
        experts = sum(one.count for layer in self.layers if isinstance(one := layer.feed_forward, ExpertsConfig))
        if experts > MOST_EXPERTS_OF_STACK:
            raise ConfigError(f"the layers of a stack have at most {MOST_EXPERTS_OF_STACK} experts, found {experts}")
        if len({layer.embedding for layer in self.layers}) > 1:
            raise ConfigError("all layers of a stack have vectors of tokens of one size, or none has")
        if len({layer.cross is None for layer in self.layers}) > 1:
            raise ConfigError("cross attention is in all layers of a stack or in none")
        biased = [layer.attention for layer in self.layers if _has_shared_bias(layer)]
        if len({(mixer.position, mixer.num_heads) for mixer in biased}) > 1:
            raise ConfigError("layers that share a table of bucketed biases must agree on its heads and buckets")
        if len({position.span for position in positions if isinstance(position, DisentangledConfig)}) > 1:
            raise ConfigError("layers that share a table of relative positions must agree on its span")
        sinusoids = self.position.kind is PositionKind.SINUSOIDAL or self.has_xlnet_layers
        if self.hidden_size % 2 and sinusoids:
            raise ConfigError(f"sinusoidal positions come in pairs of dimensions, found {self.hidden_size}")

    def _check_sharing(self, index: int, layer: LayerConfig) -> None:
        owner = layer.shares_weights_with
        if owner is None:
            return
        if not 0 <= owner < index or replace(layer, shares_weights_with=None) != self.layers[owner]:
            raise ConfigError(f"layer {index} shares weights with {owner}, which is no equal layer before it")

    def _check_keys(self, index: int, layer: LayerConfig) -> None:
        if not isinstance(layer.mixer, AttentionConfig) or (owner := layer.mixer.keys_of) is None:
            return
        found = self.layers[owner].mixer if 0 <= owner < index and self.causal else None
        if not isinstance(found, AttentionConfig) or found.keys_of is not None or _read(found) != _read(layer.mixer):
            raise ConfigError(f"layer {index} reads the keys of {owner}, which is no layer before it with such keys")

    def projects(self, embedding_size: int) -> bool:
        """Return whether embeddings of this width are projected before the layers."""
        return self.project_equal or embedding_size != self.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def key_owners(self) -> frozenset[int]:
        """The layers whose keys and values others read."""
        return frozenset(attention.keys_of for attention in self.attentions if attention.keys_of is not None)

    @property
    def layer_embedding(self) -> LayerEmbeddingConfig | None:
        """The `LayerEmbeddingConfig` of all layers, if they have one."""
        return self.layers[0].embedding if self.layers else None

    @property
    def output_width(self) -> int:
        """The width of the final hidden states."""
        return self.output_size or self.hidden_size

    @property
    def distinct_layers(self) -> tuple[LayerConfig, ...]:
        """The layers that have weights of their own."""
        return tuple(layer for layer in self.layers if layer.shares_weights_with is None)

    @property
    def weights_of(self) -> tuple[int, ...]:
        """For each layer, the index in `distinct_layers` of the layer with its weights."""
        owners = [index for index, layer in enumerate(self.layers) if layer.shares_weights_with is None]
        places = {owner: place for place, owner in enumerate(owners)}
        shared = (layer.shares_weights_with for layer in self.layers)
        return tuple(places[index if owner is None else owner] for index, owner in enumerate(shared))

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The self attention of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def recurrences(self) -> dict[int, GatedDeltaConfig]:
        """The layers that keep a state of fixed size instead of keys and values, by their index."""
        mixers = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        return {index: mixer for index, mixer in mixers if isinstance(mixer, GatedDeltaConfig)}

    @property
    def has_cross_attention(self) -> bool:
        return bool(self.layers) and self.layers[0].cross is not None

    @property
    def has_xlnet_layers(self) -> bool:
        """Whether segments change scores, and have no embedding."""
        return any(isinstance(attention.position, XLNetRelativeConfig) for attention in self.attentions)

    @property
    def relative_span(self) -> int | None:
        """The span of the table of relative positions; None: no layer reads one."""
        positions = (attention.position for attention in self.attentions)
        return next((position.span for position in positions if isinstance(position, DisentangledConfig)), None)

    @property
    def shared_bias(self) -> LayerConfig | None:
        """One of the layers that share a table of bucketed biases, if there are any."""
        return next((layer for layer in self.layers if _has_shared_bias(layer)), None)

    @property
    def rotaries(self) -> tuple[RotaryConfig, ...]:
        """The distinct rotary positions of the layers."""
        found = (attention.position for attention in self.attentions)
        return tuple(dict.fromkeys(position for position in found if isinstance(position, RotaryConfig)))

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> StackConfig:
        """Return the stack with every layer changed; layers that are one object stay one."""
        changed = {id(layer): change(layer) for layer in {id(layer): layer for layer in self.layers}.values()}
        return replace(self, layers=tuple(changed[id(layer)] for layer in self.layers))


def _read(attention: AttentionConfig) -> tuple[object, ...]:
    """Return what layers that share keys must have in common."""
    return attention.kv_shape, attention.window, attention.position


def _has_shared_bias(layer: LayerConfig) -> bool:
    mixer = layer.mixer
    return isinstance(mixer, AttentionConfig) and isinstance(mixer.position, BucketBiasConfig) and mixer.position.shared
