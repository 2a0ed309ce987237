"""Layers in C that differ from each other: every field of a layer against a reference in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from tests.model.checkpoints import native_backends
from tests.model.tiled import HERE
from triptych.model.linear.native import packed_linear
from triptych.model.native.build import Built, Level, build_portable
from triptych.model.native.library import Kind, Library, native
from triptych.model.native.structures import (
    AttentionLayer,
    AttentionShape,
    KVPages,
    Layer,
    MLPLayer,
    Norm,
    RotaryTable,
    ScoreBias,
    Segments,
    Stack,
    Step,
    SublayerNorms,
)

pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
HIDDEN, CONTEXT, NOWHERE = 40, 96, 1 << 40  # NOWHERE: a block that no memory has
SLOTS = ("pre", "output", "post")
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {3: lambda x: gelu(x, approximate="tanh"), 4: silu}


@dataclass
class Case:
    """A layer's description, with random weights seeded by its name."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    window: int = 0
    scale: float = 0.3
    softcap: float = 0.0
    rotary: int = -1  # index of the rotary base
    biased: bool = False
    slopes: bool = False
    qk_norm: bool = False
    norm_span: int = 0  # 0: all heads share the gains, 1: each head has its own, 2: one norm over all heads
    adds: float = 1.0  # factor of each sublayer's output
    norms: tuple[str, ...] = ("pre",)
    layer_norms: bool = False
    inner: int = 48
    gated: bool = True
    activation: int = 3
    parallel: bool = False
    cross: Case | None = None
    segments: int = 0
    sinks: bool = False
    gated_output: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)

    def weight(self, name: str, *shape: int) -> Tensor:
        if name not in self.weights:
            spread = 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
            self.weights[name] = torch.randn(*shape) * spread + (1.0 if "norm" in name else 0.0)
        return self.weights[name]


BASES = ((8, 100.0, False), (4, 10_000.0, False), (6, 300.0, True))  # dimensions that turn, base, neighbours
WINDOWED = Case(window=9, rotary=0, softcap=2.0, norms=SLOTS[:2], qk_norm=True, segments=1)
FULL = Case(heads=6, kv_heads=1, dim=20, rotary=1, scale=0.2, softcap=3.0, norms=SLOTS[:2], inner=70, activation=4)
PLAIN = Case(heads=2, kv_heads=2, dim=33, norms=SLOTS, layer_norms=True, gated=False, inner=36)  # no positions: NoPE
BIASED = Case(dim=16, biased=True, softcap=1.5, norms=("post",), segments=1, window=20)
PARALLEL = Case(dim=8, rotary=1, norms=SLOTS[:2], parallel=True)
MIXED = (WINDOWED, FULL, PLAIN, BIASED, PARALLEL)
SLOPED = Case(heads=6, kv_heads=3, dim=12, slopes=True, qk_norm=True, norm_span=2, adds=0.4)
NEIGHBOURS = Case(dim=9, rotary=2, qk_norm=True, norm_span=1, adds=0.7, parallel=True, gated_output=True)
OF_DECODERS = (*MIXED, SLOPED, NEIGHBOURS)


OWN = pytest.param(None, id="own")
LEVELS_HERE = [pytest.param(level, id=level.name, marks=pytest.mark.slow) for level in HERE]


