"""Small steps between products on a GPU, and what a launch costs its host: `python -m lab.bench.gpu.steps`.

Each kernel is compared with torch over widths, and its time with that of its bytes at the rate of a copy. Launches are
timed held by variant and by Triton's own path. It prints JSON lines, in about half a minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

from lab.bench.gpu.machine import Bench
from triptych.model.attention.base import AttentionMetadata, Preparation
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AttentionConfig
from triptych.model.kernel_check.step_problems import StepProblem, compare_steps, step_problems
from triptych.model.network import fused_ops
from triptych.model.system.held_kernels import HeldKernel

# What is compared: every step of one width, and those of models at others. Each takes 0.3 s to compile.
_EVERY = (1024, torch.bfloat16)
_SOME = (
    (100, torch.bfloat16),
    (4096, torch.bfloat16),
    (14336, torch.bfloat16),
    (4096, torch.float16),
    (4096, torch.float32),
)
_TIMED = ("rms", "layer", "two norms", "silu", "gelu_tanh", "clamped", "weighted sums", "turns")
_LAUNCHES = 1000


def main() -> None:
    bench = Bench.here(Path("."), tiny=False, ends=time.monotonic() + 120)
    device = bench.device
    if device.type != "cuda":
        raise SystemExit("there is no CUDA device here")
    rate = bench.ceilings.bytes_per_second
    tell(device=torch.cuda.get_device_name(device), copy_tb_per_s=rate / 1e12)
    for name, launch in launches(device).items():
        held, by_triton = host_cost(launch), without_holding(partial(host_cost, launch))
        tell(launches=name, held_us=1e6 * held, by_triton_us=1e6 * by_triton)
    for rows in (1, 256, 8192):
        for problem in step_problems(rows, 4096, torch.bfloat16, device):
            if problem.name in _TIMED:
                tell(**timed(bench, problem, rows, rate))
    for width, dtype in (*_SOME, _EVERY):
        names = None if (width, dtype) == _EVERY else _TIMED
        errors = compare_steps(33, width, dtype, device, names)
        wrong = {name: error for name, error in errors.items() if error > 1}
        tell(check=f"{width} {dtype}", ok=not (wrong or fused_ops.broken), wrong=wrong, broken=sorted(fused_ops.broken))


def tell(**figures: Any) -> None:
    rounded = {name: round(one, 4) if isinstance(one, float) else one for name, one in figures.items()}
    print(json.dumps(rounded), flush=True)


def timed(bench: Bench, problem: StepProblem, rows: int, rate: float) -> dict[str, Any]:
    """Time a step by its kernel and by torch on the device."""
    seconds, plain = bench.device_seconds(problem.by_kernel), bench.device_seconds(problem.by_torch)
    share = problem.nbytes / rate / seconds
    return {"step": problem.name, "rows": rows, "us": 1e6 * seconds, "torch_us": 1e6 * plain, "of_bandwidth": share}


def launches(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return calls of one or two launches each, as a layer of an 8B makes them for 64 decoding sequences."""
    config, count, length = AttentionConfig(32, 8, 128, 128**-0.5), 64, 500
    heads = torch.randn(count, 48, 128, dtype=torch.bfloat16, device=device)
    query, key, value = heads.split((32, 8, 8), dim=1)
    pages = torch.zeros(count * 32, 16, 8, 128, dtype=torch.bfloat16, device=device)
    blocks = torch.arange(count * 32, device=device).view(count, 32)
    slots = blocks[:, length // 16] * 16 + length % 16 - 1
    lengths = (1,) * count, (length,) * count
    metadata = AttentionMetadata(*lengths, True, device, blocks, slots)
    backend, cache = TritonBackend(), LayerCache(pages, pages.clone())
    cos = torch.ones(count, 1, 128, dtype=torch.bfloat16, device=device)
    preparation = Preparation(rotary=(cos, cos))
    problems = {one.name: one for one in step_problems(count, 4096, torch.bfloat16, device)}
    return {
        "prepare_heads and attend": lambda: backend.forward_unprepared(
            query, key, value, preparation, cache, metadata, config
        ),
        "rms": problems["rms"].by_kernel,
        "silu": problems["silu"].by_kernel,
    }


def host_cost(launch: Callable[[], object]) -> float:
    """Return the host's seconds of one call, while the device's queue is not full."""
    for _ in range(10):
        launch()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_LAUNCHES // 5):
            launch()
        seconds.append((time.perf_counter() - began) / (_LAUNCHES // 5))
    torch.cuda.synchronize()
    return min(seconds)


def without_holding(work: Callable[[], float]) -> float:
    """Run `work` with Triton's own launches."""
    with patch.object(HeldKernel, "__getitem__", triton.JITFunction.__getitem__):
        return work()


if __name__ == "__main__":
    main()
