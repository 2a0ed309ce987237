"""The compiled library's functions, called with tensors and with the structures of `structures`."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from ctypes import c_float, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from triptych.model.config.layer import Activation
from triptych.model.native.build import BuildError, Built, build, prebuilt
from triptych.model.native.structures import (
    STRUCTURES,
    Attention,
    AttentionShape,
    KVPages,
    PackedMatrix,
    ScoreBias,
    Segments,
    Stack,
    Step,
)
from triptych.model.system.cpu_sets import cpus_of_threads

logger = logging.getLogger(__name__)


class Kind(IntEnum):
    """How numbers are stored."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.int8: Kind.INT8}
ACTIVATIONS = {
    Activation.RELU: 1,
    Activation.GELU: 2,
    Activation.GELU_TANH: 3,
    Activation.SILU: 4,
    Activation.TANH: 5,
    Activation.RELU_SQUARED: 8,
    Activation.QUICK_GELU: 9,
}
CLAMPED_SILU = 7  # a gated SiLU with bounds; 6 is a softcap

LARGE = 1 << 20  # multiply-adds of a layer or a product from which on several threads share it
_EXPONENTIAL = 8  # an exponential takes as long as 8 of them

_IN_FLOATS, _IN_TILES, _BY_VECTORS = range(3)  # forms of attention (attention.h)
_SCRATCH_CALLS = 256  # scratch memory that none of the last 256 calls needed is freed
_NO_TILES = {  # by what `start_tiles` says
    2: "this CPU or its system has none",
    3: "Linux does not permit them",
    4: "their products are wrong",
}


