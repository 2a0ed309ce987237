"""Every fast attention backend against the reference, over a grid of cases."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.checkpoints import CPU, native_backends
from triptych.model.attention.base import AttentionBackend, AttentionMetadata, ScoreBias, SegmentGroup, visible
from triptych.model.attention.native import NativeBackend
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.cache.kv_cache import KVCache, LayerCache
from triptych.model.config.attention import AttentionConfig, BucketBiasConfig
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.stack import StackConfig
from triptych.model.network.positions import BucketBias
from triptych.model.system import devices

FAST = (SdpaBackend(), *native_backends())
HEADS, DIM, BLOCK = 4, 8, 4

# (queries, keys) of each segment, for the packed path and the paged path.
SHAPES = {
    "full": [(5, 5), (9, 9), (1, 1), (5, 5)],
    "one-shape": [(6, 6), (6, 6)],
    "decode": [(1, 3), (1, 17), (1, 8)],
    "chunk": [(4, 11), (3, 3), (7, 16)],
    "mixed": [(1, 9), (5, 5), (1, 4), (3, 10), (1, 1), (3, 10)],
    "one": [(1, 1)],
}


def bias_of(query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
    """A bias of the distance and the query: `[B, Q, H, D]` to `[B, H, Q, S]`."""
    distance = (group.k_positions[None, None, :] - group.q_positions[:, :, None]).float()  # [B, Q, S]
    by_head = torch.stack([distance * 0.05 * (head + 1) for head in range(HEADS)], dim=1)
    return by_head * query[..., 0].transpose(1, 2)[..., None]


def stack_of(config: AttentionConfig) -> StackConfig:
    layer = LayerConfig(config, MLPConfig(8, Activation.RELU), (Norms(), Norms()))
    return StackConfig((layer,), hidden_size=HEADS * DIM, causal=True)


def pool_with_past(config: AttentionConfig, shapes: list[tuple[int, int]]) -> tuple[LayerCache, Tensor, Tensor]:
    """Return a pool of noise in shuffled pages: `(layer, block tables [B, M], slots of this step's keys [T])`."""
    widths = [-(-kv_len // BLOCK) for _, kv_len in shapes]
    cache = KVCache(stack_of(config), [sum(widths) + 3], BLOCK, torch.float32, CPU)
    (layer,) = cache.layers
    layer.keys.normal_()
    layer.values.normal_()
    ids = iter((torch.randperm(sum(widths)) + 1).tolist())
    tables = torch.zeros(len(shapes), max(widths), dtype=torch.int64)
    slots = []
    for row, ((q_len, kv_len), width) in enumerate(zip(shapes, widths, strict=True)):
        tables[row, :width] = torch.tensor([next(ids) for _ in range(width)])
        slots += [int(tables[row, at // BLOCK]) * BLOCK + at % BLOCK for at in range(kv_len - q_len, kv_len)]
    return layer, tables, torch.tensor(slots)


CASES = [
    (shapes, kv_heads, causal, window, with_bias, paged)
    for shapes, kv_heads, causal, window, with_bias, paged in product(
        SHAPES, (4, 2, 1), (True, False), (None, 4), (False, True), (True, False)
    )
    if (paged or shapes in ("full", "one-shape", "one")) and not (with_bias and kv_heads == 1)
]


@pytest.mark.parametrize("backend", FAST, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("shapes", "kv_heads", "causal", "window", "with_bias", "paged"), CASES)
def test_a_fast_backend_equals_the_reference(
    backend: AttentionBackend,
    shapes: str,
    kv_heads: int,
    causal: bool,
    window: int | None,
    with_bias: bool,
    paged: bool,
) -> None:
    torch.manual_seed(0)
    softcap = 1.5 if kv_heads == 2 else None
    config = AttentionConfig(HEADS, kv_heads, DIM, DIM**-0.5, window=window, softcap=softcap)
    bias: ScoreBias | None = bias_of if with_bias else None
    if with_bias and isinstance(backend, NativeBackend):  # the native backend adds only biases of the distance
        bias = BucketBias(BucketBiasConfig(8, 20), HEADS, bidirectional=not causal).requires_grad_(False)
        bias.weight.normal_()
    segments = SHAPES[shapes]
    rows = sum(q_len for q_len, _ in segments)
    query, key, value = (
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, kv_heads, DIM),
        torch.randn(rows, kv_heads, DIM),
    )
    q_lens, kv_lens = zip(*segments, strict=True)
    layer, tables, slots = pool_with_past(config, segments)
    metadata = AttentionMetadata(q_lens, kv_lens, causal=causal)
    if paged:
        metadata = AttentionMetadata(q_lens, kv_lens, causal=causal, block_tables=tables, slot_mapping=slots)
    caches = [LayerCache(layer.keys.clone(), layer.values.clone()) if paged else None for _ in range(2)]
    fast = backend.forward(query, key, value, caches[0], metadata, config, bias)
    slow = ReferenceBackend().forward(query, key, value, caches[1], metadata, config, bias)
    assert fast.shape == query.shape
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-5)
    if caches[0] is not None and caches[1] is not None:
        assert torch.equal(caches[0].keys, caches[1].keys)


@pytest.mark.parametrize("backend", [*FAST, ReferenceBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("memory_in_pool", [True, False])
def test_cross_attention_reads_all_of_its_own_source(backend: AttentionBackend, memory_in_pool: bool) -> None:
    torch.manual_seed(1)
    config = AttentionConfig(HEADS, HEADS, DIM, DIM**-0.5)
    lens = [(1, 7), (3, 2), (1, 12), (3, 2)]
    q_lens, kv_lens = zip(*lens, strict=True)
    query, key, value = torch.randn(8, HEADS, DIM), torch.randn(23, HEADS, DIM), torch.randn(23, HEADS, DIM)
    if memory_in_pool:
        layer, tables, _ = pool_with_past(config, lens)
        slots = [int(tables[b, at // BLOCK]) * BLOCK + at % BLOCK for b, n in enumerate(kv_lens) for at in range(n)]
        layer.write(torch.tensor(slots), key, value)
        metadata = AttentionMetadata(q_lens, kv_lens, causal=False, block_tables=tables)
        ours = backend.forward(query, None, None, layer, metadata, config)
    else:
        ours = backend.forward(query, key, value, None, AttentionMetadata(q_lens, kv_lens, causal=False), config)
    segments = zip(query.split(q_lens), key.split(kv_lens), value.split(kv_lens), strict=True)
    expected = [
        torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5).softmax(-1), v)
        for q, k, v in segments
    ]
    torch.testing.assert_close(ours, torch.cat(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", [SdpaBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_int8_pages_serve_narrow_weights(backend: AttentionBackend) -> None:
    torch.manual_seed(2)
    config = AttentionConfig(HEADS, 2, DIM, DIM**-0.5)
    segments = SHAPES["mixed"]
    layer, tables, slots = pool_with_past(config, segments)
    shape = layer.keys.shape
    pages = LayerCache(
        torch.zeros(shape, dtype=torch.int8),
        torch.zeros(shape, dtype=torch.int8),
        (torch.zeros(shape[:3]), torch.zeros(shape[:3])),
    )
    pages.write(torch.arange(shape[0] * BLOCK), layer.keys.flatten(0, 1), layer.values.flatten(0, 1))
    q_lens, kv_lens = zip(*segments, strict=True)
    rows = [torch.randn(sum(q_lens), heads, DIM).bfloat16() for heads in (HEADS, 2, 2)]
    metadata = AttentionMetadata(q_lens, kv_lens, causal=True, block_tables=tables, slot_mapping=slots)
    out = backend.forward(rows[0], rows[1], rows[2], pages, metadata, config)
    assert out.dtype is torch.bfloat16
    exact = ReferenceBackend().forward(rows[0].float(), rows[1].float(), rows[2].float(), layer, metadata, config)
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0)


def test_lengths_go_to_the_device_once_and_a_callers_own_are_taken() -> None:
    metadata = AttentionMetadata((2, 1), (5, 4), causal=True)
    lengths = metadata.on_device()
    assert metadata.on_device() is lengths
    assert lengths.cu_seqlens_q.tolist() == [0, 2, 3]
    assert lengths.cu_seqlens_k is not None
    assert lengths.cu_seqlens_k.tolist() == [0, 5, 9]
    assert lengths.kv_lens.tolist() == [5, 4]
    assert (lengths.max_q_len, lengths.max_kv_len) == (2, 5)
    assert {tensor.dtype for tensor in (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.kv_lens)} == {torch.int32}
    assert AttentionMetadata((), (), causal=True, device_lengths=lengths).on_device() is lengths


def test_control_a_wrong_page_changes_the_output() -> None:
    torch.manual_seed(0)
    config = AttentionConfig(HEADS, 2, DIM, DIM**-0.5)
    layer, tables, slots = pool_with_past(config, SHAPES["decode"])
    inputs = torch.randn(3, HEADS, DIM), torch.randn(3, 2, DIM), torch.randn(3, 2, DIM)
    q_lens, kv_lens = zip(*SHAPES["decode"], strict=True)

    def run(tables: Tensor) -> Tensor:
        metadata = AttentionMetadata(q_lens, kv_lens, causal=True, block_tables=tables, slot_mapping=slots)
        return SdpaBackend().forward(*inputs, layer, metadata, config)

    right = run(tables)
    tables = tables.clone()
    tables[1, 2] = 0
    wrong = run(tables)
    assert torch.equal(wrong[[0, 2]], right[[0, 2]])
    assert (wrong[1] - right[1]).abs().max() > 1e-2


def test_the_pool_gives_back_what_was_written_where_it_was_written() -> None:
    config = AttentionConfig(HEADS, 2, DIM, 1.0)
    cache = KVCache(stack_of(config), [6], BLOCK, torch.float32, CPU)
    layer, length = cache.layers[0], 7
    table = torch.tensor([[5, 2]])
    slots = torch.tensor([int(table[0, at // BLOCK]) * BLOCK + at % BLOCK for at in range(length)])
    keys, values = torch.randn(length, 2, DIM), torch.randn(length, 2, DIM)
    layer.write(slots, keys, values)
    read_keys, read_values = layer.read(table, length)
    assert torch.equal(read_keys[0], keys)
    assert torch.equal(read_values[0], values)
    untouched = [0, 1, 3, 4]
    assert not layer.keys[untouched].any()
    assert not layer.keys[2, length - BLOCK :].any()


@pytest.mark.parametrize(
    ("causal", "window", "ends", "expected"),
    [
        (True, None, None, ["1110", "1111"]),  # two queries, the last two of four keys
        (True, 2, None, ["0110", "0011"]),  # itself and one before
        (True, 1, None, ["0010", "0001"]),
        (False, None, None, ["1111", "1111"]),
        (True, None, [4, 4], ["1111", "1111"]),  # both of one picture
        (True, 2, [4, 4], ["0111", "0011"]),
    ],
)
def test_which_keys_a_query_sees(causal: bool, window: int | None, ends: list[int] | None, expected: list[str]) -> None:
    metadata = AttentionMetadata((2,), (4,), causal, key_ends=None if ends is None else torch.tensor(ends))
    (group,) = metadata.groups
    seen = visible(group, causal=causal, window=window)
    assert ["".join(str(int(key)) for key in row) for row in seen[0]] == expected


@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("backend", FAST, ids=lambda backend: backend.name)
def test_pictures_are_seen_both_ways(backend: AttentionBackend, window: int | None) -> None:
    """Check pictures at the begin, in the middle and at the end of chunks, longer than what is computed together."""
    config = AttentionConfig(HEADS, 2, DIM, DIM**-0.5, window=window)
    shapes = [(50, 61), (1, 9), (7, 7), (5, 20)]
    pictures = [(11, 30), (40, 58)], [], [(2, 7)], [(15, 16)]
    ends = [
        max((stop for start, stop in spans if start <= at < stop), default=at + 1)
        for (q_len, kv_len), spans in zip(shapes, pictures, strict=True)
        for at in range(kv_len - q_len, kv_len)
    ]
    torch.manual_seed(0)
    layer, tables, slots = pool_with_past(config, shapes)
    q, k, v = torch.randn(sum(q for q, _ in shapes), HEADS, DIM), *torch.randn(2, len(ends), 2, DIM)
    lens = tuple(q for q, _ in shapes), tuple(kv for _, kv in shapes)
    given = (q, k, v, layer, AttentionMetadata(*lens, True, CPU, tables, slots, key_ends=torch.tensor(ends)), config)
    expected = ReferenceBackend().forward(*given)
    torch.testing.assert_close(backend.forward(*given), expected, rtol=0, atol=1e-5)
    plain = AttentionMetadata(*lens, True, CPU, tables, slots)
    assert (ReferenceBackend().forward(q, k, v, layer, plain, config) - expected).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 70])
def test_pictures_are_seen_both_ways_in_tiles(window: int | None) -> None:
    """Check contexts that the C kernels compute in bfloat16, in blocks of keys that a picture goes across."""
    config, length, size = AttentionConfig(HEADS, 2, 64, 0.125, window=window), 400, 150
    stack = StackConfig((LayerConfig(config, MLPConfig(8, Activation.RELU), (Norms(), Norms())),), HEADS * 64, True)
    (layer,) = KVCache(stack, [length // BLOCK], BLOCK, torch.bfloat16, CPU).layers
    torch.manual_seed(0)
    layer.keys.normal_()
    layer.values.normal_()
    table, places = torch.arange(length // BLOCK)[None], range(length - size, length)
    ends = torch.tensor([340 if 250 <= at < 340 else at + 1 for at in places])
    q, k, v = (torch.randn(size, heads, 64).bfloat16() for heads in (HEADS, 2, 2))
    seen = AttentionMetadata((size,), (length,), True, CPU, table, torch.tensor(places), key_ends=ends)
    expected = ReferenceBackend().forward(q, k, v, layer, seen, config).float()
    plain = AttentionMetadata((size,), (length,), True, CPU, table, torch.tensor(places))
    for backend in native_backends():
        assert (backend.forward(q, k, v, layer, seen, config).float() - expected).abs().max() < 0.01
        assert (backend.forward(q, k, v, layer, plain, config).float() - expected).abs().max() > 0.1


def test_scales_are_quotients_of_tensors() -> None:
    """On a GPU torch multiplies by a number's reciprocal, which differs from the kernels' scale in the last bit."""

    class Quotients(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func.overloadpacket is not torch.ops.aten.reciprocal
            if func.overloadpacket is torch.ops.aten.div:
                assert all(isinstance(argument, torch.Tensor) and argument.dim() for argument in args)
                divided.append(args[0])
            return func(*args, **(kwargs or {}))

    divided: list[torch.Tensor] = []
    pages, scales = (torch.zeros(2, 4, 2, 8, dtype=torch.int8) for _ in range(2)), torch.zeros(2, 2, 4, 2)
    with Quotients():
        LayerCache(*pages, (scales[0], scales[1])).write(torch.arange(3), *torch.randn(2, 3, 2, 8))
    assert len(divided) == 4


def test_lengths_go_to_the_device_in_one_copy_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned blocks the host until it is done."""
    copied: list[int] = []
    real = devices.to_device

    def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(host.numel())
        return real(host, device)

    monkeypatch.setattr(devices, "to_device", sent)
    metadata = AttentionMetadata((3, 1, 2), (5, 4, 2), causal=True)
    lengths = metadata.on_device()
    assert copied == [4 + 4 + 3]
    assert [x.tolist() for x in (lengths.cu_seqlens_q, lengths.kv_lens)] == [[0, 3, 4, 6], [5, 4, 2]]
    assert len(metadata.groups) == 3
    assert len(copied) == 1 + 3 * 3  # for each group: its rows, the rows of its keys, and their number
