"""Decode steps recorded once and replayed: on a GPU one launch for the thousand small ones of a step.

A step in which every sequence has one token has the same shape whatever the tokens are. It is recorded for some batch
sizes, reading one row of integers (`model.engine.execution.batch`) that lies where it lies; a step is then that row
filled anew and a replay of the next larger size, the places beyond its sequences having no keys and no slot to write
to. The lengths are read by the kernels, so the backend must be one that looks at `AttentionMetadata.device_lengths`
only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model.attention.base import UNEVEN_KEYS, UNEVEN_TIMES, AttentionMetadata, DeviceLengths
from model.cache.paged import KVCache
from model.engine.execution.batch import BatchLayout, StepBatch, pack
from model.engine.scheduling.scheduled_step import ScheduledSequence
from model.network.inputs import CrossInput, StackInput
from model.network.transformer import Transformer
from model.system.background_work import give_way
from model.system.fallbacks import summary
from model.system.transfer import to_device

SMALL = (1, 2, 4, 8)  # recorded sizes below the regular ones
REGULAR = 16

# Takes what is to be recorded; gives its result, which is written anew by each call of the second.
Recorder = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]

logger = logging.getLogger(__name__)


class CudaRecorder:
    """CUDA graphs of one device that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device, *, collective: bool = False) -> None:
        """`collective`: what is recorded sums over ranks. NCCL's own threads ask the device meanwhile, which must not
        end a recording."""
        self._device = device
        self._mode = "thread_local" if collective else "global"
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # One stream for all: cuBLAS keeps a work space for each that it was used on.
            self._side = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        with torch.cuda.device(self._device):  # streams are the current device's
            here = torch.cuda.current_stream()
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):  # kernels are compiled and handles made before anything is recorded
                run()
            here.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode=self._mode):
                result = run()
        return result, graph.replay


