"""Compiles the kernels of `TritonBackend` for absent GPUs, and prints each kernel's resources as a JSON line.

`python -m tests.model.compiled CAPABILITY`, in a process without TRITON_INTERPRET. Triton and the assembler that comes
with it need no GPU for that. The launches are those of the backend itself over small inputs on the CPU.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

import triptych.model.attention.triton as backend
from lab.bench.gpu.pretended import Compiled, compiled, pretend
from tests.model.attention_cases import Case, problem
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention import triton_delta, triton_delta_kernels, triton_heads, triton_kernels
from triptych.model.attention.base import HeadNorm, Preparation
from triptych.model.attention.layer_backends import Recurrence
from triptych.model.cache.kv_cache import LayerCache, StateCache, StateSpan, StateTables
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.config.cache import NO_STATE
from triptych.model.linear import triton_experts, triton_floats, triton_fp8, triton_integers
from triptych.model.sampling import triton_sampling
from triptych.model.system.held_kernels import HeldKernel

CPU = torch.device("cpu")


def taken(made: Compiled) -> dict[str, Any]:
    """Return registers and spilt bytes of a thread, the shared memory, and what the code of a kernel has how often."""
    registers, stack = made.resources()
    ptx = made.text("ptx")
    return {
        "kernel": made.kernel,
        **{name: made.constants.get(name) for name in ("BLOCK_M", "DIM")},
        "registers": registers,
        "stack": stack,
        "shared": made.shared,
        "warp_group_products": ptx.count("wgmma.mma_async"),
        "contracted": ptx.count("fma.rn"),
        "asynchronous_copies": ptx.count("cp.async.c"),
        "ahead": fetched_ahead(made.text("ttgir")),
        "conversions": ptx.count("cvt.rn.f32.s"),  # integers to floats, one by one
        "masks": ptx.count("lop3.b32"),
        "slow_conversions": ptx.count("cvt.bf16.f16"),  # few at a time; by way of float32 more
        "fp8_products": ptx.count("e4m3.e4m3"),
    }


def fetched_ahead(ttgir: str) -> int | None:
    """Return how many copies may still run when a loop goes on, the least of all loops; None: no loop waits for any."""
    loops = re.findall(r"scf\.for.*?scf\.yield", ttgir, re.DOTALL)
    return min(
        (int(count) for loop in loops for count in re.findall(r"async_wait[^\n]*num = (\d+)", loop)), default=None
    )


@contextmanager
def compiling() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that has all kernels that were launched in the block, after it."""
    found: list[dict[str, Any]] = []
    for module in (
        triton_kernels, triton_heads, triton_delta_kernels, triton_floats, triton_sampling, triton_fp8, triton_experts,
        triton_integers,
    ):  # fmt: skip
        for kernel in vars(module).values():
            if isinstance(kernel, HeldKernel):  # what was launched before is compiled again, or read from the cache
                kernel.device_caches.clear()
                kernel.variants.clear()
    with compiled() as made:
        yield found
    found += map(taken, made)


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
    pretend(capability)
    for case in cases(capability):
        with compiling() as found:
            given = problem(case, CPU, solved=False)
            backend.TritonBackend().forward(
                given.query, given.key, given.value, given.cache, given.metadata, case.config, given.bias, given.sinks
            )
        for kernel in found:
            print(json.dumps({"case": str(case), **kernel}), flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        for pages in (dtype, torch.int8, None, *([torch.float8_e4m3fn] if capability >= 89 else [])):
            with compiling() as found:
                names = list(prepare_cases(dtype, pages))
            for name, kernel in zip(names, found, strict=True):
                print(json.dumps({"case": f"prepare {name} {dtype} into {pages}", **kernel}), flush=True)
    for dtype, kept in product((torch.bfloat16, torch.float32), (True, False)):
        with compiling() as found:
            recur(dtype, kept=kept)
        for kernel in found:
            print(json.dumps({"case": f"recurrent {dtype}{'' if kept else ', no states'}", **kernel}), flush=True)
    for dtype, vocabulary in product((torch.bfloat16, torch.float32), (32_000, 50_257)):
        with compiling() as found:
            logits, tokens = torch.zeros(2, vocabulary, dtype=dtype), torch.zeros(2, dtype=torch.int64)
            triton_sampling.launch_sampling(logits, tokens, [1], [SamplingParams(temperature=1.0, top_p=0.9)], [0.5])
            triton_sampling.launch_greedy(logits, tokens, 64)
        for kernel in found:
            print(json.dumps({"case": f"draw {vocabulary} {dtype}", **kernel}), flush=True)
    for dtype, bias in product((torch.bfloat16, torch.float16), (True, False)):
        with compiling() as found:
            weight = torch.zeros(4096, 4096, dtype=dtype)
            triton_floats.multiply_row(weight[:1], weight, weight[0] if bias else None)
        for kernel in found:
            print(json.dumps({"case": f"one row {dtype}, bias {bias}", **kernel}), flush=True)
    for rows, block in product((1, 16, 40, 300), ((1, 0), (128, 128))) if capability >= 89 else ():
        with compiling() as found:
            outputs, width = 256, 1024
            numbers, scales = triton_fp8.quantize_rows(torch.zeros(rows, width, dtype=torch.bfloat16), block[1])
            weight = torch.zeros(outputs, width, dtype=torch.float8_e4m3fn)
            weight_scales = torch.zeros(outputs // block[0], width // block[1] if block[1] else 1)
            triton_fp8.multiply(numbers, scales, weight, weight_scales, None, block, torch.bfloat16)
        for kernel in found:
            print(json.dumps({"case": f"fp8 {rows} {block}", **kernel}), flush=True)
    for dtype, rows in product((torch.bfloat16, torch.float32), (8, 1000, 20_000)):
        with compiling() as found:
            x, weight = torch.zeros(rows, 256, dtype=dtype), torch.zeros(32, 384, 256, dtype=dtype)
            starts = torch.zeros(33, dtype=torch.int32)
            triton_experts.multiply(x, weight, torch.zeros(32, 384, dtype=dtype), starts)
        for kernel in found:
            print(json.dumps({"case": f"experts {dtype} {rows} rows", **kernel}), flush=True)
    for name, launch in integer_cases():
        with compiling() as found:
            launch()
        for kernel in found:
            print(json.dumps({"case": f"integers {name}", **kernel}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