class Library:
    """Calls the compiled functions, with a scratch buffer for each thread that calls them."""

    # All that a library exports: functions that return nothing, and those that return a number.
    _ACTIONS = (
        *("run_stack", "run_linear", "run_attention", "write_pages"),
        *("top_k", "pack_rows", "unpack_rows", "quantise_rows", "time_warping", "bind_threads"),
    )
    _NUMBERS = (
        *("scratch_bytes", "linear_scratch_bytes", "attention_scratch_bytes"),
        *("features", "start_tiles", "structure_sizes", "time_warping_bytes"),
    )
    ENTRY_POINTS = (*_ACTIONS, *_NUMBERS)

    def __init__(self, built: Built) -> None:
        """Load a library. Raises `OSError` if that fails, or if its structures have other sizes than are declared here.

        Its libgomp.so.1 is torch's, which is in memory by that name.

        AMX tiles, if it has them, are requested and checked once; without them vector instructions compute.
        """
        functions = self._functions = ctypes.CDLL(str(built.path))
        self._origin = built.origin
        self._file = built.path.name
        self._scratch = threading.local()
        for name in self._NUMBERS:
            getattr(functions, name).restype = c_int64
        for name in self._ACTIONS:
            getattr(functions, name).restype = None
        _check_structures(functions)
        cpus = cpus_of_threads(os.environ, torch.get_num_threads())
        functions.bind_threads((c_int64 * len(cpus))(*cpus), c_int64(len(cpus)))
        started = functions.start_tiles()
        self.tiles = bool(started == 1)
        self._narrow_form = _IN_TILES if self.tiles else _BY_VECTORS
        self._no_tiles = _NO_TILES.get(started)
        if self._no_tiles:
            logger.warning("the library %s multiplies without its AMX tiles: %s", built.origin, self._no_tiles)

    @property
    def identity(self) -> str:
        """What packed matrices depend on: sources, compiler flags and CPU, and whether there are tiles."""
        return f"{self._file} {'with' if self.tiles else 'without'} tiles"

    @property
    def description(self) -> str:
        found = self._functions.features()
        names = [name for bit, name in enumerate(("AVX-512", "bf16", "VNNI", "SDOT", "I8MM")) if found >> bit & 1]
        names += ["AMX"] * self.tiles
        missing = f", no AMX: {self._no_tiles}" if self._no_tiles else ""
        return self._origin + (f": {' '.join(names)}" if names else "") + missing

    def run_stack(self, stack: Stack, step: Step, x: Tensor, multiply_adds: int = LARGE) -> None:
        """Run rows `x` `[T, d]`, float32, through layers of a stack, in place.

        `multiply_adds` is how many of them all rows take in a layer; where these are fewer than `LARGE`, one thread
        computes the step.
        """
        given, threads = (ctypes.byref(stack), ctypes.byref(step)), _num_threads(multiply_adds)
        scratch = self._scratch_of(self._functions.scratch_bytes(*given, threads))
        self._functions.run_stack(*given, _at(x), scratch, threads)

    def scratch_bytes(self, stack: Stack, step: Step) -> int:
        """Bytes that `run_stack` takes for a step, maybe planned: matrices without data, segments without rows."""
        given, threads = (ctypes.byref(stack), ctypes.byref(step)), c_int64(torch.get_num_threads())
        return _room(self._functions.scratch_bytes(*given, threads))

    def run_linear(self, matrix: PackedMatrix, x: Tensor, out: Tensor, softcap: float = 0.0) -> None:
        """Compute `out = x matrix^T + bias` of float32 rows; a softcap makes that `softcap * tanh(out / softcap)`."""
        threads, rows = _num_threads(x.shape[0] * matrix.n * matrix.k), c_int64(x.shape[0])
        needed = self._functions.linear_scratch_bytes(ctypes.byref(matrix), rows, threads)
        given = (ctypes.byref(matrix), _at(x), rows, _at(out), c_float(softcap))
        self._functions.run_linear(*given, self._scratch_of(needed), threads)

    def pack_rows(self, matrix: PackedMatrix, first: int, rows: Tensor) -> None:
        """Pack `rows` `[count, k]`, float32 or bfloat16, into the panels of `matrix`, from its row `first` on.

        Rows of int8 are the integers of a matrix in 8 or 4 bits, whose scales are then the caller's to fill.
        """
        kind, stride, count = c_int64(KINDS[rows.dtype]), c_int64(rows.stride(0)), c_int64(len(rows))
        threads = _num_threads()
        self._functions.pack_rows(ctypes.byref(matrix), _at(rows), kind, stride, c_int64(first), count, threads)

    def unpack_rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return rows `ids` `[count]`, int64, of a matrix without offsets, float32 `[count, k]`.

        The row of an id that the matrix does not have is zero.
        """
        rows, given = torch.empty(len(ids), matrix.k), (ctypes.byref(matrix), _at(ids), c_int64(len(ids)))
        self._functions.unpack_rows(*given, _at(rows), _num_threads(rows.numel()))
        return rows

    def quantise_rows(
        self, rows: Tensor, kind: Kind, group: int = 0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantise `rows` `[count, k]` as `pack_rows` does: integers as int8, and scales `[count, ceil(k / group)]`.

        Rows are float32 or bfloat16; without a `group` each has one scale. `weights` `[k]`, for 4 bits alone, say how
        much the squared error of each number of a row counts.
        """
        if weights is not None and kind is not Kind.INT4:
            raise ValueError("weights of errors are for 4 bits")
        count, k = rows.shape
        integers = torch.empty(count, k, dtype=torch.int8)
        scales = torch.empty(count, -(-k // group) if group else 1)
        matrix = PackedMatrix(int(kind), count, k, group=group)
        given = (ctypes.byref(matrix), _at(rows), c_int64(KINDS[rows.dtype]), c_int64(rows.stride(0)), c_int64(count))
        self._functions.quantise_rows(*given, _at(weights), _at(integers), _at(scales), _num_threads())
        return integers, scales

    def run_attention(
        self,
        shape: AttentionShape,
        segments: Segments,
        pages: KVPages,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        out: Tensor,
        bias: ScoreBias | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        """Write keys and values where `segments` has slots, then attend; `bias` is added to the scores by distance.

        With `narrow`, long contexts in pages of bfloat16 or int8 are computed by products of bfloat16, if the CPU has
        these.
        """
        threads, rows = _num_threads(), c_int64(query.shape[0])
        needed = self._functions.attention_scratch_bytes(ctypes.byref(shape), ctypes.byref(segments), threads)
        attention = Attention(ctypes.pointer(shape), ctypes.pointer(segments), ctypes.pointer(pages))
        attention.queries, attention.query_stride = query.data_ptr(), shape.heads * shape.dim
        attention.out, attention.form = out.data_ptr(), self._narrow_form if narrow else _IN_FLOATS
        if bias is not None:
            attention.bias = ctypes.pointer(bias)
        given = (ctypes.byref(attention), _at(key), _at(value), rows)
        self._functions.run_attention(*given, self._scratch_of(needed), threads)

    def write_pages(self, shape: AttentionShape, pages: KVPages, slots: Tensor, rows: Tensor) -> None:
        """Put float32 rows `[T, 2, K, D]` of keys and values at `slots` `[T]` of a pool."""
        given = (ctypes.byref(shape), ctypes.byref(pages), _at(slots), _at(rows), c_int64(len(rows)))
        self._functions.write_pages(*given, _num_threads())

    def run_top_k(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the `count` largest of float32 rows `[B, V]`, descending, their places, and logsumexp `[B, 1]`.

        The logsumexp of a row with a NaN, or without a finite number, is NaN; the rest of such a row means nothing.
        """
        rows, size = logits.shape
        values = torch.empty(rows, count)
        tokens = torch.empty(rows, count, dtype=torch.int64)
        log_sums = torch.empty(rows, 1)
        sizes = (c_int64(rows), c_int64(size), c_int64(count))
        threads = _num_threads(logits.numel() * _EXPONENTIAL)
        self._functions.top_k(_at(logits), *sizes, _at(values), _at(tokens), _at(log_sums), threads)
        return values, tokens, log_sums

    def run_time_warping(self, costs: Tensor) -> Tensor:
        """Find the columns `[R]` at which the cheapest way through float32 costs `[R, C]` enters each row."""
        rows, columns = costs.shape
        starts = torch.empty(rows, dtype=torch.int64)
        sizes = (c_int64(rows), c_int64(columns))
        needed = self._functions.time_warping_bytes(*sizes)
        self._functions.time_warping(_at(costs), *sizes, _at(starts), self._scratch_of(needed))
        return starts

    def release_scratch(self) -> None:
        """Free this thread's scratch; the next call takes what it needs."""
        self._scratch.tensor = None

    def _scratch_of(self, needed: int) -> c_void_p:
        """This thread's scratch: it grows when it must, and shrinks after calls that needed less than half of it."""
        mine = self._scratch
        tensor: Tensor | None = getattr(mine, "tensor", None)
        mine.calls, mine.most = getattr(mine, "calls", 0) + 1, max(needed, getattr(mine, "most", 0))
        if tensor is not None and mine.calls >= _SCRATCH_CALLS:
            if 2 * _room(mine.most) < tensor.numel():
                tensor = mine.tensor = None
            needed, mine.calls, mine.most = max(needed, mine.most), 0, 0
        if tensor is None or tensor.numel() < needed:
            mine.tensor = None  # freed before the larger one is made
            tensor = mine.tensor = torch.empty(_room(needed), dtype=torch.uint8)
        return _at(tensor)


def _room(needed: int) -> int:
    """A quarter more than is needed, so that slowly growing steps do not need a new buffer each."""
    return needed + needed // 4


def _check_structures(functions: ctypes.CDLL) -> None:
    """Refuse, with `OSError`, a library that reads other structures than are filled here."""
    sizes = (c_int64 * len(STRUCTURES))()
    known = functions.structure_sizes(sizes, c_int64(len(sizes)))
    if known != len(sizes):
        raise OSError(f"it has {known} structures where {len(sizes)} are declared")
    for size, structure in zip(sizes, STRUCTURES, strict=True):
        declared = ctypes.sizeof(structure)
        if size != declared:
            raise OSError(f"its {structure.__name__} has {size} bytes where {declared} are declared")


_pool_of: int | None = None  # the process that OpenMP's threads run in


def _num_threads(multiply_adds: int = LARGE) -> c_int64:
    """Return how many threads compute: one where there is little, as threads would mostly wait for each other.

    On a busy machine they wait for a CPU too: a model that needs one thread was 3 times slower with two.

    Raises `RuntimeError` in a process that was forked after its parent had computed with several threads: these stay
    with the parent, and OpenMP would wait for them for ever.
    """
    global _pool_of
    threads, process = torch.get_num_threads() if multiply_adds >= LARGE else 1, os.getpid()
    if threads > 1:
        if _pool_of not in (None, process):
            raise RuntimeError(
                "this process was forked after the native kernels had computed with several threads, which a fork "
                "does not copy: start processes by spawn (multiprocessing.get_context('spawn')), load the model in the "
                "child alone, or call torch.set_num_threads(1) in the child"
            )
        _pool_of = process
    return c_int64(threads)


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def native() -> Library | str:
    """Find the library that came with the package, else compile one; returns why there is none if that fails."""
    for find in (prebuilt, build):
        try:
            built = find()
        except BuildError as error:
            logger.warning(
                "there are no native kernels: %s", f"{error} ({error.__cause__})" if error.__cause__ else error
            )
            return str(error)
        if built is None:
            continue
        try:
            return Library(built)
        except OSError as error:
            logger.warning("the library %s does not load: %s", built.origin, error)
    return "the compiled library does not load"


def loaded() -> Library | None:
    """Return the library if this process has loaded it: callers that can do without do not wait for a compiler."""
    found = native() if native.cache_info().currsize else None
    return found if isinstance(found, Library) else None
