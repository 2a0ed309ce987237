"""Encoders in C: attention by products of packed panels, and groups of segments that one thread computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.matrix import rest_is_slow
from tests.model.checkpoints import CPU, copy_weights, native_backends
from tests.model.tiled import REFUSED, emulated, needs_vectors
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.config.attention import (
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    NormConfig,
    NormKind,
    RotaryConfig,
)
from triptych.model.config.formats import NumberFormat, NumberKind
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig
from triptych.model.config.stack import StackConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.native import library
from triptych.model.native.library import Kind, Library
from triptych.model.network.inputs import packed_input
from triptych.model.network.native_stack import NativeStack
from triptych.model.network.native_structures import relative_bytes
from triptych.model.network.stack import Stack

pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
HIDDEN = 48
FEW = (1, 17, 300, 16, 33)  # one row, a key beyond a panel, more rows than a task
MANY = tuple(5 + 7 * i % 60 for i in range(60))  # enough that two threads take groups
WINDOWED = (600, 1, 43, 257)  # a task between two others, and a last one of a single row
POSITIONS = {
    "none": None,
    "buckets": BucketBiasConfig(),
    "rotary": RotaryConfig(dim=8),
    "disentangled": DisentangledConfig(span=40, max_distance=100),
    "shared": DisentangledConfig(span=40, max_distance=100, shared=True),
    "c2p": DisentangledConfig(span=128, position_to_content=False),
    "p2c": DisentangledConfig(span=512, content_to_position=False),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


def stack_of(
    dim: int,
    heads: int = 4,
    kv_heads: int = 4,
    position: str = "none",
    *,
    qk_norm: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Stack:
    """Return two layers whose attention is neither uniform nor concentrated on one key."""
    torch.manual_seed(0)
    norm = NormConfig(NormKind.LAYER, 1e-6)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        position=POSITIONS[position],
        window=window,
        softcap=softcap,
        qk_norm=norm if qk_norm else None,
    )
    layer = LayerConfig(attention, MLPConfig(70, Activation.GELU), (Norms(pre=norm),) * 2)
    config = StackConfig((layer, layer), HIDDEN, causal=False, final_norm=norm)
    stack = Stack(config, EmbeddingConfig(0, HIDDEN), LinearFactory())
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(std=2 * HIDDEN**-0.5 if parameter.dim() > 1 else 1.0)
    return stack


def native_of(stack: Stack, kind: Kind | None = None, library: Library | None = None) -> Stack:
    dtype = next(stack.parameters()).dtype
    number = NumberKind(str(dtype).removeprefix("torch.")) if kind is None else NumberKind.INT8
    library = library or native_backends()[0].library
    linear = LinearFactory(dtype, native=(("*", NumberFormat(number, number)),), library=library)
    packed = Stack(stack.config, EmbeddingConfig(0, HIDDEN), linear)
    copy_weights(stack, packed)
    packed.runner = NativeStack(packed, library)
    return packed


def rows_of(lengths: Sequence[int], seed: int = 1) -> Tensor:
    return torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(stack: Stack, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return `[T, d]` after the final norm; it runs on a copy, because the stack overwrites its input."""
    return stack(
        rows.clone(), packed_input([[0] * length for length in lengths], CPU, causal=False), ReferenceBackend()
    )


HEADS = [
    *((dim, 4, 4, "none") for dim in (5, 8, 20, 32, 64, 80)),
    *((16, 4, 2, position) for position in ("none", "buckets", "rotary")),
    (8, 5, 1, "buckets"),
    *((dim, 4, 4, "disentangled") for dim in (5, 16, 64)),
    *((16, 4, 4, position) for position in ("shared", "c2p", "p2c")),
]
WHOLE = rest_is_slow(
    product(HEADS, [FEW, MANY]),
    lambda heads, lengths: lengths == FEW or heads in ((20, 4, 4, "none"), (8, 5, 1, "buckets")) or "shared" in heads,
)


@pytest.mark.parametrize(("heads", "lengths"), WHOLE)
def test_whole_segments_equal_the_reference(heads: tuple[int, int, int, str], lengths: tuple[int, ...]) -> None:
    assert_equals_the_reference(stack_of(*heads), lengths)


@pytest.mark.parametrize(
    ("dim", "window", "more"),
    [
        (16, 1, {}),  # each token alone
        *((16, window, {"position": "buckets"}) for window in (2, 17, 40, 129, 290)),  # beyond a panel, a tile, a task
        (5, 40, {"position": "buckets", "softcap": 0.5}),
        (64, 40, {"position": "rotary", "kv_heads": 2}),
        (20, 65, {}),
        (16, 1000, {}),  # wider than any segment
    ],
)
def test_windows_equal_the_reference(dim: int, window: int, more: dict[str, Any]) -> None:
    assert_equals_the_reference(stack_of(dim, window=window, **more), WINDOWED)


def test_a_segment_without_rows_changes_nothing() -> None:
    stack, rows = native_of(stack_of(16)), rows_of((5, 9))
    assert torch.equal(run(stack, rows, (5, 0, 9)), run(stack, rows, (5, 9)))


def assert_equals_the_reference(stack: Stack, lengths: Sequence[int]) -> None:
    rows = rows_of(lengths)
    exact = run(deepcopy(stack).double(), rows.double(), lengths)
    torch.testing.assert_close(run(native_of(stack), rows, lengths), exact.float(), atol=1e-4, rtol=1e-4)
    narrow = stack.bfloat16()
    error = run(native_of(narrow), rows.bfloat16(), lengths) - exact
    by_torch = run(narrow, rows.bfloat16(), lengths) - exact
    assert 0 < error.std() < by_torch.std()  # rows stay float32 between products


