"""Launches a kernel by Triton's own path and held, through Triton's own launcher in C, and compares what arrives.

`python -m tests.model.launched LIBRARY`, in a process without TRITON_INTERPRET: LIBRARY is `libcuda_stub.c`, compiled.
Triton finds it as its libcuda.so.1. It prints the numbers of launches, of Triton's own and of held variants.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch
import triton
from triton import language as tl
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from triptych.model.system.held_kernels import HeldKernel, held

SIZES = {"i32": 4, "i64": 8, "u64": 8, "fp32": 4}
LAUNCHES = 600


@held
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["gain"])
def kernel(x, gain, out, width, rows, scale, stride, BLOCK: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at * stride, mask=at < width, other=0.0).to(tl.float32)
    if gain is not None:
        values += tl.load(gain + at, mask=at < rows, other=0.0)
    tl.store(out + at, (values * scale).to(KIND), mask=at < width)


class Driver(CudaDriver):  # type: ignore[misc]
    """Triton's driver, of an H100 that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0x77
        self.get_device_capability = lambda device: (9, 0)


class Arrived:
    """What the stand-in for CUDA has seen last."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def expect(self, signature: list[str]) -> None:
        kinds = [8 if kind.startswith("*") else SIZES[kind] for kind in signature if kind != "constexpr"]
        self._array(ctypes.c_int, "sizes", 64)[: len(kinds)] = kinds
        ctypes.c_int.in_dll(self._library, "count").value = len(kinds)

    def seen(self) -> tuple[Any, ...]:
        shape = *self._array(ctypes.c_uint, "last_grid", 3), *self._array(ctypes.c_ulonglong, "last_values", 64)
        threads = (ctypes.c_uint.in_dll(self._library, name).value for name in ("last_threads", "last_shared"))
        return *shape, *threads, ctypes.c_void_p.in_dll(self._library, "last_stream").value

    def _array(self, kind: Any, name: str, size: int) -> Any:
        return (kind * size).in_dll(self._library, name)

    def function(self) -> int | None:
        return ctypes.c_void_p.in_dll(self._library, "last_function").value


def main(path: str) -> None:
    arrived = Arrived(path)
    driver.set_active(Driver())
    assert isinstance(kernel, HeldKernel)
    settings = {"do_not_specialize": ["rows"], "do_not_specialize_on_alignment": ["gain"]}
    plain = triton.JITFunction(kernel.fn, **settings)
    chosen, buffers = random.Random(0), [torch.empty(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for _ in range(LAUNCHES):
        tensors = buffers[0][chosen.choice((0, 1)) :], chosen.choice((None, buffers[1])), buffers[0]
        numbers = chosen.choice((1, 48, 2**31 + 1)), chosen.choice((5, 2**33)), chosen.random(), -16
        named = {"BLOCK": 16, "KIND": tl.float32} | chosen.choice(({}, {"num_warps": 8}))
        grid = chosen.choice(((3,), (2, 5), (2, 3, 4)))
        compiled = plain.run(*tensors, *numbers, **named, grid=grid, warmup=True)
        arrived.expect(list(compiled.src.signature.values()))
        plain[grid](*tensors, *numbers, **named)
        expected = arrived.seen()
        kernel[grid](*tensors, *numbers, **named)
        assert arrived.seen() == expected, (numbers, named)
        of_held = {one.function: one.hash for one in kernel.device_caches[0][0].values()}
        assert of_held[arrived.function()] == compiled.hash, (numbers, named)
    print(LAUNCHES, len(kernel.device_caches[0][0]), len(kernel.variants))


if __name__ == "__main__":
    main(sys.argv[1])
