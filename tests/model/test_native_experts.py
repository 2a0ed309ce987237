"""Mixtures of experts in C: equal to a float64 reference, with bits that do not depend on other rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.model.checkpoints import native_backends
from tests.model.test_native_layers import HIDDEN, SLOTS, Case, InC, Reference, close, library, threads
from triptych.model.linear.native import packed_linear
from triptych.model.native.library import CLAMPED_SILU, Kind, Library
from triptych.model.native.structures import Expert, ExpertsLayer, Layer, MLPLayer, PackedMatrix

__all__ = ["library", "threads"]  # fixtures
pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
LIMIT, GAIN = 0.9, 1.702
FORMATS = ((Kind.F32, 0), (Kind.BF16, 0), (Kind.INT8, 0), (Kind.INT8, 128), (Kind.INT4, 32), (Kind.INT4, 64))


@dataclass
class Mixture(Case):
    """A layer whose feed-forward is experts; `inner` is the inner size of each."""

    activation: int = 4
    count: int = 9
    active: int = 3
    of_chosen: bool = False
    biased_experts: bool = False
    shared: int = 0  # the inner size of an expert for all rows; 0: no such expert
    gate: bool = False  # of the shared expert
    kind: Kind = Kind.F32
    group: int = 0

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return an expert's first and last matrix; number `count` is the shared expert."""
        inner = self.inner if expert < self.count else self.shared
        up = self.weight(f"up{expert}", inner * (1 + self.gated), HIDDEN)
        return up, self.weight(f"down{expert}", HIDDEN, inner)

    def biases(self, expert: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self.biased_experts:
            return None, None
        up, down = self.matrices(expert)
        return self.weight(f"up_bias{expert}", len(up)), self.weight(f"down_bias{expert}", len(down))

    @property
    def experts(self) -> range:
        return range(self.count + bool(self.shared))


class MixtureReference(Reference):
    def _mlp(self, case: Case, x: Tensor) -> Tensor:
        if not isinstance(case, Mixture):
            return super()._mlp(case, x)
        logits = x @ case.weight("router", case.count, HIDDEN).double().T
        chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, : case.active]
        scores = logits.softmax(1).gather(1, chosen)
        if case.of_chosen:
            scores = scores / scores.sum(1, keepdim=True)
        out = torch.zeros_like(x)
        for row, (experts, weights) in enumerate(zip(chosen.tolist(), scores, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                out[row] += weight * self._expert(case, expert, x[row])
            if case.shared:
                gate = torch.sigmoid(x[row] @ case.weight("gate", 1, HIDDEN)[0].double()) if case.gate else 1.0
                out[row] += gate * self._expert(case, case.count, x[row])
        return out

    def _expert(self, case: Mixture, expert: int, row: Tensor) -> Tensor:
        (up, down), (up_bias, down_bias) = case.matrices(expert), case.biases(expert)
        found = up.double() @ row + (0.0 if up_bias is None else up_bias.double())
        gate, found = found.chunk(2) if case.gated else (found, torch.ones(()))
        if case.activation == CLAMPED_SILU:
            gate, found = gate.clamp(max=LIMIT), found.clamp(-LIMIT, LIMIT) + 1
            inner = gate * torch.sigmoid(GAIN * gate) * found
        else:
            inner = silu(gate) * found
        return down.double() @ inner + (0.0 if down_bias is None else down_bias.double())


class MixtureInC(InC):
    def _layer(self, case: Case) -> Layer:
        layer = super()._layer(case)
        if isinstance(case, Mixture):
            layer.mlp = self._experts(case)
        return layer

    def _experts(self, case: Mixture) -> MLPLayer:
        pairs = [zip(case.matrices(i), case.biases(i), strict=True) for i in case.experts]
        experts = [Expert(*(self._packed(case, weight, bias) for weight, bias in pair)) for pair in pairs]
        given = ExpertsLayer(case.count, case.active, case.of_chosen, has_shared=bool(case.shared))
        given.router = self._matrix(case.weight("router", case.count, HIDDEN))
        given.experts = (Expert * len(experts))(*experts)
        if case.gate:
            given.shared_gate = self._matrix(case.weight("gate", 1, HIDDEN))
        layer = MLPLayer(self._norms(case, "mlp"), gated=case.gated, activation=case.activation, limit=LIMIT, gain=GAIN)
        layer.scale, layer.experts = case.adds, ctypes.pointer(given)
        return layer

    def _packed(self, case: Mixture, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        packed = packed_linear(self.library, weight, bias, case.kind, case.group)
        self._kept.append(packed)
        return packed.matrix


PLAIN = Mixture(inner=37, rotary=0, sinks=True)
SHARED = Mixture(inner=20, of_chosen=True, shared=50, gate=True, norms=SLOTS[:2], window=9, segments=1, sinks=True)
CLAMPED = Mixture(inner=32, of_chosen=True, activation=CLAMPED_SILU, biased_experts=True, active=2, adds=0.5)
UNGATED = Mixture(inner=24, gated=False, shared=30, active=9, parallel=True)
ALTERNATING = (PLAIN, Case(rotary=1), SHARED, CLAMPED, UNGATED)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "cases",
    [ALTERNATING, (PLAIN,), (SHARED,), (CLAMPED,), (UNGATED,)],
    ids=["all", "plain", "shared", "clamped", "ungated"],
)
def test_rows_take_their_experts_alone(library: Library, cases: tuple[Case, ...], count: int) -> None:
    torch.set_num_threads(count)
    inputs = [torch.randn(length, HIDDEN) for length in (60, 21)]
    ours, reference = MixtureInC(library, cases), MixtureReference(cases, causal=True)
    whole = ours.step(torch.cat(inputs), [(60, 60), (21, 21)], paged=True).split((60, 21))
    for x, found in zip(inputs, whole, strict=True):
        close(found, reference(x))
    cut = MixtureInC(library, cases)
    parts = [cut.step(inputs[0][a:b], [(b - a, b)], paged=True) for a, b in ((0, 1), (1, 3), (3, 50), (50, 60))]
    assert torch.equal(torch.cat(parts), whole[0])  # bit for bit, whatever other rows are in the batch


@pytest.mark.parametrize(("kind", "group"), FORMATS, ids=lambda value: str(value))
def test_bits_are_those_of_a_row_alone_in_every_number_format(library: Library, kind: Kind, group: int) -> None:
    case = Mixture(inner=40, count=6, active=2, shared=70, gate=True, norms=("pre", "output"), kind=kind, group=group)
    ours = MixtureInC(library, (case,), causal=False)
    x = torch.randn(2100, HIDDEN)  # two chunks, of several waves
    found = {}
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        found[count] = ours.step(x, [(1, 1)] * len(x), paged=False)
        assert torch.equal(found[count], found[1])
    for row in (0, 3, 700, 2099):
        assert torch.equal(ours.step(x[row : row + 1], [(1, 1)], paged=False), found[1][row : row + 1])
    if kind is not Kind.INT4:  # INT4 rounds weights too much
        expected = MixtureReference((case,), causal=False)(x[:1])
        torch.testing.assert_close(found[1][:1], expected.float(), atol=0.1, rtol=0.05)


def test_of_equal_logits_the_first_experts_are_taken(library: Library) -> None:
    x = torch.randn(5, HIDDEN)
    equal = Mixture(count=40, active=3, weights={"router": torch.zeros(40, HIDDEN)})
    found = MixtureInC(library, (equal,)).step(x, [(5, 5)], paged=True)
    few = Mixture(count=3, active=3, of_chosen=True, weights=equal.weights | {"router": torch.zeros(3, HIDDEN)})
    expected = MixtureInC(library, (few,)).step(x, [(5, 5)], paged=True)
    assert not torch.allclose(found, expected, atol=1e-3)  # their weights are each a 40th
    equal.of_chosen = True
    assert torch.equal(MixtureInC(library, (equal,)).step(x, [(5, 5)], paged=True), expected)
