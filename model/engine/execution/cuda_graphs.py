"""Records decode steps as CUDA graphs and replays them: one launch in place of a thousand.

A step in which every sequence has one token has the same kernels whatever the tokens are. It is recorded for some batch
sizes. A recorded step reads one row of integers (`triptych.model.engine.execution.batch`) at a fixed address. To run a
step, that row is filled and the next larger size is replayed; padding rows have no keys and no slot to write to.
Kernels read lengths on the device, so the backend must use only `AttentionMetadata.device_lengths`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from triptych.model.attention.base import UNEVEN_KEYS, UNEVEN_TIMES, AttentionMetadata, DeviceLengths
from triptych.model.cache.kv_cache import KVCache
from triptych.model.engine.execution.batch import BatchLayout, StepBatch, pack
from triptych.model.engine.execution.static_row import fill_row
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import Work, finish
from triptych.model.system.devices import to_device
from triptych.model.system.fallbacks import summary

# The kinds of recorded steps, in words.
DECODE_STEPS, PROMPT_STEPS, BATCHES = "decode steps", "steps with prompts", "batches to encode"
SMALL = (1, 2, 4, 8)  # recorded sizes below the regular ones
REGULAR = 16

# Records a function. Returns its result, and a function that computes the result again in the same memory.
Recorder = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]

logger = logging.getLogger(__name__)


class CudaRecorder:
    """Records CUDA graphs that share one memory pool of a device: only one of them runs at a time."""

    def __init__(self, device: torch.device, *, collective: bool = False) -> None:
        """`collective`: the function sums over ranks. NCCL's threads query the device, which must not end a capture."""
        self._device = device
        self._mode = "thread_local" if collective else "global"
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # One stream for all: cuBLAS keeps a workspace for each stream it was used on.
            self._side = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        with torch.cuda.device(self._device), _overlapping(self._device):  # streams are the current device's
            here = torch.cuda.current_stream()
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):  # kernels are compiled and handles made before anything is recorded
                run()
            here.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode=self._mode):
                result = run()
        return result, graph.replay


def _overlapping(device: torch.device) -> AbstractContextManager[None]:
    if find_spec("triton") is None:
        return nullcontext()
    from triptych.model.system.held_kernels import can_overlap, overlapping

    return overlapping(can_overlap(device))


class DecodeGraphs:
    """The recorded decode steps of one model over its KV cache."""

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

    def record_each(self) -> Work[None]:
        """Record every size in a part, the largest first, so that the smaller ones fit into its memory."""
        began = time.monotonic()
        for uneven, sizes in ((False, self.sizes), (True, self.uneven_sizes)):
            for size in reversed(sizes):
                self._recorded[size, uneven] = self._recording(size, uneven=uneven)
                yield None
        logger.info("recorded %d decode steps in %.1f s", len(self._recorded), time.monotonic() - began)

    def fits(self, steps: Sequence[ScheduledSequence]) -> bool:
        """Whether each sequence has one token and a large enough size was recorded."""
        return len(steps) <= self.sizes[-1] and all(step.num_tokens == 1 for step in steps)

    def layout(self, needed: BatchLayout, *, uneven: bool) -> BatchLayout:
        """Return the layout of a step that fits: padded to a recorded size, with tables of the needed length."""
        size = next(size for size in (self.uneven_sizes if uneven else self.sizes) if size >= needed.segments)
        return replace(needed, tokens=size, segments=size, state_columns=self._layouts[size].state_columns)

    def run(
        self, layout: BatchLayout, row: Tensor, num_segments: int, tokens: Tensor | None, *, uneven: bool
    ) -> Tensor:
        """Return the hidden states `[B, d]` of a step packed by `layout`; they are valid until the next run.

        `tokens` are those that the previous step sampled; None if this step needs none of them.
        """
        fill_row(self._row, self._layouts[layout.segments], to_device(row, self._cache.device), layout, tokens)
        hidden, replay = self._recorded[layout.segments, uneven]
        replay()
        return hidden[:num_segments]

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


class Graphs(Protocol):
    """What can be recorded in several sizes."""

    def record_each(self) -> Work[None]:
        """Record every size in a part."""


SomeGraphs = TypeVar("SomeGraphs", bound=Graphs)


def recorded(graphs: SomeGraphs) -> tuple[SomeGraphs | None, str]:
    """Record at once what `recording` records in parts."""
    return finish(recording(graphs))


def recording(graphs: SomeGraphs, what: str = DECODE_STEPS) -> Work[tuple[SomeGraphs | None, str]]:
    """Record all sizes. Where that fails return None and the reason: kernels are then launched one by one."""
    try:
        yield from graphs.record_each()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of CUDA, or of a compiler
        logger.warning("%s could not be recorded, so their kernels are launched one by one", what, exc_info=True)
        return None, summary(error)
    return graphs, ""


def sizes_up_to(most: int) -> list[int]:
    """Return the batch sizes to record: few enough to record quickly, close enough to pad little."""
    regular = range(REGULAR, most + REGULAR, REGULAR)
    return sorted({min(size, most) for size in (*SMALL, *regular)})


def uneven_sizes(most: int, max_model_len: int) -> list[int]:
    """Return the sizes to record again for uneven steps, in which a few sequences have nearly all keys.

    They are powers of two, because such steps are rare. Small batches and short contexts need none.
    """
    if most < REGULAR or max_model_len < UNEVEN_TIMES * UNEVEN_KEYS:
        return []
    powers = (1 << bit for bit in range(REGULAR.bit_length() - 1, most.bit_length() + 1))
    return sorted({min(size, most) for size in powers})


def num_recorded(most: int, max_model_len: int) -> int:
    """Return how many steps are recorded."""
    return len(sizes_up_to(most)) + len(uneven_sizes(most, max_model_len))
