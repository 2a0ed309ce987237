"""Replaces Triton's kernels by fakes that record which variant a launch would compile, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import triptych.model.attention.triton as backend
from triptych.model.attention import triton_delta, triton_heads

KERNELS = {"attend": backend, "combine": backend, "write_pages": backend, "prepare_heads": triton_heads}
KERNELS |= dict.fromkeys(("step_states", "solve_chunks", "scan_chunks", "gate_outputs"), triton_delta)
_HOPPER = GPUTarget("cuda", 90, 32)


class Noting:
    """A fake of a kernel: `kernel[grid](...)` records Triton's own cache key (types, constants, divisibility by 16)."""

    def __init__(self, kernel: Any, seen: dict[str, dict[str, Any]]) -> None:
        self.name, self.seen = kernel.fn.__name__, seen
        made = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        self.bind = create_function_from_signature(made.signature, made.params, make_backend(_HOPPER))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            named, specialization, options = self.bind(*arguments, **constants)
            self.seen.setdefault(f"{self.name} {specialization} {sorted(options.items())}", named)
            for name in ("out", "weight", "prepared"):
                if isinstance(named.get(name), torch.Tensor):
                    named[name].zero_()

        return launch


@contextmanager
def noted() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the variants launched in the block, with the arguments of each one's first launch."""
    seen: dict[str, dict[str, Any]] = {}
    kernels = {name: getattr(module, name) for name, module in KERNELS.items()}
    for name, kernel in kernels.items():
        setattr(KERNELS[name], name, Noting(kernel, seen))
    try:
        yield seen
    finally:
        for name, kernel in kernels.items():
            setattr(KERNELS[name], name, kernel)
