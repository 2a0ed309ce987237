"""Compiles the kernels of small steps for an absent GPU, and prints what they read and write as JSON lines.

`python -m tests.model.compiled_steps CAPABILITY [WIDTH...]`, in a process without TRITON_INTERPRET. Named widths are
compiled in bfloat16 alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lab.bench.gpu.pretended import compiled, pretend
from triptych.model.config.layer import Activation
from triptych.model.network import fused_ops

WIDTHS = (768, 4096, 5120, 11008, 14336)


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def steps(width: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the steps of rows of `width`, their parameters in `dtype`."""
    make = partial(rows, dtype=dtype)
    x, gain, wide = make(300, width), make(width), rows(width, dtype=torch.float32)
    places, weights = rows(300, 8, dtype=torch.int64), rows(300, 8, dtype=torch.float32)
    yield "rms", lambda: fused_ops._add_rms(x, x, gain, 1e-5)
    yield "layer", lambda: fused_ops._add_layer(x, x, gain, gain, 1e-5)
    yield "two norms", lambda: fused_ops._norm_add_norm(x, x, wide, 1e-6, wide, 1e-6)
    yield "silu", lambda: fused_ops.gated(make(300, 2 * width), Activation.SILU)
    yield "gelu_tanh", lambda: fused_ops.gated(make(300, 2 * width), Activation.GELU_TANH)
    yield "sigmoid", lambda: fused_ops.sigmoid_gated(x, make(300, width + 64)[:, :width])
    yield "clamped", lambda: fused_ops.clamped(make(300, 2 * width), 7.0, 1.702)
    yield "sums", lambda: fused_ops.weighted_sums(x, places, weights)


def main(capability: int, widths: list[int]) -> None:
    pretend(capability)
    fused_ops.on_gpu = lambda tensor: True
    dtypes = (torch.bfloat16,) if widths else (torch.bfloat16, torch.float32)
    for width in widths or WIDTHS:
        for dtype in dtypes:
            for name, step in steps(width, dtype):
                with compiled() as found:
                    step()
                assert not fused_ops.broken
                for kernel in found:
                    print(
                        json.dumps({"step": name, "width": width, "dtype": str(dtype), **described(kernel.text("ptx"))})
                    )


def described(ptx: str) -> dict[str, object]:
    """Return how often kernels read and write vectors of how many bytes, and their divisions of integers."""
    found: Counter[str] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx):
        found[f"{kind} {int(vector or 1) * int(bits) // 8}"] += 1
    return {"accesses": found, "divisions": len(re.findall(r"\b(?:div|rem)\.[su]\d+", ptx))}


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(width) for width in sys.argv[2:]])
