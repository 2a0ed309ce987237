"""The command `prepare`: compile what the workloads launch, with models of two layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from lab.bench.gpu.cases import Case
from lab.bench.gpu.engines import add as add_requests
from lab.bench.gpu.engines import bench_requests, finish, load, warm
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench
from lab.bench.gpu.shapes import GPU_MODELS, tiny_shape
from triptych.model.api.request import EncodeRequest, Pooling, token_source

_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_POOL = 1 << 30  # bytes of keys and values: several models are prepared at the same time
_MODELS: dict[str, tuple[int, int, int]] = {  # name: sequences, context, tokens of a step
    "llama-8b": (128, 2112, 8192),
    "qwen3-0.6b": (256, 2112, 8192),
    "qwen3.5-9b": (128, 2112, 8192),
    "bart-large": (128, 632, 8192),
    "t5-xl": (128, 632, 8192),
    "whisper-small": (128, 192, 8192),
    "bert-base": (256, 512, 16384),
}


def cases(bench: Bench) -> list[Case]:
    return [Case(f"prepare {name}", partial(_prepare, name=name), 60) for name in _MODELS]


def _prepare(bench: Bench, *, name: str) -> Figures:
    """Load two layers of a model, which compiles its kernels, and run a few requests."""
    seqs, context, tokens = _MODELS[name]
    settings: dict[str, Any] = {"kv_cache_memory": _POOL}
    if bench.tiny:
        raw, seqs, context, tokens = tiny_shape(GPU_MODELS[name]), 2, 48, 64
    else:
        raw = {key: 2 if key in _LAYERS else value for key, value in GPU_MODELS[name].items()}
        raw["full_attention_interval"] = 2  # of recurrent models: one layer of each kind
    ready = load(bench, raw, seqs=seqs, context=context, tokens=tokens, name=name, **settings)
    if ready.loaded.generate is None:
        ids = bench_requests(ready, [(context - 8, 1)])[0].prompt
        ready.loaded.encode.add(EncodeRequest("0", name, token_source(ids), pooling=Pooling.MEAN))
        while ready.loaded.encode.has_work:
            ready.loaded.encode.step()
    else:
        warm(ready, context // 4)
        add_requests(ready, bench_requests(ready, [(9, 3), (5, 4)]))
        finish(ready)
    return {"start": ready.seconds, "fallbacks": list(ready.loaded.info.fallbacks)}
