"""The check of kernels that a start makes, for models of the benchmark: `python -m lab.bench.gpu.self_check MODEL...`.

Each model's checks run in a child process as at a start, twice: the second time all kernels are compiled. The last
line says how long the next start takes, which remembers what has passed. Kernels are compiled into build/gpu-caches, as
the bench's. `MODEL:int8` and `:fp8` are pages of 8 bits, `:w-int4` and `:w-fp8` weights. With `--crash` one kernel
writes where it must not, which may cost no other one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lab.bench.gpu import caches
from lab.bench.gpu.shapes import GPU_MODELS, tiny_shape
from lab.bench.models import config_of
from triptych.model.attention.selection import select_backend, select_layers
from triptych.model.config.formats import QUANTIZED_LAYERS
from triptych.model.kernel_check.check import Check
from triptych.model.kernel_check.memory import Memory, identity_of
from triptych.model.kernel_check.plan import planned_checks
from triptych.model.kernel_check.processes import CHILD, Checker, Outcome
from triptych.model.linear.factory import LinearFactory

_MODELS = (  # the most important first
    *("llama-8b", "bart-large", "qwen3.5-9b", "qwen3-30b-a3b", "llama-8b:w-int4", "llama-8b:int8", "llama-8b:w-fp8"),
    *("t5-xl", "gemma3-1b", "gpt-oss-20b", "bert-base", "whisper-small", "qwen3-0.6b", "llama-8b:fp8"),
)
_SECONDS = 150  # after which no other model is begun
_PAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_QUERIES, _KEYS, _BLOCK = 8192, 32768, 16


def main() -> None:
    tiny, began = "--tiny" in sys.argv, time.monotonic()
    os.environ |= caches.environment(Path("build/gpu-caches"))
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    tell(identity=identity_of(device))
    passed: list[Check] = []
    for name in [name for name in sys.argv[1:] if not name.startswith("-")] or _MODELS:
        if time.monotonic() - began > _SECONDS:
            tell(model=name, skipped="out of time")
            continue
        found = checks_of(name, device, dtype, tiny=tiny)
        first, second = (_run(found, device) for _ in range(2))
        failed = {f"{check}"[:200]: reason for check, reason in first[0].failed.items()}
        slowest = [(f"{check}"[:40], round(s, 2)) for check, s in sorted(second[0].seconds.items(), key=_seconds)[-3:]]
        ran = {"checks": len(found), "passed": len(first[0].passed), "failed": failed, "unchecked": first[0].unchecked}
        tell(model=name, **ran, seconds=first[1], compiled_seconds=second[1], slowest=slowest)
        passed += first[0].passed
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        memory = Memory(identity_of(device), Path(folder))
        memory.add(passed)
        left = len(memory.unknown(passed))
        tell(remembered=len(set(passed)), left=left, remembered_seconds=round(time.monotonic() - began, 3))


def _run(checks: tuple[Check, ...], device: torch.device) -> tuple[Outcome, float]:
    began = time.monotonic()
    child = "lab.bench.gpu.crashing_checks" if "--crash" in sys.argv else CHILD
    return Checker(device, child=child).run(checks), round(time.monotonic() - began, 1)


def _seconds(timed: tuple[Check, float]) -> float:
    return timed[1]


def checks_of(name: str, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> tuple[Check, ...]:
    """Return the checks of a model with its variant, at the default limits."""
    model, _, variant = name.partition(":")
    raw = tiny_shape(GPU_MODELS[model]) if tiny else GPU_MODELS[model]
    config, pages = config_of(raw), _PAGES.get(variant, dtype)
    selection = select_layers(select_backend(device, dtype, "triton", {}), config, dtype, pages)
    integers, fp8 = None, ("*.layers.*",) if variant == "w-fp8" else None
    if variant.removeprefix("w-") in QUANTIZED_LAYERS and variant.startswith("w-"):
        in_layers, in_head = QUANTIZED_LAYERS[variant.removeprefix("w-")]
        integers = (("*.layers.*", in_layers), ("head", in_head))
    linear = LinearFactory(dtype, device, fp8=fp8, integers=integers)
    queries, keys = (40, 64) if tiny else (_QUERIES, _KEYS)
    return planned_checks(
        config, selection.backend, linear, pages=pages, block_size=_BLOCK, most_queries=queries, most_keys=keys
    )


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
