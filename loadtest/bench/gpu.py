"""The GPU bench: one command on a bare CUDA machine that has torch, triton, tokenizers and safetensors.

    python -m loadtest.bench.gpu --json gpu.jsonl

First the ceilings: a large copy, a large bfloat16 product. Then a check that recorded, overlapped steps over Triton's
kernels give the tokens of plain ones over torch's attention. Then the workloads, each with the share of a ceiling that
it reached or the rate to be reached; one that breaks says so and the next goes on. It ends by itself after `--minutes`:
what did not fit is named. `--tiny` runs everything in small on whatever is there, a CPU too.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loadtest.bench.gpu_models import GPU_MODELS, shrunk
from loadtest.bench.models import random_model
from model.attention.selection import select_backend
from model.checkpoint import Checkpoint
from model.engine.config import EngineConfig
from model.engine.loading import LoadedModel, assemble
from model.engine.model_runner import ModelRunner
from model.engine.protocol import ModelSpec
from model.request import EncodeRequest, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card does at best, measured now."""

    bytes_per_second: float  # of a copy, read and written
    flops_per_second: float  # of a bfloat16 product


@dataclass(frozen=True, slots=True)
class Bench:
    """Where everything runs."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    ceilings: Ceilings

    def load(self, name: str, *, seqs: int, context: int, tokens: int = 8192, **settings: Any) -> LoadedModel:
        """A model of the table with random weights, ready."""
        raw = shrunk(GPU_MODELS[name]) if self.tiny else GPU_MODELS[name]
        wanted = settings.pop("attention_backend", "auto")
        engine = EngineConfig(
            device=str(self.device),
            max_num_seqs=seqs,
            max_model_len=context,
            max_num_batched_tokens=max(tokens, seqs),
            prefix_caching=False,
            **settings,
        )
        selection = select_backend(self.device, self.dtype, wanted)
        model = random_model(raw, selection.backend, self.dtype, self.device)
        checkpoint = Checkpoint(Path(name), model.config, (), str(self.dtype))
        return assemble(ModelSpec(name, name, engine), checkpoint, model, selection)

    def scaled(self, count: int) -> int:
        return max(2, count // 16) if self.tiny else count


def measure_ceilings(device: torch.device, tiny: bool) -> Ceilings:
    size = 1 << (24 if tiny else 32)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    side = 256 if tiny else 8192
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    copied = best_seconds(lambda: target.copy_(source), device)
    multiplied = best_seconds(lambda: a @ b, device)
    return Ceilings(2 * size / copied, 2 * side**3 / multiplied)


def best_seconds(work: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    seconds = []
    for _ in range(runs):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ids(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary // 2, vocabulary) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Done:
    """A batch of requests that went through."""

    seconds: float
    step_seconds: list[float]  # of steps that only decoded
    outputs: dict[str, list[int]]


def generate(loaded: LoadedModel, lengths: list[tuple[int, int]], seed: int = 0) -> Done:
    """All requests (tokens in, tokens out) at once, greedily, to their exact lengths."""
    engine, rng = loaded.generate, random.Random(seed)
    assert engine is not None
    config = loaded.encode.model.config
    start = () if config.decoder_start_token_id is None else (config.decoder_start_token_id,)
    for number, (count, wanted) in enumerate(lengths):
        params = SamplingParams(max_tokens=wanted, ignore_eos=True)
        prompt = ids(rng, count, config.embedding.vocab_size)
        engine.add(Request(str(number), loaded.info.name, prompt, params, start, arrival_time=time.monotonic()))
    outputs: dict[str, list[int]] = {}
    steps: list[float] = []
    began = last = time.perf_counter()
    while engine.has_work:
        found, stats = engine.step()
        now = time.perf_counter()
        if stats is not None and stats.num_tokens == stats.num_sequences:
            steps.append(now - last)
        last = now
        for output in found:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    return Done(last - began, steps, outputs)


def warm(loaded: LoadedModel, most: int) -> None:
    """Kernels compiled, memory taken, before anything is timed."""
    generate(loaded, [(most, 4)] * 2 + [(9, 3)], seed=1)


def check(bench: Bench) -> dict[str, Any]:
    """Greedy tokens in float32 of each form, from graphs over Triton's kernels and step by step through torch."""
    exact = replace(bench, dtype=torch.float32, tiny=True)
    lengths = [(5 + 7 * i % 40, 12 + i) for i in range(6)]
    equal = {}
    for name in ("llama-1b", "bart-large", "t5-xl"):
        fast = exact.load(name, seqs=8, context=64, tokens=64)
        slow = exact.load(name, seqs=8, context=64, tokens=64, attention_backend="sdpa", cuda_graphs=False)
        assert fast.generate is not None and slow.generate is not None
        slow.generate.overlap = False
        equal[name] = generate(fast, lengths).outputs == generate(slow, lengths).outputs
        graphs = isinstance(fast.generate.runner, ModelRunner) and fast.generate.runner.graphs is not None
    return {"backend": fast.info.attention_reason, "graphs": graphs, **equal}


