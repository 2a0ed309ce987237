"""The command `workloads`: whole workloads, with their roofline, profile, memory and start-up time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lab.bench.gpu import profile
from lab.bench.gpu.cases import Case
from lab.bench.gpu.engines import (
    GREEDY,
    BenchModel,
    BenchRequest,
    Paced,
    add,
    bench_requests,
    decode_roofline,
    finish,
    load,
    warm,
)
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, release
from lab.bench.gpu.shapes import GPU_MODELS, tiny_shape
from triptych.model.api.request import EncodeRequest, FinishReason, Pooling, Source, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.execution import mixed_graphs
from triptych.model.engine.execution.model_runner import Launched, ModelRunner

_DRAWN = replace(GREEDY, temperature=0.6)
_FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
Lengths = Sequence[tuple[int, int]]


def cases(bench: Bench) -> list[Case]:
    """Return the cases, the most important first: cases that do not fit the deadline are left for the next run."""
    qwen, bart = partial(_many, name="qwen3-0.6b", lengths=_nano(bench)), partial(_many, lengths=_sources(bench))
    eight = partial(_many, name="llama-8b", lengths=[(_scaled(bench, 1024),) * 2] * _scaled(bench, 128))
    more = [
        Case("llama-8b x128 1k/1k, int4", partial(eight, quantization="int4"), 75),
        Case("llama-8b, prefill 2k, int4", partial(_prefill, name="llama-8b", quantization="int4"), 40),
    ]
    return [
        Case("llama-8b, one stream", partial(_one_stream, name="llama-8b"), 60),
        Case("qwen3-0.6b x256, greedy", qwen, 60),
        Case("qwen3-0.6b x256, temperature 0.6", partial(qwen, params=_DRAWN), 40),
        Case("qwen3-0.6b x256, temperature 0.6, top-p 0.9", partial(qwen, params=replace(_DRAWN, top_p=0.9)), 40),
        Case("llama-8b x128 1k/1k", eight, 75),
        Case("llama-8b, prefill 2k", partial(_prefill, name="llama-8b"), 40),
        Case("llama-8b, 32 streams, prompts arriving", partial(_arriving, name="llama-8b"), 50),
        Case("llama-8b x128 1k/1k, int8 KV", partial(eight, kv_cache_dtype="int8"), 75),
        Case("llama-8b, one stream, fp8", partial(_one_stream, name="llama-8b", **_FP8), 60),
        Case("llama-8b x128 1k/1k, fp8", partial(eight, **_FP8), 75),
        Case("llama-8b, prefill 2k, fp8", partial(_prefill, name="llama-8b", **_FP8), 40),
        Case("llama-8b, one stream, int4", partial(_one_stream, name="llama-8b", quantization="int4"), 60),
        Case("qwen3.5-9b, one stream", partial(_one_stream, name="qwen3.5-9b"), 60),
        Case("qwen3.5-9b x128 1k/1k", partial(eight, name="qwen3.5-9b"), 75),
        Case("qwen3.5-9b, prefill 2k", partial(_prefill, name="qwen3.5-9b"), 40),
        Case("bart-large x128", partial(bart, name="bart-large"), 50),
        Case("t5-xl x128", partial(bart, name="t5-xl"), 60),
        Case("whisper-small x128", partial(_many, name="whisper-small", lengths=_windows(bench)), 60),
        Case("bert-base, texts of 512", partial(_encodings, name="bert-base"), 40),
        Case("bert-base, recorded or not", partial(_recorded_encodings, name="bert-base"), 40),
        Case("llama-1b, one stream", partial(_one_stream, name="llama-1b"), 40),
        Case("qwen3-0.6b, 256 clients, short requests", partial(_in_turn, name="qwen3-0.6b"), 40),
        Case("qwen3-0.6b, 256 clients, prompts launched", partial(_in_turn, name="qwen3-0.6b", recorded=False), 40),
        *(more if not bench.tiny else []),  # which are like others there
    ]


def _nano(bench: Bench) -> Lengths:
    """Return nano-vLLM's benchmark: 256 requests with 100 to 1,024 input and output tokens, uniformly."""
    rng, least, most = random.Random(0), _scaled(bench, 100), _scaled(bench, 1024)
    return [(rng.randint(least, most), rng.randint(least, most)) for _ in range(_scaled(bench, 256))]


def _sources(bench: Bench) -> Lengths:
    """Return 128 sources of 260 to 440 tokens, with 128 output tokens each."""
    rng, least, most = random.Random(0), _scaled(bench, 260), _scaled(bench, 440)
    return [(rng.randint(least, most), _scaled(bench, 128)) for _ in range(_scaled(bench, 128))]


