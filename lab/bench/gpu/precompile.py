"""Compile a model's Triton kernels for a GPU that is not there: `python -m lab.bench.gpu.precompile 90 MODEL...`.

    python -m lab.bench.gpu.precompile 90 llama-8b bart-large --out out/compiled
    python -m lab.bench.gpu check --before out/compiled --out out/gpu

A cached kernel is used if Triton is the same build on both machines and so are the kernels' sources. `--key` prints
what must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.bench.gpu import caches
from lab.bench.gpu.fp8 import in_fp8
from lab.bench.gpu.integers import in_integers
from lab.bench.gpu.shapes import GPU_MODELS
from lab.bench.models import config_of
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import KVCache, whole_segments
from triptych.model.config.cache import paged_specs, pools_of
from triptych.model.config.formats import QUANTIZED_LAYERS
from triptych.model.engine import warmup
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs, can_record_batches
from triptych.model.engine.execution.mixed_graphs import MixedGraphs, can_record_prompts
from triptych.model.kernel_check.attention_problems import make_tensors
from triptych.model.linear.base import CompiledLinear, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.float import ExpertsLinear
from triptych.model.network.build import build_model
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS
from triptych.model.system.background_work import finish
from triptych.model.system.held_kernels import overlapping

META = torch.device("meta")
PAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MOST_KEYS, _MOST_TOKENS, _MOST_SEQUENCES = 32768, 8192, 256
_BLOCK_SIZE, _BLOCKS, _STATES = 16, 64, 8  # blocks are not allocated
# Of steps that are not recorded: (new tokens, keys) of each sequence.
_STEPS = (
    ((1, 600), (1, 40), (512, 512)),
    ((1, 600), (1, 40), (1, 9), (2048, 4096), (17, 17)),
    ((2048, 2048),),
    ((3, 3), (40, 40), (200, 200)),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.gpu.precompile", description=__doc__.split("\n")[0])
    parser.add_argument("capability", type=int, nargs="?", help="the GPU's compute capability, such as 90")
    told = "names of the benchmark's models, with :int8 or :fp8 for pages of 8 bits, :w-fp8 or :w-int4 for weights; or"
    told += " tiles, what `quick_tiles` launches"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{told}: {', '.join(GPU_MODELS)}")
    parser.add_argument("--cache", type=Path, default=Path("build/gpu-caches"), help="folder of compiler caches")
    parser.add_argument("--out", type=Path, help="folder for archives of that cache, to be given to --before")
    parser.add_argument("--key", action="store_true", help="print the key of this Triton and of the kernels' sources")
    options = parser.parse_args()
    os.environ |= caches.environment(options.cache)
    if options.key:
        print(key())
    if options.capability is None:
        return
    from lab.bench.gpu.pretended import compiled, pretend, take_meta_for_gpu

    pretend(options.capability)
    take_meta_for_gpu(options.capability)
    for name in options.models:
        began = time.monotonic()
        with compiled() as found:
            if name == "tiles":
                launch_tiles()
            else:
                launch_model(name)
        made = sum(not one.from_cache for one in found)
        print(f"{name}: {len(found)} variants, {made} compiled, {time.monotonic() - began:.0f} s", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for line in caches.pack(options.cache, options.out):
            print(line)


def key() -> str:
    """Return a hash of this Triton and of attention's source: kernels made with another one are compiled again."""
    import triton
    from triton.compiler import compiler
    from triton.runtime import cache

    from triptych.model.attention.triton_kernels import attend

    of_triton = getattr(cache, "triton_key", None) or compiler.triton_key
    build = hashlib.sha256(of_triton().encode()).hexdigest()[:16]
    return f"triton {triton.__version__} {build}, attend {attend.cache_key[:16]}"


def launch_model(described: str) -> None:
    """Launch what warm-up, recording and steps of a model launch: MODEL[:int8|:fp8][:w-fp8|:w-int4|...]."""
    name, *settings = described.split(":")
    pages = next((PAGES[one] for one in settings if one in PAGES), torch.bfloat16)
    model = _model(name, [one[2:] for one in settings if one.startswith("w-")])
    with torch.inference_mode():
        cache = _cache(model, pages)
        most = min(_MOST_KEYS, model.config.max_positions or _MOST_KEYS)
        finish(warmup.compile_attention(model, cache, min(most, _MOST_TOKENS), most))
        finish(warmup.compile_products(model))
        if can_record_batches(model):
            largest: dict[str, Any] = {"max_num_seqs": _MOST_SEQUENCES, "max_num_tokens": _MOST_TOKENS}
            finish(EncoderGraphs(model, **largest, record=_record).record_each())
        if cache is not None:
            for count in (_MOST_SEQUENCES, 1):
                sizes: dict[str, Any] = {"max_num_seqs": count, "max_model_len": most, "record": _record}
                finish(DecodeGraphs(model, cache, **sizes).record_each())
                if can_record_prompts(model):
                    finish(MixedGraphs(model, cache, **sizes).record_each())
            for step in _STEPS:
                _run(model, cache, step)
            _sample(model.config.embedding.vocab_size)