@pytest.fixture(scope="module", params=[OWN, *LEVELS_HERE])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return this CPU's own library and, in slow runs, one of each level that it runs."""
    level: Level | None = request.param
    if level is None:
        found = native()
        assert isinstance(found, Library)
        return found
    [path] = build_portable(tmp_path_factory.mktemp("layers"), [level])
    return Library(Built(Path(path), f"prebuilt for {level.name}"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    torch.manual_seed(0)
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


def angles(base: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[T, dim]` of a base, in float64."""
    dim, theta, neighbours = BASES[base]
    turns = positions.double()[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    both = turns.repeat_interleave(2, 1) if neighbours else torch.cat((turns, turns), 1)
    return both.cos(), both.sin()


def growth(base: int, positions: Tensor) -> Tensor:
    """Return the factors of queries at these positions, in float64; only those of the last base are not 1."""
    return 1 + 0.3 * (1 + positions.double() // 8).log() * BASES[base][2]


def slopes_of(case: Case) -> Tensor:
    return case.weight("slopes", case.heads).abs()


def head_norm(case: Case, name: str, x: Tensor) -> Tensor:
    """Norm queries or keys `[H, T, D]`."""
    gains = (case.dim,) if case.norm_span == 0 else (len(x), case.dim)
    weight = case.weight(f"{name}_norm", *gains).double()
    if case.norm_span == 2:
        return rms_norm(x.transpose(0, 1), gains, weight, 1e-5).transpose(0, 1)
    return rms_norm(x, (case.dim,), None, 1e-5) * (weight[:, None] if case.norm_span else weight)


def bias_of(case: Case) -> Tensor:
    return case.weight("score_bias", case.heads, 4 * CONTEXT)


class Reference:
    """The same layers by torch in float64, one segment at a time from its beginning."""

    def __init__(self, cases: Sequence[Case], *, causal: bool) -> None:
        self.cases, self.causal = cases, causal

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        x = x.double()
        for case in self.cases:
            start = x
            x = self._joined(case, "attn", x, self._attention(case, self._norm(case, "attn", "pre", x), None))
            if case.cross is not None:
                assert source is not None
                read = self._norm(case.cross, "attn", "pre", x)
                x = self._joined(case.cross, "attn", x, self._attention(case.cross, read, source.double()))
            read = self._norm(case, "mlp", "pre", start if case.parallel else x)
            x = self._joined(case, "mlp", x, self._mlp(case, read))
        return x

    def _norm(self, case: Case, part: str, slot: str, x: Tensor) -> Tensor:
        if slot not in case.norms:
            return x
        weight = case.weight(f"{part}_{slot}_norm", HIDDEN).double()
        if case.layer_norms:
            return layer_norm(x, (HIDDEN,), weight, case.weight(f"{part}_{slot}_shift", HIDDEN).double(), 1e-5)
        return rms_norm(x, (HIDDEN,), weight, 1e-5)

    def _joined(self, case: Case, part: str, x: Tensor, given: Tensor) -> Tensor:
        return self._norm(case, part, "post", x + self._norm(case, part, "output", case.adds * given))

    def _attention(self, case: Case, x: Tensor, source: Tensor | None) -> Tensor:
        keys = x if source is None else source
        query = x @ case.weight("q", case.heads * case.dim, HIDDEN).double().T
        kv = (keys @ case.weight(name, case.kv_heads * case.dim, HIDDEN).double().T for name in "kv")
        q, k, v = (part.unflatten(1, (-1, case.dim)).transpose(0, 1) for part in (query, *kv))
        if case.qk_norm:
            q = head_norm(case, "q", q)
            k = k if source is not None else head_norm(case, "k", k)
        if case.rotary >= 0:
            q, k = (rotated(part, case.rotary) for part in (q, k))
            q = q * growth(case.rotary, torch.arange(q.shape[1]))[:, None]
        k, v = (part.repeat_interleave(case.heads // case.kv_heads, 0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        if case.biased:
            scores = scores + bias_of(case).double()[:, distance + 2 * CONTEXT]
        if case.slopes:
            scores = scores + slopes_of(case).double()[:, None, None] * distance
        if source is None:
            hidden = distance > 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
            if case.window:
                hidden |= distance.abs() >= case.window
            scores = scores.masked_fill(hidden, -torch.inf)
        if case.sinks:
            sinks = case.weight("sinks", case.heads).double()[:, None, None].expand(-1, q.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        out = (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1).flatten(1)
        if case.gated_output:
            out = out * (x @ case.weight("g", case.heads * case.dim, HIDDEN).double().T).sigmoid()
        return out @ case.weight("out", HIDDEN, case.heads * case.dim).double().T

    def _mlp(self, case: Case, x: Tensor) -> Tensor:
        up = x @ case.weight("up", case.inner * (1 + case.gated), HIDDEN).double().T
        act = ACTIVATIONS[case.activation]
        inner = act(up[:, : case.inner]) * up[:, case.inner :] if case.gated else act(up)
        return inner @ case.weight("down", HIDDEN, case.inner).double().T


def rotated(x: Tensor, base: int) -> Tensor:
    """Rotate by positions from 0 on, the first dimensions of each head `[H, T, D]`."""
    cos, sin = angles(base, torch.arange(x.shape[1]))
    size = cos.shape[1]
    if BASES[base][2]:
        across = torch.stack((-x[..., 1:size:2], x[..., 0:size:2]), -1).flatten(-2)
    else:
        across = torch.cat((-x[..., size // 2 : size], x[..., : size // 2]), -1)
    return torch.cat((x[..., :size] * cos + across * sin, x[..., size:]), -1)


class InC:
    """The layers as C structures, a paged cache, and tables for two pools."""

    def __init__(self, library: Library, cases: Sequence[Case], *, block_size: int = 4, causal: bool = True) -> None:
        self.library, self.cases, self.block_size, self.causal = library, cases, block_size, causal
        self._kept: list[Any] = []
        layers = [self._layer(case) for case in cases]
        pointers = (ctypes.POINTER(Layer) * len(layers))(*map(ctypes.pointer, layers))
        self.stack = Stack(hidden=HIDDEN, num_layers=len(layers), layers=pointers, dtype=Kind.F32)
        self.biases = (ScoreBias * len(cases))()
        for index, case in enumerate(cases):
            if case.biased:
                layers[index].self.score_bias = index
                self.biases[index] = ScoreBias(self._at(bias_of(case)), 4 * CONTEXT)
            if case.slopes:
                layers[index].self.score_bias = index
                self.biases[index] = ScoreBias(slopes=self._at(slopes_of(case)))
        blocks = 3 * CONTEXT // block_size
        self.pools = [torch.full((2, blocks * block_size, c.kv_heads * c.dim), torch.nan) for c in cases]
        self.order = [torch.randperm(blocks).reshape(3, -1) for _ in range(2)]  # of each pool, three sequences' blocks
        self.pages = (KVPages * len(cases))()
        for index, (case, pool) in enumerate(zip(cases, self.pools, strict=True)):
            stride = case.kv_heads * case.dim
            self.pages[index] = KVPages(Kind.F32, self._at(pool[0]), self._at(pool[1]), None, None, stride, stride)

    def step(self, x: Tensor, lengths: Sequence[tuple[int, int]], *, paged: bool, cross: Sequence[int] = ()) -> Tensor:
        """Take `x` through all layers; `lengths`: each sequence's rows and keys, `cross`: its source's keys."""
        out, segments = x.clone(), (Segments * 3)()
        positions = torch.cat([torch.arange(keys - rows, keys) for rows, keys in lengths])
        for pool in range(2):
            segments[pool] = self._segments(lengths, pool, paged=paged)
        segments[2] = self._segments(
            [(rows, keys) for (rows, _), keys in zip(lengths, cross, strict=False)], 0, source=True
        )
        tables = [tuple(part.float().contiguous() for part in angles(base, positions)) for base in range(len(BASES))]
        rotary = (RotaryTable * len(BASES))(
            *(
                RotaryTable(self._at(c), self._at(s), c.shape[1], base[2], self._growth(number, positions))
                for number, (base, (c, s)) in enumerate(zip(BASES, tables, strict=True))
            )
        )
        step = Step(rows=len(x), last_layer=len(self.cases), num_segments=3 if paged else 1, segments=segments)
        step.rotary, step.score_biases = rotary, self.biases
        if paged:
            step.pages = self.pages
        self.library.run_stack(self.stack, step, out)
        return out

    def write_source(self, layer: int, source: Tensor, sequence: int) -> None:
        """Write a source's keys and values into the blocks of cross attention: the sequence's last in pool 0."""
        case = self.cases[layer].cross
        assert case is not None
        slots = self._slots(self.order[0][sequence].flip(0), range(len(source)))
        for side, name in enumerate("kv"):
            self.pools[layer][side][slots] = source @ case.weight(name, case.kv_heads * case.dim, HIDDEN).T

    def _slots(self, blocks: Tensor, positions: range) -> Tensor:
        at = torch.tensor(positions, dtype=torch.int64)
        return blocks[at // self.block_size] * self.block_size + at % self.block_size

    def _segments(
        self, lengths: Sequence[tuple[int, int]], pool: int, *, paged: bool = True, source: bool = False
    ) -> Segments:
        starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0)
        found = Segments(len(lengths), self.causal and not source, q_starts=self._at(starts), k_starts=self._at(starts))
        found.kv_lens = self._at(torch.tensor([keys for _, keys in lengths]))
        if not paged:
            return found
        tables = self.order[pool][: len(lengths)].clone()
        if source:
            tables = tables.flip(1)
        elif pool == 1:  # its layers have windows: blocks before those are freed
            for number, (rows, keys) in enumerate(lengths):
                window = max(case.window for case in self.cases)
                tables[number, : max(0, keys - rows - window + 1) // self.block_size] = NOWHERE
        found.block_size, found.table_width, found.tables = self.block_size, tables.shape[1], self._at(tables)
        if not source:
            slots = [self._slots(self.order[pool][n], range(k - r, k)) for n, (r, k) in enumerate(lengths)]
            found.slots = self._at(torch.cat(slots))
        return found

    def _at(self, tensor: Tensor) -> int:
        self._kept.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _growth(self, base: int, positions: Tensor) -> int | None:
        return self._at(growth(base, positions).float()) if BASES[base][2] else None

    def _norm(self, case: Case, name: str, size: int) -> Norm:
        shift = self._at(case.weight(name.replace("_norm", "_shift"), size)) if case.layer_norms else None
        return Norm(2 - case.layer_norms, 1e-5, self._at(case.weight(name, size)), shift)

    def _norms(self, case: Case, part: str) -> SublayerNorms:
        return SublayerNorms(**{slot: self._norm(case, f"{part}_{slot}_norm", HIDDEN) for slot in case.norms})

    def _matrix(self, *parts: Tensor) -> Any:
        packed = packed_linear(self.library, torch.cat(parts), None)
        self._kept.append(packed)
        return packed.matrix

    def _attention(self, case: Case, names: str, segments: int) -> AttentionLayer:
        shape = AttentionShape(case.heads, case.kv_heads, case.dim, case.window, case.scale, case.softcap)
        if case.sinks:
            shape.sinks = self._at(case.weight("sinks", case.heads))
        layer = AttentionLayer(
            self._norms(case, "attn"), shape, segments=segments, rotary=case.rotary, score_bias=-1, relative=-1
        )
        sizes = {"q": case.heads, "g": case.heads, "k": case.kv_heads, "v": case.kv_heads}
        layer.output_gate = "g" in names
        layer.input = self._matrix(*(case.weight(name, sizes[name] * case.dim, HIDDEN) for name in names))
        layer.output = self._matrix(case.weight("out", HIDDEN, case.heads * case.dim))
        layer.scale, layer.norm_span = case.adds, case.norm_span
        for name in "qk" if case.qk_norm else "":
            gains = (case.dim,) if case.norm_span == 0 else (sizes[name], case.dim)
            if name in names:
                setattr(layer, f"{name}_norm", Norm(2, 1e-5, self._at(case.weight(f"{name}_norm", *gains))))
        return layer

    def _layer(self, case: Case) -> Layer:
        layer = Layer(mlp=MLPLayer(self._norms(case, "mlp"), gated=case.gated, activation=case.activation))
        layer.mlp.scale = case.adds
        layer.self = self._attention(case, "qgkv" if case.gated_output else "qkv", case.segments if self.causal else 0)
        layer.mlp.up = self._matrix(case.weight("up", case.inner * (1 + case.gated), HIDDEN))
        layer.mlp.down = self._matrix(case.weight("down", HIDDEN, case.inner))
        layer.parallel, layer.has_cross = case.parallel, case.cross is not None
        if case.cross is not None:
            layer.cross = self._attention(case.cross, "q", 2)
        return layer


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "cases",
    [OF_DECODERS, *((case,) for case in OF_DECODERS)],
    ids=["mixed", "windowed", "full", "plain", "biased", "parallel", "sloped", "neighbours"],
)
def test_a_decoders_layers_differ_and_blocks_behind_a_window_are_gone(
    library: Library, cases: tuple[Case, ...], count: int, block_size: int
) -> None:
    torch.set_num_threads(count)
    inputs = [torch.randn(length, HIDDEN) for length in (90, 41, 3)]
    ours, reference = InC(library, cases, block_size=block_size), Reference(cases, causal=True)
    done, parts = [0, 0, 0], [[], [], []]  # type: tuple[list[int], list[list[Tensor]]]
    for rows in ((70, 1, 1), (1, 37, 1), (5, 1, 1), (1, 1, 0), (13, 1, 0)):  # prefill, chunks and decode in one batch
        active = [sequence for sequence in range(3) if rows[sequence]]
        x = torch.cat([inputs[s][done[s] : done[s] + rows[s]] for s in active])
        done = [before + more for before, more in zip(done, rows, strict=True)]
        found = ours.step(x, [(rows[s], done[s]) for s in active], paged=True)
        for s, part in zip(active, found.split([rows[s] for s in active]), strict=True):
            parts[s].append(part)
    for x, found in zip(inputs, parts, strict=True):
        close(torch.cat(found), reference(x))
    alone = InC(library, cases, block_size=block_size).step(inputs[0], [(90, 90)], paged=True)
    assert torch.equal(alone, torch.cat(parts[0]))  # bit for bit, however it was cut


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("lengths", [(90, 1, 33), tuple(3 + 5 * i % 40 for i in range(60))], ids=["few", "many"])
@pytest.mark.parametrize(
    "cases", [MIXED, (FULL, PLAIN, PARALLEL), (WINDOWED,), (BIASED,)], ids=["mixed", "whole", "windowed", "biased"]
)
def test_an_encoders_layers_differ(
    library: Library, cases: tuple[Case, ...], lengths: tuple[int, ...], count: int
) -> None:
    torch.set_num_threads(count)
    x = torch.randn(sum(lengths), HIDDEN)
    found = InC(library, cases, causal=False).step(x, [(length, length) for length in lengths], paged=False)
    reference = Reference(cases, causal=False)
    close(found, torch.cat([reference(part) for part in x.split(lengths)]))


@pytest.mark.parametrize("count", [1, 2])
def test_cross_attention_has_a_shape_of_its_own(library: Library, count: int) -> None:
    torch.set_num_threads(count)
    cross = Case(heads=2, kv_heads=2, dim=8, softcap=1.0, scale=0.5, qk_norm=True, norms=("pre", "output"))
    cases = (Case(heads=4, kv_heads=2, dim=8, rotary=0, cross=cross), Case(dim=8, norms=("post",), cross=cross))
    inputs, sources = [torch.randn(n, HIDDEN) for n in (20, 1)], [torch.randn(n, HIDDEN) for n in (30, 7)]
    ours, reference = InC(library, cases), Reference(cases, causal=True)
    for layer in range(2):
        for sequence, source in enumerate(sources):
            ours.write_source(layer, source, sequence)
    found = ours.step(torch.cat(inputs), [(20, 20), (1, 1)], paged=True, cross=(30, 7)).split((20, 1))
    for x, source, part in zip(inputs, sources, found, strict=True):
        close(part, reference(x, source))


def test_control_each_field_of_a_layer_changes_the_result() -> None:
    found = native()
    assert isinstance(found, Library)
    base = Case(window=9, rotary=0, softcap=2.0, norms=SLOTS, qk_norm=True)
    x = torch.randn(40, HIDDEN)
    usual = InC(found, (base,)).step(x, [(40, 40)], paged=True)
    others = (
        dict(window=10),
        dict(rotary=1),
        dict(rotary=-1),
        dict(softcap=2.1),
        dict(scale=0.31),
        dict(qk_norm=False),
    )
    for change in (*others, *(dict(norms=tuple(s for s in SLOTS if s != slot)) for slot in SLOTS), dict(activation=4)):
        changed = Case(**(vars(base) | change))
        assert not torch.allclose(InC(found, (changed,)).step(x, [(40, 40)], paged=True), usual, atol=1e-3), change


@pytest.mark.parametrize("kind", [None, Kind.BF16, Kind.INT8])
def test_a_product_can_end_in_a_softcap(library: Library, kind: Kind | None) -> None:
    packed, x = packed_linear(library, torch.randn(70, HIDDEN), torch.randn(70), kind), torch.randn(9, HIDDEN)
    out = torch.empty(9, 70)
    library.run_linear(packed.matrix, x, out, 5.0)
    assert out.abs().max() < 5.0
    torch.testing.assert_close(out, 5.0 * torch.tanh(packed(x) / 5.0), atol=2e-6, rtol=1e-5)
