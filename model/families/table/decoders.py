"""What the tables of decoders share: the model around a stack, layers with experts, attention in both directions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from triptych.model.config.attention import RotaryConfig
from triptych.model.config.layer import ExpertsConfig, LayerConfig
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.table.heads import classifier
from triptych.model.families.table.helpers import decoder_head, fused, ids, layers_by_type
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, FusedExperts, LinearRule, Rule, TensorRule

# -- What the tables of decoder-only families share: the model around a stack, and changes of its layers.


def decoder_model(
    raw: Settings,
    names: Collection[str] | None,
    decoder: StackConfig,
    max_positions: int | None,
    *,
    head: str = "lm_head.weight",
    head_bias: bool = False,
    head_scale: float = 1.0,
) -> ModelConfig:
    """Return the model of a decoder with a head for tokens, stored as `head`, or a classifier instead."""
    labels = classifier(raw, names)
    vocabulary = None if labels else decoder_head(raw, names, head)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], decoder.hidden_size),
        decoder=decoder,
        head=vocabulary and replace(vocabulary, bias=head_bias, scale=head_scale),
        classifier=labels,
        max_positions=max_positions,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
    )


def with_layers(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a decoder-only model with fields of every layer changed."""
    return replace(config, decoder=config.decoder_stack.with_layers(lambda layer: replace(layer, **changes)))


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a decoder-only model with fields of every layer's attention changed."""
    changed = config.decoder_stack.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, **changes)))
    return replace(config, decoder=changed)


def with_windows(
    config: ModelConfig,
    raw: Settings,
    window: int | None,
    period: int,
    *,
    full: Mapping[str, Any] = MappingProxyType({}),
    sliding: Mapping[str, Any] = MappingProxyType({}),
) -> ModelConfig:
    """Return a decoder-only model whose layers have a window or not, as `layer_types` or the period tells.

    `full` and `sliding` change the attention of each kind.
    """
    layer = config.decoder_stack.layers[0]
    layers = {
        "sliding_attention": replace(layer, mixer=replace(layer.attention, window=window, **sliding)),
        "full_attention": replace(layer, mixer=replace(layer.attention, **full)),
    }
    chosen = layers_by_type(raw, layers, config.decoder_stack.num_layers, period)
    return replace(config, decoder=replace(config.decoder_stack, layers=chosen))


def with_interleaved_pairs(config: ModelConfig) -> ModelConfig:
    """Return a decoder-only model whose rotary positions rotate pairs of neighbours."""
    position = config.decoder_stack.layers[0].attention.position
    assert isinstance(position, RotaryConfig)
    return with_attention(config, position=replace(position, interleaved=True))


# -- What the tables of families with experts share: their settings, their layers, and the names of their tensors.


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a layer's experts are called in a checkpoint, within the layer."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"  # then the number of one
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    choice: str = "mlp.gate.e_score_correction_bias"  # where the router's choice has biases
    choice_shape: tuple[int, ...] = ()  # of more dimensions in front of these
    shared_fused: tuple[str, str] | None = None  # of the shared one: gate and up in one matrix, and down

    def rules(self, config: ExpertsConfig, hidden_size: int, here: str, there: str) -> Iterator[Rule]:
        """Yield the rules of a feed-forward; `here` is the layer's stored name, `there` the parameters'."""
        mlp, (gate, up, down) = config.mlp, self.parts
        yield LinearRule(f"{here}.{self.router}", f"{there}.router", config.router_bias)
        if config.choice is not None:
            yield TensorRule(f"{here}.{self.choice}", f"{there}.biases", shape=(*self.choice_shape, config.count))
        experts = [f"{here}.{self.experts}.{expert}" for expert in range(config.count)]
        inner = {f"{expert}.{part}": mlp.intermediate_size for expert in experts for part in (gate, up)}
        yield from fused(inner, f"{there}.up", bias=mlp.bias)
        yield from fused({f"{expert}.{down}": hidden_size for expert in experts}, f"{there}.down", bias=mlp.bias)
        if config.shared is not None and self.shared_fused is not None:
            for name, part in zip(self.shared_fused, ("up", "down"), strict=True):
                yield LinearRule(f"{here}.{name}", f"{there}.shared.{part}", config.shared.bias)
        elif config.shared is not None:
            columns = config.shared.intermediate_size
            gated = dict.fromkeys((f"{here}.{self.shared}.{part}" for part in (gate, up)), columns)
            yield from fused(gated, f"{there}.shared.up", bias=config.shared.bias)
            yield LinearRule(f"{here}.{self.shared}.{down}", f"{there}.shared.down", config.shared.bias)
        if config.shared_gate:
            yield LinearRule(f"{here}.{self.shared_gate}", f"{there}.shared_gate", bias=False)

    def fused(
        self, up: str = "mlp.experts.gate_up_proj", down: str = "mlp.experts.down_proj", *, written: bool = False
    ) -> tuple[FusedExperts, ...]:
        """Return where all experts of a layer are in one tensor, as `transformers` 5 keeps them in memory."""
        one = f"{self.experts}.{{}}."
        names = [f"{one}{part}.weight" for part in self.parts]
        return FusedExperts(up, tuple(names[:2]), written=written), FusedExperts(down, (names[2],), written=written)


def with_experts(config: ModelConfig, experts: ExpertsConfig, dense: Collection[int] = ()) -> ModelConfig:
    """Return a decoder-only model with experts in all layers but those in `dense`, which keep their MLP."""
    decoder = config.decoder_stack
    sparse = decoder.with_layers(lambda layer: replace(layer, feed_forward=experts)).layers
    layers = (layer if index in dense else sparse[index] for index, layer in enumerate(decoder.layers))
    return replace(config, decoder=replace(decoder, layers=tuple(layers)))


# -- Decoders whose attention sees both directions: the same tensors as an encoder, which embeds and generates nothing.


def either_way(family: Family) -> Family:
    """Return a decoder's table that reads `is_causal` too, as `transformers` does: false makes it an encoder."""

    def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
        found = family.config(raw, names)
        causal = raw.get("is_causal", True)
        if type(causal) is not bool:  # what null means there depends on the attention
            raise ConfigError(f"is_causal must be true or false, found {shown(causal)}")
        if causal or found.decoder is None:
            return found
        return as_encoder(replace(found, decoder=found.decoder.with_layers(see_one_more)))

    return replace(family, config=config, rules=encoder_rules(family.rules))


def as_encoder(config: ModelConfig) -> ModelConfig:
    """Return a decoder-only model as an encoder, whose windows are as wide on both sides."""
    return replace(config, encoder=replace(config.decoder_stack, causal=False), decoder=None, head=None)


def encoder_rules(rules: Callable[[ModelConfig], Iterable[Rule]]) -> Callable[[ModelConfig], Iterable[Rule]]:
    """Return the rules of a decoder, for the parameters of an encoder where the model is one."""

    def either(config: ModelConfig) -> Iterator[Rule]:
        if config.encoder is None:
            yield from rules(config)
            return
        for rule in rules(replace(config, encoder=None, decoder=config.encoder)):
            own, rest = rule.target.partition(".")[::2]
            yield replace(rule, target=f"encoder.{rest}") if own == "decoder" else rule

    return either


def see_one_more(layer: LayerConfig) -> LayerConfig:
    """Widen the window by the token itself, which `transformers` does not count in an encoder."""
    window = layer.attention.window
    return layer if window is None else replace(layer, mixer=replace(layer.attention, window=window + 1))