@pytest.mark.parametrize("dim", [2, 4])
def test_narrow_rows_are_rounded_in_place_without_touching_the_next(dim: int) -> None:
    stack = stack_of(dim, heads=1, kv_heads=1, qk_norm=True)
    rows = rows_of(FEW)
    exact = run(deepcopy(stack).double(), rows.double(), FEW)
    narrow = stack.bfloat16()
    error = run(native_of(narrow), rows.bfloat16(), FEW) - exact
    by_torch = run(narrow, rows.bfloat16(), FEW) - exact
    assert 0 < error.std() < by_torch.std()


@needs_vectors
@pytest.mark.parametrize(
    ("dim", "position", "window", "lengths"),  # heads that do not fill tiles are scored without tiles
    rest_is_slow(
        [
            *((dim, "none", None, FEW) for dim in (20, 32, 64)),
            (32, "disentangled", None, FEW),
            (20, "shared", None, FEW),
            (64, "none", 40, FEW),
            (32, "none", None, MANY),
            (20, "shared", None, MANY),
        ],
        lambda dim, position, window, lengths: (position != "none" and (dim == 32 or lengths == MANY)) or bool(window),
    ),
)
def test_segments_in_tiles(dim: int, position: str, window: int | None, lengths: tuple[int, ...]) -> None:
    stack, rows = stack_of(dim, position=position, window=window), rows_of(lengths)
    exact, narrow = run(deepcopy(stack).double(), rows.double(), lengths), stack.bfloat16()
    tiles = run(native_of(narrow, library=emulated()), rows.bfloat16(), lengths)
    vectors = run(native_of(narrow, library=emulated(*REFUSED)), rows.bfloat16(), lengths)
    assert not torch.equal(tiles, vectors)
    assert (tiles - exact).std() < 1.1 * (vectors - exact).std()


@pytest.mark.parametrize("kind", [None, Kind.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("position", "window"),
    [*((position, None) for position in ("none", "buckets", "rotary", "disentangled")), ("rotary", 9)],
)
def test_bits_do_not_depend_on_neighbours_or_threads(
    position: str, window: int | None, dtype: torch.dtype, kind: Kind | None
) -> None:
    stack = native_of(stack_of(16, position=position, window=window).to(dtype), kind)
    rows = rows_of(MANY).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([run(stack, segment, [len(segment)]) for segment in rows.split(MANY)])
    for threads in (1, 2, 3, 16):  # 16 are too many for groups: they share each layer
        torch.set_num_threads(threads)
        assert torch.equal(run(stack, rows, MANY), alone)


@pytest.mark.parametrize(
    ("rows", "threads"),
    # For each row, a layer's products take 4 x 64 x 48 + 2 x 48 x 70 multiply-adds, and each key 2 x 48.
    [(1, 1), (44, 1), (48, 2)],
)
def test_little_work_is_one_threads(rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, found = native_of(stack_of(16)), []
    usual = library._num_threads
    monkeypatch.setattr(library, "LARGE", 1 << 20)
    monkeypatch.setattr(library, "_num_threads", lambda *given: found.append(usual(*given)) or found[-1])
    torch.set_num_threads(2)
    run(stack, rows_of([rows]), [rows])
    assert [number.value for number in found] == [threads]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_changed_row_changes_its_own_segment_alone(threads: int) -> None:
    stack, rows = native_of(stack_of(16)), rows_of(MANY)
    torch.set_num_threads(threads)
    before = run(stack, rows, MANY).split(MANY)
    first = sum(MANY[:20])
    rows[first + 3] += 1.0
    after = run(stack, rows, MANY).split(MANY)
    changed = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if not torch.equal(old, new)]
    assert changed == [20]
    assert (before[20] != after[20]).any(dim=1).all()  # every query sees every key


@pytest.mark.parametrize("window", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_row_reaches_as_far_as_the_windows(window: int, dtype: torch.dtype) -> None:
    stack, rows = native_of(stack_of(16, window=window).to(dtype)), rows_of(WINDOWED)
    before = run(stack, rows.to(dtype), WINDOWED)
    rows[300] += 1.0
    changed = (run(stack, rows.to(dtype), WINDOWED) != before).any(dim=1).nonzero().flatten().tolist()
    reach = 2 * (window - 1)  # two layers
    assert changed == list(range(300 - reach, 300 + reach + 1))


def test_a_key_without_numbers_shows_in_every_query_of_its_segment() -> None:
    stack, rows = native_of(stack_of(16)), rows_of(MANY)
    rows[sum(MANY[:7])] = float("nan")
    spoilt = [bool(part.isnan().all()) for part in run(stack, rows, MANY).split(MANY)]
    assert spoilt == [number == 7 for number in range(len(MANY))]


def test_relative_positions_are_made_again_for_longer_segments_and_give_the_same_bits() -> None:
    stack, rows = native_of(stack_of(16, position="disentangled")), rows_of((40, 300))
    runner = stack.runner
    assert isinstance(runner, NativeStack)
    short, long = rows.split((40, 300))
    first = run(stack, short, [40])
    before = sum(packed.nbytes for packed in runner._relative._packed)
    assert before == relative_bytes(stack.config, torch.float32, 40)
    run(stack, long, [300])
    assert sum(packed.nbytes for packed in runner._relative._packed) == relative_bytes(stack.config, torch.float32, 300)
    assert relative_bytes(stack.config, torch.float32, 300) == 8 * before  # for 512 keys, before for 64
    assert torch.equal(run(stack, short, [40]), first)