def one_stream(bench: Bench, name: str) -> dict[str, Any]:
    """Milliseconds a token of one request, and the share of the bandwidth at which weights and keys are read."""
    prompt, wanted = bench.scaled(128), bench.scaled(256)
    loaded = bench.load(name, seqs=1, context=1024)
    warm(loaded, prompt)
    done = generate(loaded, [(prompt, wanted)])
    seconds = statistics.median(done.step_seconds)
    read = step_bytes(loaded, prompt + wanted // 2)
    return {"ms_a_token": 1e3 * seconds, "of_bandwidth": read / seconds / bench.ceilings.bytes_per_second}


def step_bytes(loaded: LoadedModel, context: int) -> float:
    """What a step of one sequence reads: each weight once (of the token table a row, where it is not the head)."""
    model = loaded.encode.model
    assert model.tokens is not None and model.head is not None
    weights = sum(p.nbytes for p in model.parameters())
    if model.head.weight is not None:
        weights -= model.tokens.weight.nbytes
    return weights + context * loaded.info.kv_bytes_per_token


def many_streams(bench: Bench, name: str, count: int, least: int, most: int) -> dict[str, Any]:
    """Output tokens a second of so many requests with inputs and outputs between `least` and `most` tokens."""
    rng = random.Random(0)
    least, most, count = bench.scaled(least), bench.scaled(most), bench.scaled(count)
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(count)]
    loaded = bench.load(name, seqs=count, context=2 * most + 16)
    warm(loaded, most)
    done = generate(loaded, lengths)
    return {
        "out_tokens_per_s": sum(wanted for _, wanted in lengths) / done.seconds,
        "total_tokens_per_s": sum(map(sum, lengths)) / done.seconds,
        "decode_step_ms": 1e3 * statistics.median(done.step_seconds),
    }


def prefill(bench: Bench, name: str) -> dict[str, Any]:
    """Share of the matrix rate at which prompts of 2,048 tokens are read."""
    prompt = bench.scaled(2048)
    loaded = bench.load(name, seqs=16, context=prompt + 16)
    warm(loaded, prompt)
    done = generate(loaded, [(prompt, 1)] * 16)
    model = loaded.encode.model
    assert model.tokens is not None
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.tokens.weight.numel()
    rate = 2 * matrices * prompt * 16 / done.seconds
    return {"tokens_per_s": prompt * 16 / done.seconds, "of_matrix_rate": rate / bench.ceilings.flops_per_second}


def translations(bench: Bench, name: str) -> dict[str, Any]:
    """Output tokens a second of 128 sources of 260 to 440 tokens, 128 out each."""
    rng = random.Random(0)
    count, wanted = bench.scaled(128), bench.scaled(128)
    lengths = [(rng.randint(bench.scaled(260), bench.scaled(440)), wanted) for _ in range(count)]
    loaded = bench.load(name, seqs=count, context=512)
    warm(loaded, bench.scaled(440))
    done = generate(loaded, lengths)
    return {
        "out_tokens_per_s": count * wanted / done.seconds,
        "decode_step_ms": 1e3 * statistics.median(done.step_seconds),
    }


def encodings(bench: Bench, name: str) -> dict[str, Any]:
    """Tokens a second of texts of 512."""
    length, count = bench.scaled(512), bench.scaled(2048)
    loaded = bench.load(name, seqs=256, context=512, tokens=32 * length)
    rng = random.Random(0)
    for timed in (False, True):
        for number in range(count if timed else 64):
            text = ids(rng, length, loaded.encode.model.config.embedding.vocab_size)
            loaded.encode.add(EncodeRequest(str(number), name, text, arrival_time=time.monotonic()))
        began = time.perf_counter()
        while loaded.encode.has_work:
            loaded.encode.step()
    return {"tokens_per_s": length * count / (time.perf_counter() - began)}


