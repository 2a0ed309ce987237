"""The C library's results: products equal torch's, NaN stays in its row, 8-bit weights and keys are close."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from tests.model.checkpoints import CPU, copy_weights, native_backends, saved
from tests.model.parity import hidden_states
from tests.model.test_attention import BLOCK, DIM, HEADS, SHAPES, pool_with_past, stack_of
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.native import write_rows
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.cache.kv_cache import KVCache, LayerCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.layer import Activation
from triptych.model.linear.base import LinearSpec, Part
from triptych.model.linear.native import NativeLinear, packed_linear
from triptych.model.native.library import Kind, Library
from triptych.model.network.build import build_model
from triptych.model.network.native_stack import attach_native_stacks, native_linears
from triptych.model.network.weights import load_model

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
SHAPES_OF_MATRICES = [(16, 16), (100, 37), (48, 64), (7, 5), (33, 4864)]


def library() -> Library:
    return native_backends()[0].library


@needs_native
@pytest.mark.parametrize(("n", "k"), SHAPES_OF_MATRICES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kind", "of_largest"),
    [(torch.float32, None, 3e-6), (torch.bfloat16, None, 2e-2), (torch.float32, Kind.INT8, 3e-2)],
)
def test_products_equal_torchs(
    n: int, k: int, biased: bool, dtype: torch.dtype, kind: Kind | None, of_largest: float
) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(k, n, bias=biased).requires_grad_(False)
    packed = packed_linear(library(), exact.weight.to(dtype), exact.bias, kind)
    x = torch.randn(19, k)
    expected = exact(x)
    assert (packed(x) - expected).abs().max() < of_largest * expected.abs().max()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [8, 40])
def test_rows_are_written_into_pages_as_by_torch(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    heads, rows = 3, torch.randn(21, 2 * 3 * dim)
    rows[5, :dim] = 0.0
    config, slots = AttentionConfig(num_heads=6, num_kv_heads=heads, head_dim=dim, scale=1.0), torch.randperm(32)[:21]
    written = []
    for by_torch in (True, False):
        keys, values = (torch.zeros(8, 4, heads, dim, dtype=dtype) for _ in range(2))
        scales = (torch.zeros(8, 4, heads), torch.zeros(8, 4, heads)) if dtype is torch.int8 else None
        cache = LayerCache(keys, values, scales)
        if by_torch:
            cache.write(slots, *rows.view(21, 2, heads, dim).unbind(1))
        else:
            write_rows(library(), cache, slots, rows, config)
        written.append([keys, values, *(scales or ())])
    for ours, theirs in zip(*written, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def packed_by_torch(weight: torch.Tensor, kind: Kind) -> dict[str, torch.Tensor]:
    """Pack as matrix.h describes, step by step over the whole matrix."""
    n, k = weight.shape
    found = {}
    if kind is Kind.INT8:
        scale = weight.float().abs().amax(dim=1) / 127
        weight = (weight.float() / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
        found = {"scale": pad(scale, (0, -n % 16)), "row_sums": pad(weight.sum(dim=1, dtype=torch.int32), (0, -n % 16))}
    depth, step = {Kind.F32: (1, 1), Kind.BF16: (32, 2), Kind.INT8: (64, 4)}[kind]
    padded = pad(weight if kind is Kind.INT8 else weight.to(DTYPES[kind]), (0, -k % depth, 0, -n % 16))
    panels = padded.unflatten(0, (-1, 16)).unflatten(2, (-1, step)).transpose(1, 2)  # [panels, k / step, 16, step]
    return found | {"data": panels.contiguous().view(torch.uint8).flatten()}


DTYPES = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16}


@needs_native
@pytest.mark.parametrize(
    ("kind", "group"), [(Kind.F32, 0), (Kind.BF16, 0), (Kind.INT8, 0), (Kind.INT8, 128), (Kind.INT4, 64)]
)
def test_many_threads_divide_rows_too_and_give_the_same_bits(kind: Kind, group: int) -> None:
    """Check seven panels, which 12, 16 and 64 threads cannot divide alone."""
    torch.manual_seed(0)
    packed = packed_linear(library(), torch.randn(100, 150), torch.randn(100), kind, group)
    x, before = torch.randn(603, 150), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 12, 16, 64):
            torch.set_num_threads(threads)
            found.append(packed(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.INT8])
@pytest.mark.parametrize(("n", "k"), [*SHAPES_OF_MATRICES, (1, 1), (65, 130), (130, 256)])
def test_rows_are_packed_bit_for_bit_whatever_their_order_and_number(
    n: int, k: int, kind: Kind, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(n, k) * torch.randn(n, 1).exp()).to(dtype), torch.randn(n).to(dtype)
    weight[0], weight[-1, k // 2] = 0, 1e-38  # a row of zeros, and a tiny value
    expected = packed_by_torch(weight, kind) | {"bias": pad(bias.float(), (0, -n % 16))}
    cuts = [0, *sorted({n // 3, n // 2 + 1, n - 1} - {0}), n]
    pieces = NativeLinear(LinearSpec("matrix", k, (Part(n),)), kind, dtype, library())
    for first, last in reversed(list(pairwise(cuts))):
        pieces.fill("matrix.weight", (slice(first, last),), weight.T.contiguous().T[first:last])
        pieces.fill("matrix.bias", (slice(first, last),), bias[first:last])
    for packed in (pieces, packed_linear(library(), weight, bias, kind)):
        assert packed.arrays.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(packed.arrays[name].view(tensor.dtype), tensor), name
        assert packed.nbytes == sum(tensor.nbytes for tensor in expected.values())


@needs_native
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.INT8])
@pytest.mark.parametrize(("n", "k"), SHAPES_OF_MATRICES)
def test_a_row_does_not_depend_on_its_neighbours(n: int, k: int, kind: Kind) -> None:
    torch.manual_seed(0)
    packed, x = packed_linear(library(), torch.randn(n, k), None, kind), torch.randn(33, k)
    together = packed(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
        assert torch.equal(packed(x[:rows]), together[:rows])
        assert torch.equal(packed(x[-rows:]), together[-rows:])


@needs_native
def test_control_a_changed_weight_changes_its_output_alone() -> None:
    weight, x = torch.randn(20, 30), torch.randn(2, 30)
    before = packed_linear(library(), weight, None)(x)
    weight[17, 29] += 1.0
    after = packed_linear(library(), weight, None)(x)
    changed = (before != after).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [17]


@needs_native
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.INT8])
@pytest.mark.parametrize("at", [0, 15, 31, 36])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_row_alone(kind: Kind, at: int, bad: float) -> None:
    torch.manual_seed(0)
    packed, x = packed_linear(library(), torch.randn(20, 37), None, kind), torch.randn(9, 37)
    clean = packed(x)
    x[4, at] = bad
    spoilt = packed(x)
    assert not spoilt[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(spoilt[others], clean[others])


@needs_native
@pytest.mark.parametrize("segment", [(1, 20), (6, 20)])
def test_a_key_without_numbers_shows_in_every_query_that_sees_it(segment: tuple[int, int]) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(HEADS, 2, DIM, 1.0)
    layer, tables, slots = pool_with_past(config, [segment])
    layer.keys.flatten(0, 1)[tables[0, 3 // BLOCK] * BLOCK + 3 % BLOCK] = float("nan")  # of token 3
    metadata = AttentionMetadata((segment[0],), (segment[1],), causal=True, block_tables=tables, slot_mapping=slots)
    query, key, value = (torch.randn(segment[0], heads, DIM) for heads in (HEADS, 2, 2))
    assert native_backends()[0].forward(query, key, value, layer, metadata, config).isnan().all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("at", [32, 37, 46])  # first, within and last of a group of keys
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_token_without_numbers_does_not_reach_queries_that_do_not_see_it(
    bad: float, at: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config, rows = AttentionConfig(HEADS, 2, DIM, DIM**-0.5, window=window), 64
    query, key, value = (torch.randn(rows, heads, DIM) for heads in (HEADS, 2, 2))

    def attend(value: torch.Tensor, first: int) -> torch.Tensor:
        """Compute queries from `first` on, as one chunk after all earlier tokens."""
        exact, tables, slots = pool_with_past(config, [(rows, rows)])
        layer = narrowed(exact, config, dtype)
        layer.write(slots, key, value)
        metadata = AttentionMetadata((rows - first,), (rows,), True, block_tables=tables, slot_mapping=slots[first:])
        chunk = (tensor[first:] for tensor in (query, key, value))
        return native_backends()[0].forward(*chunk, layer, metadata, config)

    spoilt_value = value.clone()
    spoilt_value[at] = bad
    seen = torch.arange(rows) >= at
    seen &= torch.arange(rows) < at + (window or rows)
    for first in (0, 41, 62, rows - 1):
        clean, spoilt = attend(value, first), attend(spoilt_value, first)
        assert torch.equal(spoilt[~seen[first:]], clean[~seen[first:]])
        assert not spoilt[seen[first:]].isfinite().any()


@needs_native
def test_a_query_without_keys_gives_zeros() -> None:
    config = AttentionConfig(HEADS, 2, DIM, 1.0)
    metadata = AttentionMetadata((1,), (0,), causal=True, block_tables=torch.zeros(1, 1, dtype=torch.int64))
    [layer] = KVCache(stack_of(config), [2], BLOCK, torch.float32, CPU).layers
    out = native_backends()[0].forward(torch.randn(1, HEADS, DIM), *torch.randn(2, 1, 2, DIM), layer, metadata, config)
    assert torch.equal(out, torch.zeros(1, HEADS, DIM))


@needs_native
@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2"])  # with a gate and without
@pytest.mark.parametrize("activation", Activation)
def test_no_activation_hides_what_is_no_number(kind: str, activation: Activation) -> None:
    checkpoint = read_checkpoint(saved(kind).path)
    stack = checkpoint.config.decoder
    assert stack is not None
    stack = stack.with_layers(
        lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, activation=activation))
    )
    changed = replace(checkpoint, config=replace(checkpoint.config, decoder=stack))
    exact = load_model(changed, SdpaBackend())
    with torch.no_grad():
        exact.get_parameter("decoder.layers.0.mlp.up.weight")[0] = float("nan")
    model = build_model(changed.config, SdpaBackend(), native_linears(changed.config, torch.float32, library()))
    copy_weights(exact, model)
    attach_native_stacks(model)
    assert hidden_states(model)[0][0].isnan().all()


@needs_native
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.int8, 4e-2)])
def test_narrow_caches_are_close_to_float32(shapes: str, kv_heads: int, dtype: torch.dtype, close: float) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(HEADS, kv_heads, DIM, DIM**-0.5)
    segments = SHAPES[shapes]
    q_lens, kv_lens = zip(*segments, strict=True)
    rows = sum(q_lens)
    exact, tables, slots = pool_with_past(config, segments)
    narrow = narrowed(exact, config, dtype)
    metadata = AttentionMetadata(q_lens, kv_lens, causal=True, block_tables=tables, slot_mapping=slots)
    query, key, value = (torch.randn(rows, heads, DIM) for heads in (HEADS, kv_heads, kv_heads))
    ours = native_backends()[0].forward(query, key, value, narrow, metadata, config)
    by_torch = ReferenceBackend().forward(query, key, value, narrow, metadata, config)
    theirs = ReferenceBackend().forward(query, key, value, exact, metadata, config)
    assert (ours - theirs).abs().max() < close * 3  # values are normal: about 3 at most
    torch.testing.assert_close(ours, by_torch, atol=close, rtol=0)


@needs_native
@pytest.mark.parametrize("dim", [8, 32, 40, 64, 80, 128])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (False, None), (False, 20)])
def test_every_width_of_a_head_and_more_rows_than_a_task(
    dim: int, paged: bool, causal: bool, window: int | None
) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(4, 2, dim, dim**-0.5, window=window)
    segments = [(1, 70), (90, 100), (3, 40)] if paged else [(1, 1), (130, 130), (40, 40)]
    q_lens, kv_lens = zip(*segments, strict=True)
    query, key, value = (torch.randn(sum(q_lens), heads, dim) for heads in (4, 2, 2))
    metadata = AttentionMetadata(q_lens, kv_lens, causal=causal)
    layer = None
    if paged:
        layer, tables, slots = pool_with_past(config, segments)
        metadata = AttentionMetadata(q_lens, kv_lens, causal=causal, block_tables=tables, slot_mapping=slots)
    ours = native_backends()[0].forward(query, key, value, layer, metadata, config)
    theirs = ReferenceBackend().forward(query, key, value, layer, metadata, config)
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


def narrowed(layer: LayerCache, config: AttentionConfig, dtype: torch.dtype) -> LayerCache:
    """Return the same pages in another format, written by torch."""
    blocks = layer.keys.shape[0]
    [copy] = KVCache(stack_of(config), [blocks], BLOCK, dtype, CPU).layers
    copy.write(torch.arange(blocks * BLOCK), layer.keys.flatten(0, 1), layer.values.flatten(0, 1))
    return copy


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_c_and_torch_write_the_same_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(HEADS, 2, DIM, 1.0)
    [backend] = native_backends()
    key, value, slots = torch.randn(3, 2, DIM), torch.randn(3, 2, DIM), torch.tensor([5, 6, 7])
    [ours], [theirs] = (KVCache(stack_of(config), [4], BLOCK, dtype, CPU).layers for _ in range(2))
    metadata = AttentionMetadata((3,), (4,), causal=True, block_tables=torch.tensor([[1]]), slot_mapping=slots)
    backend.forward(torch.randn(3, HEADS, DIM), key, value, ours, metadata, config)
    theirs.write(slots, key, value)
    pairs = [
        (ours.keys, theirs.keys),
        (ours.values, theirs.values),
        *zip(ours.scales or (), theirs.scales or (), strict=True),
    ]
    assert all(torch.equal(a, b) for a, b in pairs if a.is_floating_point())
    # The last bit of an 8-bit number may fall either way where a division is written as a product.
    assert all((a.int() - b.int()).abs().max() <= 1 for a, b in pairs)
    assert any(bool(a.any()) for a, _ in pairs)
