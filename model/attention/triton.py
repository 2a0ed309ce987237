"""Attention on a GPU by Triton kernels of our own, which read pages where they lie.

Of the metadata only `causal`, `block_tables`, `slot_mapping` and the lengths on the device are read, and what is
launched depends on shapes and upper bounds alone: a step over static buffers can be captured once and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton import language as tl
from triton.runtime import driver

from triptych.model.attention import triton_delta
from triptych.model.attention.base import (
    AttentionMetadata,
    DeviceLengths,
    Preparation,
    PreparingBackend,
    ScoreBias,
    distance_table,
    given,
    refuse_gradients,
    slopes,
)
from triptych.model.attention.layer_backends import Recurrence
from triptych.model.attention.triton_heads import prepare
from triptych.model.attention.triton_kernels import INTERPRETED, SLOPES, TABLE, attend, combine, write_pages
from triptych.model.cache.kv_cache import LayerCache, StateCache, StateTables
from triptych.model.config.attention import AttentionConfig, DisentangledConfig, GatedDeltaConfig, XLNetRelativeConfig
from triptych.model.config.cache import SCALED_KINDS, PagedSpec
from triptych.model.system import kernel_faults
from triptych.model.system.devices import processors
from triptych.model.system.held_kernels import cdiv, next_power_of_2, overlap
from triptych.model.system.kernel_faults import NO_FAULTS, Faults

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MAX_DIM = 256  # of a head: beyond it a tile's rows leave the registers
_MAX_GROUP = {4: 32, 2: 64}  # heads of a key head by bytes of an element: they are rows of one tile
_MIN_PART = 256  # keys that are worth a program of their own
_MAX_PARTS = 64
_MOST_PARTIAL = 2048  # segments times parts of uneven steps; each has a row of partial sums
_TILE_ROWS = (16, 64)  # at which `choose_tiles` changes its mind
_WARP_GROUPS = 227 << 10  # bytes of shared memory of GPUs whose groups of warps multiply what lies there: 9.0, 10.0
_WRITTEN = 2048  # elements that a program puts into the pages


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch of `attend` is cut."""

    rows: int  # BLOCK_M: queries times heads of a group
    keys: int  # BLOCK_N
    warps: int
    stages: int


