"""One layer of a Transformer as data: norms, positions, attention, feed-forward. Frozen, validated, without torch.

A stack is a tuple of these (`triptych.model.config.stack.StackConfig`), and no two of them need be alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from triptych.model.config.attention import AttentionConfig, GatedDeltaConfig, NormConfig
from triptych.model.config.bounds import require_positive
from triptych.model.errors import ConfigError

MOST_EXPERTS = 4096  # of a layer; a larger number is an error in the file
MOST_EXPERTS_OF_STACK = 131_072  # of all layers


class Activation(StrEnum):
    RELU = "relu"
    RELU_SQUARED = "relu_squared"  # So et al. 2021: Primer
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    TANH = "tanh"
    # Rare ones: `triptych.model.network.activations` has their formulas.
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


@dataclass(frozen=True, slots=True)
class GateClamp:
    """Bounds of a gated unit: `(clip(u, -limit, limit) + 1) * g * sigmoid(gain * g)`, g = min(gate, limit)."""

    limit: float
    gain: float

    def __post_init__(self) -> None:
        require_positive(limit=self.limit, gain=self.gain)


@dataclass(frozen=True, slots=True)
class MLPConfig:
    intermediate_size: int
    activation: Activation
    gated: bool = False  # Shazeer 2020: act(x W_gate) * (x W_up)
    bias: bool = True
    down_bias: bool | None = None  # of the last projection; None: as `bias` (GTE: it alone has one)
    clamp: GateClamp | None = None  # of a gated SiLU
    xielu: bool = False  # the activation is xIELU, which has learned numbers (Huang & Schlag 2024; Apertus)
    block: int = 1  # columns that stay on one rank together, because their stored weights share a scale
    bounded: bool = False  # as `AttentionConfig.bounded`

    def __post_init__(self) -> None:
        require_positive(intermediate_size=self.intermediate_size)
        if self.xielu and (self.gated or self.activation is not Activation.IDENTITY):
            raise ConfigError("an MLP with xIELU has no gate and no other activation")
        if self.clamp is not None and not (self.gated and self.activation is Activation.SILU):
            raise ConfigError("bounds of a gated unit are those of a gated SiLU")


@dataclass(frozen=True, slots=True)
class ChoiceConfig:
    """How a router chooses experts by scores, biases and groups (DeepSeek-AI 2024: DeepSeek-V3).

    Scores are the sigmoid of each logit, or the softmax of all. An expert's learned bias is added to its score for the
    choice only. Experts are in groups; a token chooses within the groups with the best sums of their two best experts.
    """

    sigmoid: bool = True
    groups: int = 1
    groups_per_token: int = 1
    factor: float = 1.0  # multiplies the chosen scores last
    least: float = 1e-20  # lower bound on the divisor of renormalised scores

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
    shared: MLPConfig | None = None  # an expert for all tokens
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a projection to one number (Qwen2-MoE)
    # Experts and shared expert each have norms before and after them; the router has a norm and a scale (Gemma 4).
    own_norms: NormConfig | None = None
    router_scale: float = 1.0
    expert_scales: bool = False  # an expert's weight is multiplied by a learned number (Gemma 4)
    choice: ChoiceConfig | None = None  # None: the largest logits, and their softmax
    # SparseMixer's tolerance (Liu et al. 2024): an expert's score is its softmax over the remaining logits that are at
    # most twice this share below its own. None: not SparseMixer.
    mixer_tolerance: float | None = None
    held: tuple[int, int] | None = None  # the range of experts that this rank has; None: it has some columns of each

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
    """A vector of each token for each layer, which a last sublayer adds to x through a gate (Gemma 3n, Gemma 4).

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
    """One layer: a token mixer (attention or a recurrence), cross attention in decoders with an encoder, then a
    feed-forward.

    Each is a sublayer with a residual sum and its own `Norms`. In a `parallel` layer both sublayers read the same x:
    `x + output(mixer(pre(x))) + output(feed_forward(pre(x)))` (GPT-NeoX); with `one_norm` they read the same norm of
    it, the mixer's (GPT-J).
    """

    mixer: AttentionConfig | GatedDeltaConfig
    feed_forward: MLPConfig | ExpertsConfig
    norms: tuple[Norms, ...]  # one for each sublayer, in order
    cross: AttentionConfig | None = None
    parallel: bool = False
    one_norm: bool = False  # of a parallel layer
    normed_residual: bool = False  # x = pre(x) + sublayer(pre(x)): a sublayer's output is added to its input (BLOOM)
    residual_scale: float = 1.0  # multiplies the output of each sublayer (Granite)
    channel_scales: bool = False  # so does a learned number for each channel (LayerScale, Touvron et al. 2021)
    embedding: LayerEmbeddingConfig | None = None  # a vector of each token for this layer
    scaled: bool = False  # the layer's output is multiplied by a learned number (Gemma 4)
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
        """The feed-forward of a layer that is known to have no experts."""
        assert isinstance(self.feed_forward, MLPConfig)
        return self.feed_forward
