"""Steps of recurrent layers with random rows and states, generated on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.model.attention.layer_backends import Recurrence
from triptych.model.cache.kv_cache import StateCache, StateSpan, StateTables
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.network.delta_net import recur

QWEN = GatedDeltaConfig(16, 32, 128, 128, 4, 1e-6)  # Qwen3-Next, Qwen3.5


@dataclass(frozen=True, slots=True)
class RecurrentProblem:
    """Describes a step of one layer: each segment of these lengths reads a slot and writes another."""

    lengths: tuple[int, ...]
    config: GatedDeltaConfig = QWEN

    @property
    def state_bytes(self) -> int:
        """Return the bytes of states that are read and written."""
        return 8 * len(self.lengths) * self.config.state_elements


class RecurrentStep:
    """Holds a layer and the rows and slots of a step."""

    def __init__(self, problem: RecurrentProblem, device: torch.device, dtype: torch.dtype) -> None:
        config, rows, count = problem.config, sum(problem.lengths), len(problem.lengths)
        draw = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(of)

        heads = config.num_value_heads
        shapes = (config.channels, config.kernel), (heads,), (heads,), (config.value_dim,)
        self.layer = Recurrence(config, *(normal(*shape) for shape in shapes))
        self.inputs, self.gates = normal(rows, config.channels + config.value_size), normal(rows, 2 * heads)
        states = (normal(2 * count, *shape, of=torch.float32) for shape in config.state_shapes)
        self.states = StateCache(*states)
        self.spans, first = list[StateSpan](), 0
        for place, length in enumerate(problem.lengths):
            self.spans.append(StateSpan(first, first + length, place, count + place))
            first += length

    def expected(self, spans: Iterable[StateSpan]) -> tuple[Tensor, StateCache]:
        """Return outputs and states by torch in float32, and leave the step as it is."""
        states = StateCache(self.states.recurrent.clone(), self.states.convolution.clone())
        return recur(self.layer, self.inputs.float(), self.gates.float(), spans, states), states

    def by_kernels(self, tables: StateTables) -> Tensor:
        from triptych.model.attention import triton_delta

        return triton_delta.compute(self.layer, self.inputs, self.gates, tables, self.states)
