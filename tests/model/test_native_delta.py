"""Recurrent layers in C against their definition, token by token in float64: slots, cuts, batches and threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, rms_norm, silu, softplus

from tests.model.checkpoints import native_backends
from tests.model.tiled import HERE
from triptych.model.linear.native import packed_linear
from triptych.model.native.build import Built, Level, build_portable
from triptych.model.native.library import Library, native
from triptych.model.native.structures import (
    DeltaLayer,
    Layer,
    LayerStates,
    Norm,
    Segments,
    Stack,
    StateSpan,
    Step,
    SublayerNorms,
)

pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
HIDDEN, NONE = 24, -1
SHAPES = {  # key heads, value heads, their widths, the convolution's width: whole, cut and smaller slices of a state
    "whole": (2, 4, 20, 64, 4),
    "cut": (1, 3, 33, 71, 2),
    "narrow": (3, 3, 7, 5, 6),
}
LEVELS_HERE = [pytest.param(level, id=level.name, marks=pytest.mark.slow) for level in HERE]


@pytest.fixture(scope="module", params=[pytest.param(None, id="own"), *LEVELS_HERE])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return this CPU's own library and, in slow runs, one of each level that it runs."""
    level: Level | None = request.param
    if level is None:
        found = native()
        assert isinstance(found, Library)
        return found
    [path] = build_portable(tmp_path_factory.mktemp("delta"), [level])
    return Library(Built(path, f"prebuilt for {level.name}"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    torch.manual_seed(0)
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


class Recurrent:
    """A layer of random weights with a trivial feed-forward, and eight slots."""

    def __init__(
        self, library: Library, shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32
    ) -> None:
        self.library, self.shape, self.dtype = library, shape, dtype
        key_heads, value_heads, key_dim, value_dim, kernel = shape
        self.values, self.channels = value_heads * value_dim, 2 * key_heads * key_dim + value_heads * value_dim
        self.weights = {
            "input": torch.randn(self.channels + self.values, HIDDEN) * HIDDEN**-0.5,
            "gates": torch.randn(2 * value_heads, HIDDEN) * HIDDEN**-0.5,
            "output": torch.randn(HIDDEN, self.values) * self.values**-0.5,
            "taps": torch.randn(kernel, self.channels) * 0.6,
            "decay": torch.rand(value_heads) * 2,
            "dt_bias": torch.randn(value_heads),
            "norm": torch.rand(value_dim) + 0.5,
            "pre": torch.rand(HIDDEN) + 0.5,
        }
        for name in ("input", "output"):  # the products in the model's number format
            self.weights[name] = self.weights[name].to(dtype).float()
        self._kept: list[Any] = []
        self.delta = DeltaLayer(SublayerNorms(), *shape, scale=0.7)
        self.delta.norms = SublayerNorms(pre=Norm(2, 1e-5, self._at("pre")))
        self.delta.norm = Norm(2, 1e-3, self._at("norm"))
        for name, kept in (("input", dtype), ("gates", torch.float32), ("output", dtype)):
            setattr(self.delta, name, self._matrix(self.weights[name].to(kept)))
        for name in ("taps", "decay", "dt_bias"):
            setattr(self.delta, name, self._at(name))
        layer = Layer(delta=ctypes.pointer(self.delta))
        layer.mlp.up, layer.mlp.down, layer.mlp.activation = self._nothing(4, HIDDEN), self._nothing(HIDDEN, 4), 1
        self.stack = Stack(hidden=HIDDEN, num_layers=1, layers=(ctypes.POINTER(Layer) * 1)(ctypes.pointer(layer)))
        self.recurrent = torch.full((8, value_heads, key_dim, value_dim), torch.nan)
        self.kept = torch.full((8, kernel - 1, self.channels), torch.nan)
        self.states = (LayerStates * 1)(LayerStates(self.recurrent.data_ptr(), self.kept.data_ptr()))

    def __call__(self, x: Tensor, spans: Sequence[tuple[int, int, int, int]], *, cached: bool = True) -> Tensor:
        out, starts = x.clone(), torch.tensor([0, len(x)])
        segments = (Segments * 1)(Segments(1, True, q_starts=starts.data_ptr(), k_starts=starts.data_ptr()))
        lens = torch.tensor([len(x)])
        segments[0].kv_lens = lens.data_ptr()
        step = Step(rows=len(x), last_layer=1, num_segments=1, segments=segments, num_spans=len(spans))
        step.spans = (StateSpan * len(spans))(*(StateSpan(*span) for span in spans))
        if cached:
            step.states = self.states
        self.library.run_stack(self.stack, step, out)
        return out

    def one_by_one(self, x: Tensor) -> Tensor:
        """Compute one sequence by the definition from its beginning; product inputs are rounded to their format."""
        key_heads, value_heads, key_dim, value_dim, kernel = self.shape
        w = {name: weight.double() for name, weight in self.weights.items()}
        rows = rms_norm(x.double(), (HIDDEN,), w["pre"], 1e-5)
        mixed, gate = (rows.to(self.dtype).double() @ w["input"].T).split((self.channels, self.values), dim=1)
        rate, decay = (rows @ w["gates"].T).chunk(2, dim=1)
        decay = (-w["decay"] * softplus(decay + w["dt_bias"])).exp()
        before = torch.cat((mixed.new_zeros(kernel - 1, self.channels), mixed))
        seen = silu(sum(before[tap : tap + len(x)] * w["taps"][tap] for tap in range(kernel)))
        sizes = (key_heads * key_dim, key_heads * key_dim, self.values)
        q, k, v = (
            part.unflatten(1, (heads, -1))
            for part, heads in zip(seen.split(sizes, dim=1), (key_heads, key_heads, value_heads), strict=True)
        )
        q, k = (normalize(part, dim=-1).repeat_interleave(value_heads // key_heads, 1) for part in (q, k))
        state, outputs = mixed.new_zeros(value_heads, key_dim, value_dim), []
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            change = rate[t].sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t, :, :, None] * change[:, None]
            outputs.append(torch.einsum("hk,hkv->hv", q[t] * key_dim**-0.5, state))
        out = rms_norm(torch.stack(outputs), (value_dim,), w["norm"], 1e-3).flatten(1) * silu(gate)
        return x + self.delta.scale * (out.to(self.dtype).double() @ w["output"].T)

    def _at(self, name: str) -> int:
        return self.weights[name].data_ptr()

    def _matrix(self, weight: Tensor) -> Any:
        self._kept.append(packed_linear(self.library, weight, None))
        return self._kept[-1].matrix

    def _nothing(self, n: int, k: int) -> Any:
        return self._matrix(torch.zeros(n, k))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_beside_each_other_are_what_the_definition_gives(
    library: Library, shape: str, count: int, dtype: torch.dtype
) -> None:
    """Bits do not depend on batches, cuts or threads; a step can write a state after tokens within it."""
    torch.set_num_threads(count)
    layer, x = Recurrent(library, SHAPES[shape], dtype), [torch.randn(length, HIDDEN) for length in (41, 9)]
    first = layer(torch.cat((x[0][:17], x[1][:1])), [(0, 11, NONE, 0), (11, 17, 0, 1), (17, 18, NONE, 2)])
    second = layer(torch.cat((x[1][1:3], x[0][17:18])), [(0, 2, 2, 3), (2, 3, 1, 4)])
    third = layer(torch.cat((x[0][18:], x[1][3:])), [(0, 23, 4, 5), (23, 29, 3, 6)])
    found = torch.cat((first[:17], second[2:], third[:23])), torch.cat((first[17:], second[:2], third[23:]))
    for ours, given in zip(found, x, strict=True):
        close(ours, layer.one_by_one(given), 1e-4 if dtype == torch.float32 else 5e-3)  # a last bit flips
    kept = layer.recurrent[[0, 5]].clone(), layer.kept[[0, 5]].clone()
    torch.set_num_threads(2)
    assert torch.equal(layer(x[0], [(0, 41, NONE, 5)]), found[0])
    assert torch.equal(layer(x[0][:11], [(0, 11, NONE, 0)]), found[0][:11])
    assert all(torch.equal(now[[0, 5]], then) for now, then in zip((layer.recurrent, layer.kept), kept, strict=True))
    assert torch.equal(layer(x[0][11:17], [(0, 6, 0, 7)]), found[0][11:17])  # from the state written within a step


def test_without_slots_sequences_begin_with_zeros_and_keep_nothing(library: Library) -> None:
    layer, x = Recurrent(library, SHAPES["cut"]), torch.randn(12, HIDDEN)
    found = layer(x, [(0, 5, NONE, NONE), (5, 12, NONE, NONE)], cached=False)
    close(found, torch.cat([layer.one_by_one(part) for part in x.split((5, 7))]))
    assert layer.recurrent.isnan().all()


def test_what_a_step_reads_stays_as_it_was(library: Library) -> None:
    """The same step can run twice, and two sequences can continue from one state."""
    layer, x = Recurrent(library, SHAPES["whole"]), torch.randn(9, HIDDEN)
    layer(x[:6], [(0, 6, NONE, 0)])
    twice = x[[6, 7, 6, 8]]
    found = layer(twice, [(0, 2, 0, 1), (2, 4, 0, 2)])
    assert torch.equal(layer(twice, [(0, 2, 0, 1), (2, 4, 0, 2)]), found)
    assert torch.equal(found[0], found[2])
    close(found[:2], layer.one_by_one(x[:8])[6:])
    close(found[2:], layer.one_by_one(x[[*range(7), 8]])[6:])


def test_strong_decays_leave_nothing_but_numbers(library: Library) -> None:
    layer, x = Recurrent(library, SHAPES["whole"]), torch.randn(70, HIDDEN)
    layer.weights["decay"] *= 500
    close(layer(x, [(0, 70, NONE, 0)]), layer.one_by_one(x))


def test_control_a_state_of_another_sequence_shows(library: Library) -> None:
    layer, x = Recurrent(library, SHAPES["whole"]), torch.randn(12, HIDDEN)
    layer(x[:8], [(0, 8, NONE, 0)])
    layer(torch.randn(8, HIDDEN), [(0, 8, NONE, 1)])
    expected = layer.one_by_one(x)[8:].float()
    assert (layer(x[8:], [(0, 4, 0, 2)]) - expected).abs().max() < 1e-4
    assert (layer(x[8:], [(0, 4, 1, 2)]) - expected).abs().max() > 1e-2