def _windows(bench: Bench) -> Lengths:
    """Return 128 windows of sound, with 128 output tokens each."""
    return [(_raw(bench, "whisper-small")["max_source_positions"], _scaled(bench, 128))] * _scaled(bench, 128)


def _scaled(bench: Bench, count: int) -> int:
    return max(2, count // 64) if bench.tiny else count


def _raw(bench: Bench, name: str) -> dict[str, Any]:
    return tiny_shape(GPU_MODELS[name]) if bench.tiny else GPU_MODELS[name]


def _many(bench: Bench, *, name: str, lengths: Lengths, params: SamplingParams = GREEDY, **settings: Any) -> Figures:
    """Run requests that are all submitted at the start, with exact lengths."""
    most_in, most_out = (max(column) for column in zip(*lengths, strict=True))
    spare = 3 * profile.steps_of(bench)  # additional tokens for the profile
    raw = _raw(bench, name)
    context = most_out + spare + (1 if "max_source_positions" in raw else most_in)  # a window is no part of it
    ready = load(bench, raw, seqs=len(lengths), context=context, name=name, **settings)
    warm(ready, most_in)
    add(ready, bench_requests(ready, lengths), params)
    done = finish(ready)
    out = sum(wanted for _, wanted in lengths)
    kv_bytes = 1.0 if "kv_cache_dtype" in settings else None
    found: Figures = {
        "out_tokens_per_s": out / done.seconds,
        "total_tokens_per_s": sum(map(sum, lengths)) / done.seconds,
        "of_roofline": decode_roofline(ready, bench, lengths, kv_bytes) / done.seconds,
        "decode_step_ms": done.decode_ms,
        "out_tokens": out,
    }
    assert all(len(done.outputs[str(at)]) == wanted for at, (_, wanted) in enumerate(lengths)), "an output too short"
    add(ready, [BenchRequest(ask.prompt, most_out + spare) for ask in bench_requests(ready, lengths)], params)
    return found | profile.decoding(bench, ready, _title(name, params, settings)) | _setup(ready)


def _one_stream(bench: Bench, *, name: str, **settings: Any) -> Figures:
    """Return the milliseconds per token of one request, and the share of the bandwidth of reading weights and keys."""
    prompt, wanted = _scaled(bench, 128), _scaled(bench, 256)
    context = _scaled(bench, 1024) + 4 * profile.steps_of(bench)
    ready = load(bench, _raw(bench, name), seqs=1, context=context, name=name, **settings)
    warm(ready, prompt)
    add(ready, bench_requests(ready, [(prompt, wanted)]))
    done = finish(ready)
    kv_bytes = 1.0 if "kv_cache_dtype" in settings else None
    roofline = ready.roofline(bench, kv_bytes).step(1, [prompt + wanted // 2])
    add(ready, bench_requests(ready, [(prompt, 3 * profile.steps_of(bench))]))
    found: Figures = {"ms_a_token": done.decode_ms, "of_bandwidth": 1e3 * roofline / done.decode_ms}
    found |= {"first_token_ms": 1e3 * done.times["0"][0]}
    return found | profile.decoding(bench, ready, _title(f"{name}, one stream", GREEDY, settings)) | _setup(ready)


def _prefill(bench: Bench, *, name: str, **settings: Any) -> Figures:
    """Return the prefill rate as a share of the matrix rate, without the head, and attention's products apart."""
    prompt, count = _scaled(bench, 2048), 16
    raw = _raw(bench, name)
    ready = load(bench, raw, seqs=count, context=prompt + 16, tokens=4 * prompt, name=name, **settings)
    warm(ready, prompt)
    add(ready, bench_requests(ready, [(prompt, 1)] * count))
    done = finish(ready)
    costs, decoder = ready.roofline(bench).costs, ready.model.config.decoder
    assert decoder is not None
    flops = 2.0 * count * (prompt * costs.decoder + costs.head)
    attention = 2.0 * count * prompt**2 * sum(one.query_size for one in decoder.attentions)  # causal: half of 4
    rate = bench.ceilings.flops_per_second
    found: Figures = {
        "tokens_per_s": prompt * count / done.seconds,
        "of_matrix_rate": flops / done.seconds / rate,
        "of_matrix_rate_with_attention": (flops + attention) / done.seconds / rate,
    }
    add(ready, bench_requests(ready, [(prompt, 1)] * (10 * count)))  # more than the profile needs
    found |= profile.profiled(bench, f"{name}, prefill", ready.engine.step, profile.generating(ready))
    profile.cancel(ready)
    return found | _setup(ready)


def _arriving(bench: Bench, *, name: str) -> Figures:
    """Decode 32 streams while four prompts of 2,048 tokens arrive each second, paced as in the service.

    Returns the streams' inter-token latency and the newcomers' time to first token.
    """
    streams, prompt, rate = _scaled(bench, 32), _scaled(bench, 2048), 4.0
    newcomers, calm, wanted = (2, 16, 60) if bench.tiny else (24, 128, 1536)
    ready = load(bench, _raw(bench, name), seqs=streams + newcomers, context=max(prompt, wanted) * 2, name=name)
    warm(ready, prompt)
    for number, ask in enumerate(bench_requests(ready, [(_scaled(bench, 512), wanted)] * streams)):
        ready.engine.add(ready.request(number, ask.prompt, replace(GREEDY, max_tokens=wanted), streams=True))
    late = bench_requests(ready, [(prompt, 16)] * newcomers, seed=1)
    added: dict[str, float] = {}
    begun: list[float] = []

    def between(at: float) -> None:
        running = [s for s in ready.engine.scheduler.running if s.request.request_id not in added]
        if not begun and len(running) == streams and min(s.num_output_tokens for s in running) >= calm:
            begun.append(at)
        while begun and len(added) < newcomers and at >= begun[0] + len(added) / rate:
            number, params = f"late-{len(added)}", replace(GREEDY, max_tokens=16)
            ready.engine.add(ready.request(number, late[len(added)].prompt, params, streams=True))
            added[number] = at

    done = finish(ready, between, Paced(ready, cuda=bench.cuda).step)
    first = {number: done.times[number][0] for number in added}
    last = min(max(first.values()), min(done.times[str(number)][-1] for number in range(streams)))
    gaps = [pair for number in range(streams) for pair in pairwise(done.times[str(number)])]
    before = [end - start for start, end in gaps if 0.5 * begun[0] < start and end <= begun[0]]
    during = [end - start for start, end in gaps if begun[0] < end <= last]
    waits = sorted(first[number] - at for number, at in added.items())
    calm_ms, busy_ms = 1e3 * statistics.median(before), 1e3 * _quantile(during, 0.99)
    return {
        "between_tokens_ms": calm_ms,
        "p50_while_arriving_ms": 1e3 * statistics.median(during),
        "p99_while_arriving_ms": busy_ms,
        "p99_stretch": busy_ms / calm_ms,
        "first_token_ms_p50": 1e3 * statistics.median(waits),
        "first_token_ms_max": 1e3 * waits[-1],
    } | _setup(ready)


def _in_turn(bench: Bench, *, name: str, recorded: bool = True) -> Figures:
    """Have 256 clients send 100 to 256 tokens and get as many, one request after the other, paced as in the service.

    So prompts are in most steps. Returns the throughput, the share of these steps, and how long the host takes to
    launch them and the others. `recorded`: whether steps with prompts are replayed where they can be.
    """
    clients, least, most = _scaled(bench, 256), _scaled(bench, 100), _scaled(bench, 256)
    rng = random.Random(0)
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(4 * clients)]
    sizes = mixed_graphs.mixed_sizes
    try:
        if not recorded:
            mixed_graphs.mixed_sizes = lambda *_: []
        used, pool = _used_gb(bench), 4 << 30 if bench.cuda else None
        ready = load(bench, _raw(bench, name), seqs=clients, context=2 * most, name=name, kv_cache_memory=pool)
    finally:
        mixed_graphs.mixed_sizes = sizes
    held = _used_gb(bench) - used  # the difference of recorded and not recorded are the graphs
    warm(ready, most)
    left = list(enumerate(bench_requests(ready, lengths)))

    def between(_: float) -> None:
        for _ in range(min(clients - len(list(ready.engine.scheduler)), len(left))):
            number, ask = left.pop()
            params = replace(GREEDY, max_tokens=ask.wanted)
            ready.engine.add(ready.request(number, ask.prompt, params, streams=True))

    between(0.0)
    with _launch_times(ready.runner) as (decodes, prompts):
        done = finish(ready, between, Paced(ready, cuda=bench.cuda).step)
    return {
        "out_tokens_per_s": sum(wanted for _, wanted in lengths) / done.seconds,
        "steps_with_prompts": len(prompts) / (len(prompts) + len(decodes)),
        "launch_ms_with_prompts": 1e3 * statistics.median(prompts),
        "launch_ms_of_decodes": 1e3 * statistics.median(decodes),
        "held_gb": held,
    } | _setup(ready)


def _used_gb(bench: Bench) -> float:
    """Return the memory of the device that is in use, after unused memory is given back."""
    release(bench.device)
    free, total = torch.cuda.mem_get_info(bench.device) if bench.cuda else (0, 0)
    return (total - free) / 1e9


@contextmanager
def _launch_times(runner: ModelRunner) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the seconds of launches inside the block: of steps that only decode, and of those with prompts."""
    times: tuple[list[float], list[float]] = ([], [])
    launch = runner.launch

    def timed(output: Any, before: Launched | None = None) -> Launched:
        began = time.perf_counter()
        try:
            return launch(output, before)
        finally:
            with_prompts = any(step.num_tokens > 1 for step in output.scheduled)
            times[with_prompts].append(time.perf_counter() - began)

    runner.launch = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        del runner.launch


def _encodings(bench: Bench, *, name: str) -> Figures:
    """Return the tokens a second of encoding texts of 512 tokens."""
    length, count = _scaled(bench, 512), _scaled(bench, 2048)
    ready = load(bench, _raw(bench, name), seqs=256, context=max(32, length), tokens=32 * length, name=name)
    engine, rng = ready.loaded.encode, random.Random(0)

    def put(texts: int) -> None:
        for number in range(texts):
            text = token_source(ready.prompt(rng, length))
            engine.add(EncodeRequest(str(number), name, text, pooling=Pooling.MEAN))

    def drain() -> None:
        while engine.has_work:
            if any(output.finish_reason is FinishReason.ERROR for output in engine.step()[0]):
                raise RuntimeError(f"{name} could not encode a text")

    put(64)
    drain()
    put(count)
    seconds = bench.seconds_of(drain)
    rate = length * count / seconds
    found: Figures = {
        "tokens_per_s": rate,
        "of_matrix_rate": 2 * rate * ready.roofline(bench).costs.encoder / bench.ceilings.flops_per_second,
    }
    put(2 * profile.steps_of(bench) * 32 + 1)
    found |= profile.profiled(bench, name, engine.step, profile.encoding(ready))
    return found | _setup(ready)


def _recorded_encodings(bench: Bench, *, name: str) -> Figures:
    """Return the milliseconds of batches of texts that are replayed from CUDA graphs, and launched kernel by kernel."""
    rng = random.Random(0)
    batches = {
        "one of 16": [16],
        "one of 128": [128],
        "one of 512": [512],
        "8 of 64": [64] * 8,
        "32 of 8 to 120": [rng.randint(8, 120) for _ in range(32)],
        "256 of 16": [16] * 256,
    }
    found: Figures = {}
    vectors: dict[str, list[np.ndarray[Any, np.dtype[np.float32]]]] = {}
    for label, graphs in (("recorded", True), ("launched", False)):
        used = _used_gb(bench)
        ready = load(bench, _raw(bench, name), seqs=256, context=512, tokens=8192, name=name, cuda_graphs=graphs)
        found[f"{label}_sizes"] = ready.loaded.info.recorded_batches
        found[f"{label}_held_gb"] = _used_gb(bench) - used
        for title, lengths in batches.items():
            drawn = random.Random(title)
            texts = [
                token_source(ready.prompt(drawn, min(length, ready.loaded.info.max_model_len))) for length in lengths
            ]
            seconds = []
            for _ in range(3 if bench.tiny else 30):
                began = time.perf_counter()
                outputs = _encoded(ready, texts)
                seconds.append(time.perf_counter() - began)
            found[f"{label}_ms, {title}"] = 1e3 * statistics.median(seconds)
            vectors.setdefault(title, []).append(np.concatenate(outputs))
        found |= {f"{label}_{key}": value for key, value in ready.seconds.items()}
        del ready
    found["within"] = max(float(np.abs(one - other).max()) for one, other in vectors.values())
    return found


def _encoded(ready: BenchModel, texts: Sequence[Source]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the vectors of texts that are submitted together."""
    engine = ready.loaded.encode
    found: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for number, text in enumerate(texts):
        engine.add(EncodeRequest(str(number), engine.name, text, pooling=Pooling.MEAN))
    while engine.has_work:
        found |= {output.request_id: np.frombuffer(output.data, np.float32) for output in engine.step()[0]}
    return [found[str(number)] for number in range(len(texts))]


def _setup(ready: BenchModel) -> Figures:
    """Return the seconds of start-up, and the memory on the device."""
    info = ready.loaded.info
    pool = sum(pool.num_blocks * info.block_size * pool.bytes_per_token for pool in info.cache_pools)
    sizes = {"weights_gb": info.weight_bytes / 1e9, "pool_gb": pool / 1e9}
    return {"start": ready.seconds, **sizes, "backend": info.attention_backend, "fallbacks": list(info.fallbacks)}


def _title(name: str, params: SamplingParams, settings: dict[str, Any]) -> str:
    drawn = f", temperature {params.temperature:g}, top-p {params.top_p:g}" if params.temperature else ""
    return f"{name}, decoding{drawn}{''.join(f', {name} {value}' for name, value in settings.items())}"


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
