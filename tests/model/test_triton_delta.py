"""Triton's kernels of recurrent layers against the definition, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.model.triton_cases import DEVICES
from triptych.model.attention import triton_delta
from triptych.model.attention.layer_backends import Recurrence
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import StateCache, StateSpan, StateTables, whole_segments
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.config.cache import NO_STATE

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.parametrize("device", DEVICES)]
SHARED = GatedDeltaConfig(2, 4, 12, 8, 4, 1e-6)  # two value heads for each key head, of sizes that are no powers of two
WIDE = GatedDeltaConfig(1, 1, 16, 40, 3, 1e-3)  # values in two blocks
SLOW = pytest.mark.slow  # takes seconds in the interpreter


class Problem:
    """A layer, its rows, and states that all differ."""

    def __init__(self, config: GatedDeltaConfig, rows: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        heads = config.num_value_heads
        self.config, self.device = config, torch.device(device)
        self.inputs = normal(rows, config.channels + config.value_size).to(device, dtype)
        self.gates = normal(rows, 2 * heads).to(device, dtype)
        parameters = normal(config.channels, config.kernel), normal(heads), normal(heads), normal(config.value_dim)
        self.layer = Recurrence(config, *(one.to(device, dtype) for one in parameters))
        self.states = StateCache(*(normal(6, *shape).to(device) for shape in config.state_shapes))

    def computed(self, spans: Sequence[StateSpan], *, kept: bool = True) -> Tensor:
        tables = StateTables.of(spans, TritonBackend.chunk, self.device)
        states = self.states if kept else None
        return TritonBackend().recur(self.layer, self.inputs, self.gates, tables, states)

    def defined(self, spans: Sequence[StateSpan]) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Return outputs of the spans' rows, 0 for other rows, and the contents of the slots that they write."""
        config, layer = self.config, self.layer
        inputs, gates = self.inputs.double(), self.gates.double()
        keys, values, heads = config.key_size, config.value_size, config.num_value_heads
        written: dict[int, tuple[Tensor, Tensor]] = {}
        out = torch.zeros(len(inputs), values, dtype=torch.float64, device=self.device)
        for first, last, source, target in spans:
            state, before = (
                written[source]
                if source in written and source != NO_STATE
                else [
                    x[source].double() * (source != NO_STATE) for x in (self.states.recurrent, self.states.convolution)
                ]
            )
            mixed = torch.cat((before, inputs[first:last, : config.channels]))
            for at in range(first, last):
                seen = mixed[at - first : at - first + config.kernel]
                row = functional.silu((seen * layer.convolution.double().T).sum(dim=0))
                q, k, v = row.split((keys, keys, values))
                q, k = (
                    x.view(-1, config.key_dim) / (x.view(-1, config.key_dim).norm(dim=-1, keepdim=True)) for x in (q, k)
                )
                rate, fade = gates[at].chunk(2)
                fade = torch.exp(-layer.decay.double().exp() * functional.softplus(fade + layer.dt_bias.double()))
                state = state * fade[:, None, None]
                for head in range(heads):
                    key, query = (x[head * len(k) // heads] for x in (k, q))
                    value = v.view(heads, -1)[head]
                    change = rate[head].sigmoid() * (value - state[head].T @ key)
                    state[head] += torch.outer(key, change)
                    found = state[head].T @ query * config.key_dim**-0.5
                    found = functional.rms_norm(found, found.shape, layer.gain.double(), config.eps)
                    gate = inputs[at, config.channels + head * config.value_dim :][: config.value_dim]
                    out[at, head * config.value_dim : (head + 1) * config.value_dim] = found * functional.silu(gate)
            written[target] = state.clone(), mixed[len(mixed) - config.kernel + 1 :]
        written.pop(NO_STATE, None)
        return out, written


def check(problem: Problem, spans: Sequence[StateSpan], within: float = 2e-5, *, kept: bool = True) -> None:
    expected, written = problem.defined(spans)
    before = [x.clone() for x in (problem.states.recurrent, problem.states.convolution)]
    found = problem.computed(spans, kept=kept)
    rows = [row for span in spans for row in range(span.first, span.last)]
    assert (found.double()[rows] - expected[rows]).abs().max() < within * max(1.0, float(expected.abs().max()))
    for slot in range(len(before[0])):
        for there, was, wanted in zip(
            (problem.states.recurrent, problem.states.convolution), before, written.get(slot, (None, None)), strict=True
        ):
            if wanted is None:
                assert torch.equal(there[slot], was[slot]), f"slot {slot} must not be written"
            else:
                assert (there[slot].double() - wanted).abs().max() < within * 10


@pytest.mark.parametrize("config", [pytest.param(SHARED, marks=SLOW), WIDE])
def test_single_tokens(config: GatedDeltaConfig, device: str) -> None:
    """Rows with a state, without one, with one that is not kept, and a row that no span has."""
    check(
        Problem(config, 4, device), [StateSpan(0, 1, 2, 5), StateSpan(1, 2, NO_STATE, 0), StateSpan(2, 3, 1, NO_STATE)]
    )


@SLOW
def test_rows_beyond_a_recorded_step_change_nothing(device: str) -> None:
    problem = Problem(SHARED, 4, device)
    spans = [StateSpan(0, 1, 2, 5), StateSpan(1, 2, 3, 0)]
    expected, _ = problem.defined(spans)
    columns = torch.tensor([[0, 1, 2, 3], [2, 3, NO_STATE, NO_STATE], [5, 0, NO_STATE, NO_STATE]], device=device)
    others = [one[[1, 2, 3, 4]].clone() for one in (problem.states.recurrent, problem.states.convolution)]
    found = TritonBackend().recur(problem.layer, problem.inputs, problem.gates, StateTables(columns), problem.states)
    assert (found[:2].double() - expected[:2]).abs().max() < 1e-4
    assert found.isfinite().all()
    for there, was in zip((problem.states.recurrent, problem.states.convolution), others, strict=True):
        assert torch.equal(there[[1, 2, 3, 4]], was)


@pytest.mark.parametrize("config", [pytest.param(SHARED, marks=SLOW), WIDE])
def test_packed_prompts_beside_decoding(config: GatedDeltaConfig, device: str) -> None:
    """Chunks of all lengths, snapshots in a prompt, single rows after a span, and a prompt shorter than the taps."""
    spans = [
        StateSpan(0, 1, 1, 0),
        StateSpan(1, 35, NO_STATE, 3),  # two chunks, then a snapshot
        StateSpan(35, 36, 3, 5),  # and one token after it
        StateSpan(36, 38, 2, 4),  # as long as the kept part of the state, or shorter
    ]
    check(Problem(config, 38, device), spans)


@SLOW
def test_texts_without_a_cache(device: str) -> None:
    check(Problem(SHARED, 9, device), whole_segments((5, 1, 3)), kept=False)


@SLOW
@pytest.mark.parametrize("scale", [0.0, 20.0])
def test_equal_keys_and_strong_decays(scale: float, device: str) -> None:
    """Powers of a system of equal keys would exceed float32's precision; sums of strong decays reach thousands."""
    problem = Problem(SHARED, 34, device)
    problem.inputs[:] = problem.inputs[:1]
    problem.gates[:, :4] = 9.0
    problem.gates[:, 4:] = torch.linspace(-9.0, scale, 34, device=device)[:, None]
    check(problem, [StateSpan(0, 34, NO_STATE, 2)], within=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=SLOW), torch.float16])
def test_rows_of_16_bits(dtype: torch.dtype, device: str) -> None:
    check(Problem(SHARED, 9, device, dtype), [StateSpan(0, 1, 1, 0), StateSpan(1, 9, 2, 3)], within=1e-2)


@SLOW
def test_a_prompt_in_parts_is_the_whole_prompt(device: str) -> None:
    problem = Problem(SHARED, 40, device)
    whole = problem.computed([StateSpan(0, 40, NO_STATE, 0)])
    places = (0, 1, 33, 34, 40)
    for number, (first, last) in enumerate(pairwise(places)):
        part = problem.computed([StateSpan(first, last, number or NO_STATE, number + 1)])
        assert (part[first:last] - whole[first:last]).abs().max() < 1e-4
    assert (problem.states.recurrent[4] - problem.states.recurrent[0]).abs().max() < 1e-4


def test_large_states_are_left_to_torch(device: str) -> None:
    assert triton_delta.unsupported(SHARED) is None
    reason = TritonBackend().unsupported_recurrence(GatedDeltaConfig(1, 1, 256, 128, 4, 1e-6), torch.float32)
    assert reason is not None and "256 x 128" in reason