class TritonBackend(PreparingBackend):
    """float32, bfloat16 and float16 without gradients; biases that depend on nothing but the distance.

    Recurrent layers too (`triptych.model.attention.triton_delta`).
    """

    name = "triton"
    graph_safe = True
    gathers_pages = False
    chunk = triton_delta.CHUNK
    _broken_recurrence: str | None = None

    def __init__(self, faults: Faults = NO_FAULTS) -> None:
        """`faults` are kernels that are broken on this GPU."""
        self.prepares = kernel_faults.PREPARATION not in faults
        self._broken_recurrence = faults.get(kernel_faults.RECURRENCE)

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
        group, name = layer.num_heads // layer.num_kv_heads, str(dtype).removeprefix("torch.")
        if dtype not in _TYPES:
            return f"the Triton kernels do not compute in {name}"
        if layer.head_dim > _MAX_DIM:
            return f"heads of {layer.head_dim} are wider than the Triton kernels' {_MAX_DIM}"
        if group > _MAX_GROUP[dtype.itemsize]:
            return f"{group} heads of a key head are more than the Triton kernels' {_MAX_GROUP[dtype.itemsize]}"
        if isinstance(layer.position, XLNetRelativeConfig | DisentangledConfig):
            return "the Triton kernels add no bias that depends on the query"
        if cache is not None and cache.dtype not in (name, *SCALED_KINDS):
            return f"the Triton kernels read no {cache.dtype} pages for {name} queries"
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        refuse_gradients(self, query)
        table = _table(bias, query.device)
        if len(query) == 0:
            return query
        if cache is not None and metadata.slot_mapping is not None:
            _write(cache, metadata.slot_mapping, given(key), given(value))
        if cache is not None and metadata.block_tables is not None:
            return self._attend(query, cache, metadata.block_tables, metadata, config, table, sinks)
        packed = LayerCache(_rows(given(key)), _rows(given(value)))
        return self._attend(query, packed, None, metadata, config, table, sinks)

    def forward_unprepared(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        preparation: Preparation,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of a step; one that writes no pages gets its keys prepared as packed rows."""
        refuse_gradients(self, query)
        if query.shape[0] == 0:
            return query
        query, key, value = _rows(query), _rows(key), _rows(value)
        tables, slots = metadata.block_tables, metadata.slot_mapping
        if cache is None or tables is None or slots is None:
            query, key = prepare(query, key, value, preparation, None, None)
            return self.forward(query, key, value, cache, metadata, config, bias, sinks)
        query, _ = prepare(query, key, value, preparation, cache, slots)
        return self._attend(query, cache, tables, metadata, config, _table(bias, query.device), sinks)

    def unsupported_recurrence(self, config: GatedDeltaConfig, dtype: torch.dtype) -> str | None:
        if dtype not in _TYPES:
            return f"the Triton kernels do not compute in {str(dtype).removeprefix('torch.')}"
        return triton_delta.unsupported(config) or self._broken_recurrence

    def recur(
        self, layer: Recurrence, inputs: Tensor, gates: Tensor, tables: StateTables, states: StateCache | None
    ) -> Tensor:
        """Compute the outputs of a recurrent layer: one launch for single tokens, three for prompts."""
        refuse_gradients(self, inputs)
        return triton_delta.compute(layer, inputs, gates, tables, states)

    def tiles(
        self,
        rows: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        biased: bool,
        paged: bool,
        quantized: bool = False,
    ) -> Tiles:
        """Return the tiles of a launch. Pages of 8 bits change the keys of a tile, not the row counts of its bounds."""
        shared = shared_memory(device)
        return choose_tiles(rows, head_dim, dtype, biased=biased, paged=paged, quantized=quantized, shared=shared)

    def parts(self, programs: int, max_kv_len: int, device: torch.device) -> int:
        """Into how many parts keys are split, a power of two: two programs for each processor, if keys suffice."""
        wanted = min(2 * processors(device) // programs, max_kv_len // _MIN_PART, _MAX_PARTS)
        return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1

    def launch_bounds(
        self,
        config: AttentionConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_queries: int,
        most_keys: int,
        biased: bool,
        paged: bool,
    ) -> list[tuple[int, int]]:
        """List the launches of a step: `attend` for each cut of the queries, split or not, and `combine` for each
        number of parts. One segment is split into most parts, and by fewer keys into each power of two below."""
        group = config.num_heads // config.num_kv_heads
        if self.unsupported(config, dtype, None) is not None:
            return []
        found: dict[object, tuple[int, int]] = {}
        cuts = {1, 2, *(rows // group + 1 for rows in _TILE_ROWS if rows >= group)}
        begins = sorted(length for length in cuts if length <= most_queries)
        for queries, beyond in zip(begins, [*begins[1:], most_queries + 1], strict=True):
            tiles = self.tiles(group * queries, config.head_dim, dtype, device, biased=biased, paged=paged)
            keys, most = 1, most_keys if paged else beyond - 1  # of packed rows there are as many keys as queries
            while keys <= most:
                parts = self.parts(config.num_kv_heads, keys, device)
                kernels = {(tiles, queries == 1, parts > 1), parts}
                if not kernels <= found.keys():
                    found |= dict.fromkeys(kernels - found.keys(), (queries, keys))
                keys = 2 * _MIN_PART if keys == 1 else 2 * keys
        return list(dict.fromkeys(found.values()))

    def _attend(
        self,
        query: Tensor,
        memory: LayerCache,  # pages, or packed rows `[S, K, D]` where there are no tables
        tables: Tensor | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute in one launch, or in one for what decodes and one for prompts: tiles of prompts are mostly empty
        for the single queries of decoding, and split no keys."""
        lengths, query = metadata.on_device(), _rows(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        count = lengths.singles if tables is not None else 0
        if not count:
            self._launch(query, memory, tables, lengths, metadata.causal, config, bias, sinks, out, 0)
            return out
        decodes, prompts = lengths.apart
        assert tables is not None
        self._launch(query, memory, tables[:count], decodes, metadata.causal, config, bias, sinks, out[:count], 0)
        self._launch(query, memory, tables[count:], prompts, metadata.causal, config, bias, sinks, out, count)
        return out

    def _launch(
        self,
        query: Tensor,
        memory: LayerCache,
        tables: Tensor | None,
        lengths: DeviceLengths,
        causal: bool,
        config: AttentionConfig,
        bias: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
        begin: int,
    ) -> None:
        """Launch `attend` for the segments of `lengths`, whose queries are the rows of `out` from `begin` on."""
        group, dim, paged = config.num_heads // config.num_kv_heads, config.head_dim, tables is not None
        by_table = bias is not None and bias.dim() == 2
        biased = 0 if bias is None else TABLE.value if by_table else SLOPES.value
        tiles = self.tiles(
            group * lengths.max_q_len, dim, query.dtype, query.device,
            biased=by_table, paged=paged, quantized=memory.scales is not None,
        )  # fmt: skip
        num_segments, single = lengths.kv_lens.shape[0], lengths.max_q_len == 1
        num_tiles = num_segments if single else (out.shape[0] - begin) // (tiles.rows // group) + num_segments
        parts = self._parts_of(lengths, num_tiles, config, query.device)
        mixed, weight = out, None
        if parts > 1:
            mixed = torch.empty((*out.shape[:2], parts, out.shape[2]), dtype=torch.float32, device=query.device)
            weight = torch.empty(mixed.shape[:3], dtype=torch.float32, device=query.device)
        heads = config.num_kv_heads
        attend[(num_tiles, heads, parts) if single else (num_tiles * heads, 1, parts)](
            query, memory.keys, memory.values, *(memory.scales or (None, None)),
            tables, lengths.cu_seqlens_q, None if paged else _packed_starts(lengths), lengths.kv_lens,
            bias, sinks, mixed, weight, config.scale, num_segments,
            tables.stride(0) if tables is not None else 0,
            bias.shape[1] // 2 if bias is not None and by_table else 0,
            _MIN_PART if lengths.uneven else 0,
            *query.stride()[:2], *memory.keys.stride()[-3:-1], *memory.values.stride()[-3:-1],
            HEADS=config.num_heads, KV_HEADS=config.num_kv_heads, DIM=dim,
            BLOCK_SIZE=memory.keys.shape[1] if paged else 1,
            BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_D=_block_dim(config),
            WINDOW=config.window or 0, SOFTCAP=config.softcap or 0.0, CAUSAL=causal,
            PAGED=paged, QUANTIZED=memory.scales is not None, BIASED=biased, SINGLE=single, SPLIT=parts > 1,
            FACTOR=tl.float32 if INTERPRETED else _TYPES[query.dtype], **overlap(),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if weight is not None:
            _combine(mixed[begin:], weight[begin:], out[begin:], config)

    def _parts_of(self, lengths: DeviceLengths, num_tiles: int, config: AttentionConfig, device: torch.device) -> int:
        """Return how many parts fill the GPU; for uneven segments as many as the longest one gets alone,
        within a bound of memory: parts of a shorter segment past its keys end at once."""
        if not lengths.uneven:
            return self.parts(num_tiles * config.num_kv_heads, lengths.max_kv_len, device)
        most = max(1, _MOST_PARTIAL // num_tiles)
        return min(self.parts(config.num_kv_heads, lengths.max_kv_len, device), 1 << (most.bit_length() - 1))


def _combine(mixed: Tensor, weight: Tensor, out: Tensor, config: AttentionConfig) -> None:
    """Join the parts `[T, H, parts, D]` of rows whose keys were split."""
    rows, heads, parts = weight.shape
    combine[(rows * heads,)](
        mixed,
        weight,
        out,
        DIM=config.head_dim,
        BLOCK_D=_block_dim(config),
        SPLITS=parts,
        **overlap(),
        num_warps=8 if parts * config.head_dim > 4096 else 4,
    )


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """One query and one key through the kernels; raises whatever stands in their way."""
    config, row = AttentionConfig(1, 1, 16, 1.0), torch.ones(1, 1, 16, dtype=dtype, device=device)
    metadata = AttentionMetadata((1,), (1,), causal=True, device=device)
    found = TritonBackend().forward(row, row, row, None, metadata, config)
    if not torch.equal(found, row):
        raise RuntimeError("attention to a single key is not its value")


def choose_tiles(
    rows: int, head_dim: int, dtype: torch.dtype, *, biased: bool, paged: bool, quantized: bool, shared: int
) -> Tiles:
    """Return tiles for segments of up to `rows` queries times heads of a group, on a GPU with `shared` bytes of shared
    memory a block. They are chosen by hand, so that no request waits for a measurement.

    Tensor cores multiply 16 rows (decoding: the heads of a group), a warp group of Hopper 64. A GPU with less shared
    memory has no warp groups: its warps hold queries and scores in registers, and get half the keys. Numbers of 8 bits
    take registers while they become floats. float32 is multiplied without tensor cores, where a tile's values are held
    in registers several times over.

    One block of keys and values is fetched while another one is multiplied. Rows of pages come after the numbers of
    their pages, so Triton fetches them (stages - 1) // 2 blocks ahead: five stages. Packed rows need three. While heads
    of up to 64 decode, more programs on a processor are worth more than that: with five stages attention of BART and T5
    took 9 % longer on an H200, that of 128 dimensions 1 to 2 % less.
    """
    wide = head_dim > 128
    if dtype is torch.float32:
        if rows <= 16:
            return Tiles(16, 16 if wide else 32, 8, 2)
        return Tiles(32, 16 if wide or biased else 32, 8, 1)
    stages, small = 5 if paged else 3, shared < _WARP_GROUPS
    if rows <= 16:
        stages = 3 if head_dim <= 64 and not quantized else stages
        return Tiles(16, (32 if wide else 64) // (2 if small or quantized else 1), 4, stages)
    if wide:
        if rows <= 64 or small or quantized:
            return Tiles(64, 16 if small else 32, 8, stages)
        return Tiles(128, 32, 8, stages)
    if quantized and small and head_dim > 64:
        return Tiles(64, 32, 8, stages)
    if rows <= 64:
        return Tiles(64, 32, 4, stages)
    # A bias takes the registers of as many pointers.
    few = (quantized and small) or (head_dim > 64 and (biased or small))
    return Tiles(128, 32 if few else 64, 8, stages)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may use; Triton's interpreter plays a Hopper."""
    if INTERPRETED:
        return _WARP_GROUPS
    return _shared_memory(driver.active, device.index or 0)


@cache
def _shared_memory(active: object, device: int) -> int:
    known: int = active.utils.get_device_properties(device)["max_shared_mem"]  # type: ignore[attr-defined]
    return known


def _table(bias: ScoreBias | None, device: torch.device) -> Tensor | None:
    """Return what a bias adds by distance, `[H, 2 R + 1]`, or its slopes `[H]`; raise `ValueError` for one that
    depends on more."""
    if bias is None:
        return None
    table = slopes(bias, device)
    table = distance_table(bias) if table is None else table
    if table is None:
        raise ValueError("the Triton kernels add no bias that depends on more than the distance")
    return table


def _write(cache: LayerCache, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Key and value `[T, K, D]` into the pages in one launch; rows whose slot is -1 go nowhere."""
    key, value = _rows(key), _rows(value)
    num_heads, dim = key.shape[1:]
    block_dim = next_power_of_2(dim)
    block_heads = min(next_power_of_2(num_heads), max(1, _WRITTEN // block_dim))
    write_pages[(len(slots), cdiv(num_heads, block_heads))](
        key,
        value,
        slots,
        cache.keys,
        cache.values,
        *(cache.scales or (None, None)),
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=num_heads,
        DIM=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_dim,
        QUANTIZED=cache.scales is not None,
        **overlap(),
        enable_fp_fusion=False,  # a product and the sum that rounds it are two operations, as in `LayerCache.write`
    )


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor, its last dimension dense; other strides as they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _packed_starts(lengths: DeviceLengths) -> Tensor:
    assert lengths.cu_seqlens_k is not None, "packed keys need cu_seqlens_k"
    return lengths.cu_seqlens_k


def _block_dim(config: AttentionConfig) -> int:
    return max(16, next_power_of_2(config.head_dim))  # a product's inner dimension is at least 16