def launch_tiles() -> None:
    """Launch what the command `quick_tiles` launches, over small problems on the CPU."""
    from lab.bench.gpu.quick_tiles import launches
    from lab.bench.gpu.tiled_backend import TiledBackend

    for problem, tiles, parts in launches():
        make_tensors(problem, torch.device("cpu"), torch.bfloat16).forward(TiledBackend(tiles, parts))


def _model(name: str, quantizations: list[str]) -> Transformer:
    dtype = torch.bfloat16
    config = config_of(GPU_MODELS[name])
    model = build_model(config, TritonBackend(), LinearFactory(dtype, META)).to(dtype).requires_grad_(False).eval()
    for quantization in quantizations:
        assert quantization == "fp8" or quantization in QUANTIZED_LAYERS, quantization
        model = in_fp8(model) if quantization == "fp8" else in_integers(model, quantization)
    for linear in linears(model):
        if isinstance(linear, ExpertsLinear | CompiledLinear):
            linear.kernels = True  # as on a GPU
    return model


def _cache(model: Transformer, pages: torch.dtype) -> KVCache | None:
    decoder = model.config.decoder
    if not model.config.can_generate or decoder is None:
        return None
    pools = pools_of(paged_specs(decoder, str(pages).removeprefix("torch.")))
    return KVCache(decoder, [_BLOCKS] * len(pools), _BLOCK_SIZE, pages, META, _STATES if decoder.recurrences else 0)


def _record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """Run a step as `CudaRecorder` does, in which kernels begin early on some GPUs."""
    from triton.runtime import driver

    with overlapping(driver.active.get_current_target().arch >= 90):
        return run(), lambda: None


def _run(model: Transformer, cache: KVCache, step: tuple[tuple[int, int], ...]) -> None:
    """Run a step that is not recorded; the sources of an encoder-decoder are as long as the keys."""
    q_lens, kv_lens = (tuple(column) for column in zip(*step, strict=True))
    tokens, count = sum(q_lens), len(step)
    ids = torch.zeros(tokens, dtype=torch.int64, device=META)
    starts, lens = (torch.zeros(size, dtype=torch.int64, device=META) for size in (count + 1, count))
    tables = torch.zeros(count, max(kv_lens) // _BLOCK_SIZE + 1, dtype=torch.int64, device=META)
    singles = q_lens.count(1) if max(q_lens) > 1 else 0
    longest_single = max(kv_lens[:singles], default=0)
    lengths = DeviceLengths(starts, lens, max(q_lens), max(kv_lens), singles=singles, max_single_kv_len=longest_single)
    own = AttentionMetadata(q_lens, kv_lens, True, META, tables, ids, lengths)
    others, cross = (own,) * (len(cache.pools) - 1), None
    if model.encoder is not None:
        source = AttentionMetadata(q_lens, kv_lens, False, META, tables, None, lengths)
        cross = CrossInput(source, other_pools=(source,) * (len(cache.pools) - 1))
    states = whole_segments(q_lens) if cache.states else ()
    model.decode(StackInput(ids, ids, own, other_pools=others, contexts=ids, states=states), cache, cross)


def _sample(vocabulary: int) -> None:
    from triptych.model.sampling.triton_sampling import launch_greedy, launch_sampling

    params = SamplingParams(temperature=1.0, top_p=0.9)
    for dtype, count in product((torch.bfloat16, torch.float32), (1, 2)):
        logits = torch.zeros(count, vocabulary, dtype=dtype, device=META)
        tokens = torch.zeros(count, dtype=torch.int64, device=META)
        launch_sampling(logits, tokens, range(count), [params] * count, [0.5] * count)
        for parts in LIKELIEST_PARTS.values():
            launch_greedy(logits, tokens, parts)


if __name__ == "__main__":
    main()