def against_transformers(bench: Bench) -> dict[str, Any]:
    """How many times as fast as the reference library's continuous batching, on 64 requests of 100 to 512 tokens."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    from loadtest.bench.peers.continuous import random_engine
    from loadtest.bench.workloads import Ask, Workload

    name, rng, count = "qwen3-0.6b", random.Random(0), bench.scaled(64)
    lengths = [(rng.randint(*span), rng.randint(*span)) for span in [(bench.scaled(100), bench.scaled(512))] * count]
    raw = shrunk(GPU_MODELS[name]) if bench.tiny else GPU_MODELS[name]
    peer = random_engine(raw, bench.dtype, bench.device)
    asks = tuple(Ask(ids(rng, prompt, raw["vocab_size"]), wanted) for prompt, wanted in lengths)
    try:
        theirs = [peer.run(Workload("streams", asks)).seconds for _ in range(2)][-1]  # the first compiles
    finally:
        peer.close()
    del peer
    release(bench.device)
    loaded = bench.load(name, seqs=count, context=2 * bench.scaled(512) + 16)
    warm(loaded, bench.scaled(512))
    ours = generate(loaded, lengths).seconds
    tokens = sum(wanted for _, wanted in lengths)
    return {"times": theirs / ours, "out_tokens_per_s": tokens / ours, "theirs_per_s": tokens / theirs}


Case = Callable[[Bench], dict[str, Any]]
CASES: dict[str, tuple[str, Case]] = {  # name: what is to be reached, work
    "check": ("all true", check),
    "llama-1b, one stream": (">= 60 % of bandwidth", lambda bench: one_stream(bench, "llama-1b")),
    "llama-8b, one stream": (">= 70 % of bandwidth", lambda bench: one_stream(bench, "llama-8b")),
    "qwen3-0.6b, 256 requests": (">= 20,000 out/s", lambda bench: many_streams(bench, "qwen3-0.6b", 256, 100, 1024)),
    "qwen3-0.6b, transformers": (">= 3 times", against_transformers),
    "llama-8b, 128 requests 1k/1k": (">= 10,000 out/s", lambda bench: many_streams(bench, "llama-8b", 128, 1024, 1024)),
    "llama-8b, prefill 2k": (">= 60 % of the matrix rate", lambda bench: prefill(bench, "llama-8b")),
    "bart-large, 128 sources": (">= 23,500 out/s", lambda bench: translations(bench, "bart-large")),
    "t5-xl, 128 sources": (">= 4,800 out/s", lambda bench: translations(bench, "t5-xl")),
    "bert-base, texts of 512": (">= 1,000,000 tokens/s", lambda bench: encodings(bench, "bert-base")),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append a line for each result to this file")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after so long (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="shapes and counts of a toy, to try the script itself")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not options.tiny:
        parser.error("there is no CUDA device here; --tiny tries the script without")
    ceilings = measure_ceilings(device, options.tiny)
    release(device)
    bench = Bench(device, torch.bfloat16 if device.type == "cuda" else torch.float32, options.tiny, ceilings)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    machine = {"device": name, "torch": str(torch.__version__)}
    measured = {"copy_tb_per_s": ceilings.bytes_per_second / 1e12, "tflops": ceilings.flops_per_second / 1e12}
    report(options.json, "ceilings", "", machine | measured)
    for case, (wanted, work) in CASES.items():
        if options.only not in case:
            continue
        if time.perf_counter() - began > 60 * options.minutes:
            report(options.json, case, wanted, {"skipped": "out of time"})
            continue
        try:
            found = work(bench)
        except Exception as error:  # the other cases are worth having
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        report(options.json, case, wanted, found)
        release(device)


def release(device: torch.device) -> None:
    """What is no longer used, back to the device: pools are as large as what is free there."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def report(path: Path | None, case: str, wanted: str, found: dict[str, Any]) -> None:
    shown = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
    )
    print(f"{case:32} {wanted:26} {shown}", flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"case": case, "wanted": wanted, **found}) + "\n")


if __name__ == "__main__":
    main()
