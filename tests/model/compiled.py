"""Compiles the kernels of `TritonBackend` for absent GPUs, and prints each kernel's resources as a JSON line.

`python -m tests.model.compiled CAPABILITY`, in a process without TRITON_INTERPRET. Triton and the assembler that comes
with it need no GPU for that. The launches are those of the backend itself over small inputs on the CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import model.attention.triton as backend
from model.api.sampling_params import SamplingParams
from model.attention import triton_delta, triton_heads
from model.attention.base import HeadNorm, Preparation
from model.attention.layer_backends import Recurrence
from model.cache.kv_cache import LayerCache, StateCache, StateSpan, StateTables
from model.config.attention import GatedDeltaConfig
from model.config.cache import NO_STATE
from model.linear import triton_experts, triton_floats, triton_fp8, triton_integers
from model.sampling import triton_sampling
from tests.model.attention_cases import Case, problem

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8"}
TYPES |= {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
CPU = torch.device("cpu")


class Compiler:
    """A replacement of a kernel: `kernel[grid](...)` compiles it for the arguments."""

    def __init__(self, kernel: Any, capability: int, into: list[dict[str, Any]]) -> None:
        self.kernel, self.capability, self.into = kernel, capability, into

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            options = {name: constants.pop(name) for name in OPTIONS if name in constants}
            signature, constexprs, attributes = self.described(arguments, constants)
            source = ASTSource(self.kernel, signature, constexprs, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            self.into.append({"kernel": self.kernel.__name__, "grid": grid, **taken(made)})

        return launch

    def described(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the arguments' specialisation in a launch: None becomes a constant, divisibility by 16 is recorded."""
        signature, constexprs, attributes = {}, {}, {}
        for at, parameter in enumerate(self.kernel.params):
            value = arguments[at] if at < len(arguments) else constants[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constexprs[parameter.name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{TYPES[value.dtype]}"
                divisible = not parameter.do_not_specialize_on_alignment
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                divisible = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if divisible:
                attributes[(at,)] = [["tt.divisibility", 16]]
        return signature, constexprs, attributes


def taken(made: Any) -> dict[str, Any]:
    """Return registers and spilt bytes of a thread, the shared memory, and the matrix products in the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()  # type: ignore[union-attr]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": made.metadata.shared,
        "warp_group_products": made.asm["ptx"].count("wgmma.mma_async"),
        "contracted": made.asm["ptx"].count("fma.rn"),
        "asynchronous_copies": made.asm["ptx"].count("cp.async.c"),
        "conversions": made.asm["ptx"].count("cvt.rn.f32.s"),  # integers to floats, one by one
        "masks": made.asm["ptx"].count("lop3.b32"),
        "fp8_products": made.asm["ptx"].count("e4m3.e4m3"),
    }


@contextmanager
def compiling(capability: int) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    kernels = [(backend, name) for name in ("attend", "combine", "write_pages")] + [
        (triton_heads, "prepare_heads"),
        *((triton_delta, name) for name in ("step_states", "solve_chunks", "scan_chunks", "gate_outputs")),
        (triton_floats, "one_row"),
        *((triton_sampling, name) for name in ("sampling_kernel", "greedy_kernel")),
        (triton_fp8, "quantize"),
        (triton_fp8, "scaled_product"),
        (triton_experts, "experts_product"),
        (triton_integers, "grouped_product"),
        (triton_integers, "dequantize"),
    ]
    before = [getattr(module, name) for module, name in kernels]
    for (module, name), kernel in zip(kernels, before, strict=True):
        setattr(module, name, Compiler(kernel, capability, found))
    yield found
    for (module, name), kernel in zip(kernels, before, strict=True):
        setattr(module, name, kernel)


def cases(capability: int) -> Iterator[Case]:
    decode, prompts, few = ((1, 600),), ((33, 40), (1, 9)), ((8, 9),)
    for (heads, kv_heads, dim), dtype in product(
        [(32, 8, 128), (14, 2, 64), (8, 1, 256)], [torch.bfloat16, torch.float32]
    ):
        for segments, int8 in product((decode, prompts, few), (False, True)):
            yield Case(
                segments, heads, kv_heads, dim, dtype=dtype, int8=int8, block_size=16, window=48 if int8 else None
            )
        yield Case(((33, 33),), heads, kv_heads, dim, dtype=dtype, paged=False, causal=False)
    for (heads, kv_heads, dim), segments in product([(32, 8, 128), (14, 2, 64), (8, 1, 256)], (decode, prompts)):
        if capability >= 89:  # the first capability with fp8
            yield Case(segments, heads, kv_heads, dim, dtype=torch.bfloat16, fp8=True, block_size=16)
    for segments, window in product((decode, prompts), (48, None)):  # Gemma 2
        yield Case(segments, 8, 4, 256, dtype=torch.bfloat16, block_size=16, window=window, softcap=50.0)
    for dim, dtype in product((64, 128), (torch.bfloat16, torch.float32)):  # T5
        yield Case(decode, 12, 12, dim, dtype=dtype, block_size=16, buckets=True)
        yield Case(((130, 130),), 12, 12, dim, dtype=dtype, paged=False, causal=False, buckets=True)
    for segments in (decode, prompts):  # gpt-oss
        yield Case(segments, 64, 8, 64, dtype=torch.bfloat16, block_size=16, window=128, sinks=True)
    for segments in (decode, prompts):  # BLOOM
        yield Case(segments, 16, 16, 64, dtype=torch.bfloat16, block_size=16, slopes=True)


def prepare_cases(dtype: torch.dtype, pages: torch.dtype | None) -> Iterator[str]:
    """Launch the preparation of heads for the settings that models use, and yield each case's name."""
    for name, heads, kv_heads, dim, turned, normed, interleaved in (
        ("llama", 32, 8, 128, 128, False, False),
        ("qwen3", 16, 8, 128, 128, True, False),
        ("gemma3", 8, 4, 256, 256, True, False),
        ("neox", 8, 8, 80, 20, False, False),
        ("cohere", 32, 8, 128, 128, False, True),
    ):
        rows = torch.zeros(2, (heads + 2 * kv_heads), dim, dtype=dtype)
        query, key, value = rows.split((heads, kv_heads, kv_heads), dim=1)
        norm = HeadNorm(torch.ones(dim, dtype=dtype), None, 1e-6, centred=False) if normed else None
        rotary = (torch.ones(2, 1, turned, dtype=dtype), torch.ones(2, 1, turned, dtype=dtype))
        cache = None
        if pages is not None:
            empty, scale = torch.zeros(1, 16, kv_heads, dim, dtype=pages), torch.zeros(1, 16, kv_heads)
            cache = LayerCache(empty, empty, None if pages is dtype else (scale, scale))
        triton_heads.prepare(
            query, key, value, Preparation(norm, norm, rotary, interleaved), cache, torch.zeros(2).long()
        )
        yield name


def integer_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each product with integer weights and its launch: few rows, several, many, all as floats."""
    for bits, group, offset, dtype in (
        (4, 128, None, torch.bfloat16),
        (4, 64, None, torch.bfloat16),
        (4, 32, None, torch.bfloat16),
        (4, 128, torch.int8, torch.bfloat16),
        (4, 32, torch.float32, torch.bfloat16),
        (4, 64, None, torch.float16),
        (8, 128, None, torch.bfloat16),
        (8, 0, None, torch.bfloat16),
    ):
        for outputs, inputs in ((4096, 4096), (28672, 4096)):
            weight = torch.zeros(outputs, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
            factors = torch.zeros(inputs // group if group else 1, outputs, dtype=dtype)
            offsets = None if offset is None else factors.to(offset)
            packed = (weight, factors, offsets)
            for rows in (1, 40, 200) if outputs == 4096 else (1,):
                x = torch.zeros(rows, inputs, dtype=dtype)
                name = f"{bits} bits, groups of {group}, offsets {offset}, {dtype}, {outputs} outputs, {rows} rows"
                yield name, partial(triton_integers.multiply, x, *packed, None, bits, group)
        yield f"of {bits} bits {dtype}", partial(triton_integers.dequantized, *packed, bits, group, inputs, dtype)


def recur(dtype: torch.dtype, *, kept: bool) -> None:
    """Launch a recurrent layer of Qwen3-Next over a token and a prompt; a pass without a cache keeps no states."""
    config = GatedDeltaConfig(16, 32, 128, 128, 4, 1e-6)
    parameters = (config.channels, config.kernel), (32,), (32,), (config.value_dim,)
    layer = Recurrence(config, *(torch.zeros(shape, dtype=dtype) for shape in parameters))
    inputs, gates = (torch.zeros(50, size, dtype=dtype) for size in (config.channels + config.value_size, 64))
    spans = [StateSpan(0, 1, 1, 2), StateSpan(1, 50, NO_STATE, 3)]
    tables = StateTables.of(spans, triton_delta.CHUNK, CPU)
    triton_delta.compute(layer, inputs, gates, tables, StateCache.zeros(config, 4, CPU) if kept else None)


def main(capability: int) -> None:
    for case in cases(capability):
        with compiling(capability) as found:
            given = problem(case, CPU, solved=False)
            backend.TritonBackend().forward(
                given.query, given.key, given.value, given.cache, given.metadata, case.config, given.bias, given.sinks
            )
        for kernel in found:
            print(json.dumps({"case": str(case), **kernel}), flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        for pages in (dtype, torch.int8, None, *([torch.float8_e4m3fn] if capability >= 89 else [])):
            with compiling(capability) as found:
                names = list(prepare_cases(dtype, pages))
            for name, kernel in zip(names, found, strict=True):
                print(json.dumps({"case": f"prepare {name} {dtype} into {pages}", **kernel}), flush=True)
    for dtype, kept in product((torch.bfloat16, torch.float32), (True, False)):
        with compiling(capability) as found:
            recur(dtype, kept=kept)
        for kernel in found:
            print(json.dumps({"case": f"recurrent {dtype}{'' if kept else ', no states'}", **kernel}), flush=True)
    for dtype, vocabulary in product((torch.bfloat16, torch.float32), (32_000, 50_257)):
        with compiling(capability) as found:
            logits, tokens = torch.zeros(2, vocabulary, dtype=dtype), torch.zeros(2, dtype=torch.int64)
            triton_sampling.launch_sampling(logits, tokens, [1], [SamplingParams(temperature=1.0, top_p=0.9)], [0.5])
            triton_sampling.launch_greedy(logits, tokens, 64)
        for kernel in found:
            print(json.dumps({"case": f"draw {vocabulary} {dtype}", **kernel}), flush=True)
    for dtype, bias in product((torch.bfloat16, torch.float16), (True, False)):
        with compiling(capability) as found:
            weight = torch.zeros(4096, 4096, dtype=dtype)
            triton_floats.multiply_row(weight[:1], weight, weight[0] if bias else None)
        for kernel in found:
            print(json.dumps({"case": f"one row {dtype}, bias {bias}", **kernel}), flush=True)
    for rows, block in product((1, 16, 40, 300), ((1, 0), (128, 128))) if capability >= 89 else ():
        with compiling(capability) as found:
            outputs, width = 256, 1024
            numbers, scales = triton_fp8.quantize_rows(torch.zeros(rows, width, dtype=torch.bfloat16), block[1])
            weight = torch.zeros(outputs, width, dtype=torch.float8_e4m3fn)
            weight_scales = torch.zeros(outputs // block[0], width // block[1] if block[1] else 1)
            triton_fp8.multiply(numbers, scales, weight, weight_scales, None, block, torch.bfloat16)
        for kernel in found:
            print(json.dumps({"case": f"fp8 {rows} {block}", **kernel}), flush=True)
    for dtype, rows in product((torch.bfloat16, torch.float32), (8, 1000, 20_000)):
        with compiling(capability) as found:
            x, weight = torch.zeros(rows, 256, dtype=dtype), torch.zeros(32, 384, 256, dtype=dtype)
            starts = torch.zeros(33, dtype=torch.int32)
            triton_experts.multiply(x, weight, torch.zeros(32, 384, dtype=dtype), starts)
        for kernel in found:
            print(json.dumps({"case": f"experts {dtype} {rows} rows", **kernel}), flush=True)
    for name, launch in integer_cases():
        with compiling(capability) as found:
            launch()
        for kernel in found:
            print(json.dumps({"case": f"integers {name}", **kernel}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
