"""Triton's kernels compile for absent GPUs, fit their resources, and use their fast instructions."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

ROOT = Path(__file__).parents[2]
RECURRENT = {"step_states", "solve_chunks", "scan_chunks", "gate_outputs"}
SHARED = 99 * 1024  # bytes that a block may use on the smaller GPUs since Ampere


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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.model.compiled", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {"attend", "combine", "write_pages", "prepare_heads", "grouped_product", "dequantize"}
    names |= {"sampling_kernel", "greedy_kernel", "one_row"}
    names |= {"experts_product", *RECURRENT}
    if capability >= 89:  # the first that has fp8
        names |= {"quantize", "scaled_product"}
    assert {kernel["kernel"] for kernel in kernels} == names
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        narrow = "bfloat16" in kernel["case"]
        small = kernel["kernel"] in ("sampling_kernel", "greedy_kernel", "one_row", "prepare_heads")
        if (capability == 90 and narrow) or small:
            assert kernel["stack"] == 0, kernel  # nothing is spilt
        assert kernel["stack"] < 1024, kernel
        if kernel["kernel"] in RECURRENT and narrow:
            assert kernel["stack"] == 0, kernel
            assert (kernel["asynchronous_copies"] > 0) == (kernel["kernel"] == "scan_chunks"), kernel
        if kernel["kernel"] == "step_states":
            assert kernel["registers"] <= 200 and kernel["stack"] == 0, kernel  # a head's state takes 64 of them
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
            assert kernel["asynchronous_copies"] > 0, kernel
            decoding = kernel["case"].startswith("1of")
            assert (kernel["warp_group_products"] > 0) == (capability == 90 and not decoding), kernel
