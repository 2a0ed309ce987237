"""What the tables of families with experts share: their settings, their layers, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from model.config.layer import ExpertsConfig
from model.config.model import ModelConfig
from model.families.table.helpers import fused
from model.families.table.rules import FusedExperts, LinearRule, Rule, TensorRule


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
    decoder = config.decoder
    assert decoder is not None
    sparse = decoder.with_layers(lambda layer: replace(layer, feed_forward=experts)).layers
    layers = (layer if index in dense else sparse[index] for index, layer in enumerate(decoder.layers))
    return replace(config, decoder=replace(decoder, layers=tuple(layers)))
