"""Triton's kernels compile for absent GPUs, fit their resources, and use their fast instructions."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from lab.bench.gpu.pretended import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
RECURRENT = {"step_states", "solve_chunks", "scan_chunks", "gate_outputs"}
MODELS = ["llama-8b", "llama-8b:int8", "qwen3-0.6b", "bart-large", "t5-xl", "bert-base", "gemma3-1b", "whisper-small"]
MODELS += ["qwen3.5-9b", "qwen3-30b-a3b"]


def compiled(module: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what a module prints of the kernels that it compiles; the cache of Triton is in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", f"tests.model.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_attention(kernel: dict[str, Any], capability: int, *, few: bool) -> None:
    """Check that attention in 16 bits fetches ahead, and that all but few rows are multiplied by warp groups."""
    assert kernel["asynchronous_copies"] > 0, kernel
    assert kernel["slow_conversions"] == 0, kernel
    decodes_small_heads = few and kernel["DIM"] <= 64  # whose programs are many: fetching ahead made them slower
    assert decodes_small_heads or (kernel["ahead"] is not None and kernel["ahead"] > 0), kernel
    assert (kernel["warp_group_products"] > 0) == (capability == 90 and not few), kernel


def test_attention_fetches_ahead(tmp_path: Path) -> None:
    """Compile decoding, over pages of 8 bits too, and packed rows for Hopper."""
    kernels = [one for one in compiled("compiled_models", tmp_path, "90", "attention") if one["kernel"] == "attend"]
    assert [one["BLOCK_M"] for one in kernels] == [16, 16, 128]
    for kernel in kernels:
        check_attention(kernel, 90, few=kernel["BLOCK_M"] == 16)
        assert kernel["stack"] == 0, kernel
        if kernel["BLOCK_M"] == 16:  # three programs of 128 threads fit into a processor's registers and shared memory
            assert kernel["registers"] <= 170 and 3 * (kernel["shared"] + 1024) <= 228 << 10, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_what_models_launch(capability: int, tmp_path: Path) -> None:
    """Compile what warm-up, recording, sampling and steps of the benchmark's models launch."""
    for kernel in compiled("compiled_models", tmp_path, str(capability), *MODELS):
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        # For 10.0 the assembler of Triton 3.7 keeps some kernels in 128 registers, and up to six more in memory.
        # The sine of a large angle is computed in a local array. Sampling runs once a step.
        sampling = 16 if capability == 120 else 8
        most = {"attend": 24, "turn_positions": 32, "sampling_kernel": sampling}
        assert kernel["stack"] <= most.get(kernel["kernel"], 0), kernel
        if kernel["kernel"] == "attend":
            check_attention(kernel, capability, few=kernel["BLOCK_M"] == 16)


def test_no_kernel_returns_none() -> None:
    """Triton 3.6, which torch 2.11 brings, fails to compile `return None`; later versions and the interpreter do it."""
    for file in sorted((ROOT / "model").rglob("*.py")):
        if "triton.jit" not in (text := file.read_text()):
            continue
        for function in (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)):
            if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                returns = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
                nones = [one for one in returns if isinstance(one, ast.Constant) and one.value is None]
                assert not nones, f"{file}: {function.name}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile_and_fit(capability: int, tmp_path: Path) -> None:
    kernels = compiled("compiled", tmp_path, str(capability))
    names = {"attend", "combine", "write_pages", "prepare_heads", "grouped_product", "dequantize"}
    names |= {"sampling_kernel", "greedy_kernel", "one_row"}
    names |= {"experts_product", *RECURRENT}
    if capability >= 89:  # the first that has fp8
        names |= {"quantize", "scaled_product"}
    assert {kernel["kernel"] for kernel in kernels} == names
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        narrow = "bfloat16" in kernel["case"]
        small = kernel["kernel"] in ("sampling_kernel", "greedy_kernel", "one_row", "prepare_heads")
        if (capability == 90 and narrow) or small:
            assert kernel["stack"] <= (8 if kernel["kernel"] == "sampling_kernel" else 0), kernel  # two registers, once
        assert kernel["stack"] < 1024, kernel
        if kernel["kernel"] in RECURRENT and narrow:
            assert kernel["stack"] == 0, kernel
            assert (kernel["asynchronous_copies"] > 0) == (kernel["kernel"] == "scan_chunks"), kernel
        if kernel["kernel"] == "step_states":
            most = 220 if "no states" in kernel["case"] else 200  # a head's state takes 64 of them
            assert kernel["registers"] <= most and kernel["stack"] == 0, kernel
        if kernel["kernel"] in ("quantize", "scaled_product"):
            # Many rows with scales of rows, which `torch._scaled_mm` multiplies where it can: 24 by Triton 3.6.
            assert kernel["stack"] <= (32 if kernel["case"] == "fp8 300 (1, 0)" else 0), kernel
        if kernel["kernel"] in ("grouped_product", "dequantize"):
            assert kernel["stack"] <= 8, kernel  # two registers, once
        if kernel["kernel"] == "grouped_product":
            assert kernel["asynchronous_copies"] > 0, kernel
            few = kernel["case"].endswith(" 1 rows")
            assert (kernel["warp_group_products"] > 0) == (capability == 90 and not few), kernel
            assert kernel["registers"] <= 160 or not few, kernel  # so that three programs fill a processor
            if "4 bits" in kernel["case"]:
                # In words: converting each integer would take longer than reading it; offsets are few.
                assert kernel["masks"] > kernel["conversions"], kernel
        if kernel["kernel"] == "experts_product" and narrow:
            assert kernel["asynchronous_copies"] > 0, kernel
            few = kernel["case"].endswith(" 8 rows")
            assert (kernel["warp_group_products"] > 0) == (capability == 90 and not few), kernel
        if kernel["kernel"] == "scaled_product":
            assert kernel["asynchronous_copies"] > 0, kernel
            few = kernel["case"].startswith(("fp8 1 ", "fp8 16 "))  # on Hopper they are multiplied as float16
            assert (kernel["fp8_products"] > 0) == (capability == 89 or not few), kernel
            assert (kernel["warp_group_products"] > 0) == (capability == 90 and not few), kernel
        if kernel["kernel"] == "prepare_heads":
            # So that its programs fill a processor; in float32 Triton 3.6 takes 74 for rotated neighbours.
            assert kernel["registers"] <= (64 if narrow else 80), kernel
        if kernel["kernel"] in ("write_pages", "prepare_heads"):
            assert kernel["contracted"] == 0, kernel  # otherwise ties are rounded differently than in other backends
        if kernel["kernel"] == "attend" and narrow:
            check_attention(kernel, capability, few=kernel["case"].startswith("1of"))
