"""Breaks kernels on purpose: wrong numbers, numbers that are none, and failures to compile, launch or end."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

KERNELS = {  # name: module that launches it, its name there, the argument that it writes
    "double": ("triptych.model.kernel_check.triton_launch", "double", "out"),
    "attend": ("triptych.model.attention.triton", "attend", "out"),
    "combine": ("triptych.model.attention.triton", "combine", "out"),
    "write_pages": ("triptych.model.attention.triton", "write_pages", "values"),
    "prepare_heads": ("triptych.model.attention.triton_heads", "prepare_heads", "prepared"),
    "step_states": ("triptych.model.attention.triton_delta", "step_states", "out"),
    "gate_outputs": ("triptych.model.attention.triton_delta", "gate_outputs", "out"),
    "experts_product": ("triptych.model.linear.triton_experts", "experts_product", "out"),
    "grouped_product": ("triptych.model.linear.triton_integers", "grouped_product", "out"),
    "dequantize": ("triptych.model.linear.triton_integers", "dequantize", "out"),
    "scaled_product": ("triptych.model.linear.triton_fp8", "scaled_product", "out"),
    "one_row": ("triptych.model.linear.triton_floats", "one_row", "out"),
    "fill_kernel": ("triptych.model.engine.execution.triton_static_row", "fill_kernel", "row"),
    "sum_and_norm": ("triptych.model.network.fused_kernels", "sum_and_norm", "normed"),
    "gate_rows": ("triptych.model.network.fused_kernels", "gate_rows", "out"),
    "turn_positions": ("triptych.model.network.fused_kernels", "turn_positions", "cos"),
    "greedy_kernel": ("triptych.model.sampling.triton_sampling", "greedy_kernel", "tokens"),
    "sampling_kernel": ("triptych.model.sampling.triton_sampling", "sampling_kernel", "tokens"),
}
WAYS = ("wrong", "nan", "raise", "crash", "hang")


class Broken:
    """A kernel that is launched as the one it replaces."""

    def __init__(self, kernel: Any, output: str, way: str) -> None:
        self.kernel, self.way = kernel, way
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.at = self.names.index(output)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if self.way == "raise":
                raise RuntimeError("ptxas fatal: not for this card\nand more")
            if self.way == "crash":
                os.abort()
            if self.way == "hang":
                time.sleep(3600)
            self.kernel[grid](*arguments, **options)
            output = arguments[self.at]
            if self.way == "nan" and output.is_floating_point():
                output.fill_(float("nan"))
            else:
                output.copy_(output.flip(-1) + 1)

        return launch


def broken(name: str, way: str) -> tuple[str, Broken]:
    """Return where a kernel is launched from, for `monkeypatch.setattr`, and what to put there."""
    module, attribute, output = KERNELS[name]
    return f"{module}.{attribute}", Broken(getattr(importlib.import_module(module), attribute), output, way)


def main() -> None:
    """Check kernels as `triptych.model.kernel_check.child` does, with those of `BROKEN_KERNELS` (attend=crash,...)
    broken.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triptych.model.kernel_check import child

    for one in filter(None, os.environ.get("BROKEN_KERNELS", "").split(",")):
        name, _, way = one.partition("=")
        target, replacement = broken(name, way)
        module, _, attribute = target.rpartition(".")
        setattr(sys.modules[module], attribute, replacement)
    child.main()


if __name__ == "__main__":
    main()