class DecodeGraphs:
    """The recorded decode steps of one model over its pool."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        record: Recorder,
    ) -> None:
        self._model = model
        self._cache = cache
        self._longest = max_model_len
        self._longest_source = model.config.source_positions or max_model_len
        self._record = record
        self.sizes = sizes_up_to(max_num_seqs)
        width = -(-max_model_len // cache.block_size)
        source = -(-self._longest_source // cache.block_size) if model.encoder is not None else 0
        pools = len(cache.pools)
        states = 3 if cache.states else 0
        self._layouts = {size: BatchLayout(size, size, width, source, pools, states) for size in self.sizes}
        # One row for all sizes: they never run at the same time.
        self._row = torch.zeros(sum(self._layouts[self.sizes[-1]].sizes), dtype=torch.int64, device=cache.device)
        self.uneven_sizes = uneven_sizes(max_num_seqs, max_model_len)
        self._recorded: dict[tuple[int, bool], tuple[Tensor, Callable[[], object]]] = {}

    def record_all(self) -> None:
        """Record every size, the largest first, so that the smaller ones fit into its memory."""
        began = time.monotonic()
        for uneven, sizes in ((False, self.sizes), (True, self.uneven_sizes)):
            for size in reversed(sizes):
                self._recorded[size, uneven] = self._recording(size, uneven=uneven)
                give_way()
        logger.info("recorded %d decode steps in %.1f s", len(self._recorded), time.monotonic() - began)

    def fits(self, steps: Sequence[ScheduledSequence]) -> bool:
        """Whether this is a step of single tokens of no more sequences than were recorded."""
        return len(steps) <= self.sizes[-1] and all(step.num_tokens == 1 for step in steps)

    def layout(self, needed: BatchLayout, *, uneven: bool) -> BatchLayout:
        """How a step that fits is packed: as many rows as were recorded, tables as long as they are."""
        size = next(size for size in (self.uneven_sizes if uneven else self.sizes) if size >= needed.segments)
        return replace(needed, tokens=size, segments=size, state_columns=self._layouts[size].state_columns)

    def run(
        self, layout: BatchLayout, row: Tensor, num_segments: int, tokens: Tensor | None, *, uneven: bool
    ) -> Tensor:
        """Hidden states `[B, d]` of a step that is packed by `layout`, valid until the next run.

        `tokens` are those of the step before, None where the step waits for none of them.
        """
        step = self._fill(self._layouts[layout.segments], layout, to_device(row, self._cache.device))
        if tokens is not None:
            fill_placeholders(step, tokens)
        hidden, replay = self._recorded[layout.segments, uneven]
        replay()
        return hidden[:num_segments]

    def _fill(self, layout: BatchLayout, used: BatchLayout, packed: Tensor) -> StepBatch:
        """Put a step of the recorded `layout`, but shorter tables, where it is read; what no length reaches stays."""
        row = self._row[: sum(layout.sizes)]
        step, new = layout.split(row), used.split(packed)
        row[: layout.before_tables].copy_(packed[: layout.before_tables])
        step.tables[..., : used.blocks].copy_(new.tables)
        if layout.source_blocks:
            step.source_lens.copy_(new.source_lens)
            step.source_tables[..., : used.source_blocks].copy_(new.source_tables)
        return step

    @torch.inference_mode()
    def _recording(self, size: int, *, uneven: bool) -> tuple[Tensor, Callable[[], object]]:
        layout = self._layouts[size]
        row = self._row[: sum(layout.sizes)]
        empty = pack(layout, [], self._cache.block_size, {})
        row.copy_(empty)
        inputs, cross = self._inputs(layout.split(row), size, uneven=uneven)
        # Not `self._model.decode`, by which rank 0 would have the others make a call: each rank records by itself.
        return self._record(lambda: Transformer.decode(self._model, inputs, self._cache, cross))

    def _inputs(self, step: StepBatch, size: int, *, uneven: bool) -> tuple[StackInput, CrossInput | None]:
        def metadata(lens: Tensor, tables: Tensor, slots: Tensor | None) -> list[AttentionMetadata]:
            longest = self._longest_source if slots is None else self._longest
            return [
                AttentionMetadata(
                    q_lens=(1,) * size,
                    kv_lens=(longest,) * size,
                    causal=slots is not None,
                    device=self._cache.device,
                    block_tables=tables[pool],
                    slot_mapping=None if slots is None else slots[pool],
                    device_lengths=DeviceLengths(
                        step.cu_seqlens, lens, 1, longest, uneven=uneven and slots is not None
                    ),
                )
                for pool in range(len(tables))
            ]

        first, *others = metadata(step.kv_lens, step.tables, step.slots)
        inputs = StackInput(
            step.ids,
            step.positions,
            first,
            other_pools=tuple(others),
            contexts=step.contexts,
            single_states=step.states if self._cache.states else None,
        )
        if self._model.encoder is None:
            return inputs, None
        first, *others = metadata(step.source_lens, step.source_tables, None)
        return inputs, CrossInput(first, other_pools=tuple(others))


def recorded(graphs: DecodeGraphs) -> tuple[DecodeGraphs | None, str]:
    """All sizes recorded; None and the reason where that does not work: steps are then launched one by one."""
    try:
        graphs.record_all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of CUDA, or of a compiler
        logger.warning("decode steps could not be recorded, so they run launch by launch", exc_info=True)
        return None, summary(error)
    return graphs, ""


def fill_placeholders(step: StepBatch, tokens: Tensor) -> None:
    """Put what the step before sampled, which only the device knows, where it is waited for."""
    known = step.placeholders < 0
    step.ids.copy_(torch.where(known, step.ids, tokens[step.placeholders.clamp(min=0)]))


def sizes_up_to(most: int) -> list[int]:
    """The batch sizes that are recorded: few enough to be quick, near enough to waste little."""
    regular = range(REGULAR, most + REGULAR, REGULAR)
    return sorted({min(size, most) for size in (*SMALL, *regular)})


def uneven_sizes(most: int, max_model_len: int) -> list[int]:
    """The batch sizes that are recorded once more, for steps in which a few sequences have nearly all keys: powers of
    two, as such steps are rare. Where the GPU is full without, that is, of many sequences; none of short contexts."""
    if most < REGULAR or max_model_len < UNEVEN_TIMES * UNEVEN_KEYS:
        return []
    powers = (1 << bit for bit in range(REGULAR.bit_length() - 1, most.bit_length() + 1))
    return sorted({min(size, most) for size in powers})


def num_recorded(most: int, max_model_len: int) -> int:
    """How many steps are recorded."""
    return len(sizes_up_to(most)) + len(uneven_sizes(most, max_model_len))
