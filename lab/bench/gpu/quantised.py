"""Models of the GPU benchmark whose projections are quantised in place, on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from triptych.model.linear.base import CompiledLinear
from triptych.model.linear.float import FloatLinear
from triptych.model.network.transformer import Transformer

Made = TypeVar("Made", bound=CompiledLinear)


def quantise_layers(model: Transformer, quantised: Callable[[FloatLinear], CompiledLinear]) -> None:
    """Replace the projections of all layers, one after the other, so that two forms of one are the most at a time."""
    for stack in (model.encoder, model.decoder):
        for module in stack.layers.modules() if stack is not None else ():
            for name, child in list(module.named_children()):
                if isinstance(child, FloatLinear):
                    setattr(module, name, quantised(child))


def filled(made: Made, linear: FloatLinear) -> Made:
    """Give `made` the weights and bias of `linear`, which it quantises as those of a checkpoint."""
    spec, weight = linear.spec, linear.weight.detach()
    rows = (slice(0, spec.num_outputs),)
    made.fill(spec.weight, rows, weight)
    if linear.bias is not None:
        made.fill(f"{spec.name}.bias", rows, linear.bias.detach())
    made.finish()
    made.kernels = weight.device.type == "cuda"  # a whole model takes minutes in the interpreter
    return made
