"""`triptych inspect MODEL --pod memory=4Gi,cpu=2 --load 5/s`: says whether a pod can serve a load, and how fast.

The model is loaded and measured here, on as many CPUs as the pod has; memory and latency are reckoned from that. Other
CPUs have other speeds: measure on the kind of machine that will serve.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.errors import ConfigError
from triptych.model.system.cpu_threads import set_threads, usable_cpus
from triptych.service.settings.parsers import byte_size

_RUNS = 3  # of each measurement; the median counts
_STEPS = 16  # decode steps that are timed together
_BATCHES = (1, 4, 16)
_FRONT_BYTES = 350 << 20  # of the process that speaks HTTP, and of its sandboxes
_SPARE = 0.1  # of the memory, for bursts of requests and their texts


@dataclass(frozen=True, slots=True)
class Pod:
    """The limits of a container."""

    memory: int  # bytes
    cpus: int

    @classmethod
    def parse(cls, text: str) -> Pod:
        """Parse `memory=4Gi,cpu=2`; raises `ConfigError`."""
        parts = [part.strip().partition("=")[::2] for part in text.split(",")]
        given = dict(parts)
        try:
            memory = byte_size(re.sub(r"(?<=[KMGT]i|\d[KMGT])$", "B", given.pop("memory")))
            cpus = _whole_cpus(given.pop("cpu"))
        except (KeyError, ValueError):
            given["?"] = ""
        if given or len(parts) > 2 or cpus < 1:
            raise ConfigError(f"--pod: found {text!r}, expected memory=4Gi,cpu=2 with whole CPUs")
        return cls(memory, cpus)


def _whole_cpus(text: str) -> int:
    """Parse `2`, `2.0` or `2000m`, as Kubernetes writes CPUs; raises `ValueError`."""
    cpus = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    if not cpus.is_integer():
        raise ValueError(text)
    return int(cpus)


@dataclass(frozen=True, slots=True)
class Load:
    """What clients send: requests a second, and their mean lengths in tokens."""

    requests: float
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str, prompt: int, output: int) -> Load:
        """Parse `5/s` or `5`; raises `ConfigError`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text.strip())
        if match is None or not float(match[1]):
            raise ConfigError(f"--load: found {text!r}, expected requests a second such as 5/s")
        return cls(float(match[1]), prompt, output)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that were measured: of a prompt or an input, and of a decode step by its number of sequences."""

    prompt: float
    step: float  # that no sequence adds to
    sequence: float  # what each sequence adds to a step


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a pod does under a load. If the load does not fit, the seconds are infinite (null in JSON)."""

    most_requests: float  # a second, that the pod can serve for ever
    busy: float  # share of the pod's time; above 1 the queue grows
    sequences: float  # that run at once, on average
    first_token: float  # seconds, on average; of an encoder the whole request
    between_tokens: float
    request: float


def forecast(costs: Costs, load: Load, most_sequences: int) -> Forecast:
    """Reckon the steady state of one engine that computes prompts and steps in turn.

    A second has `load.requests` prompts. What they leave is for steps, and a step gives every running sequence a token.
    A prompt waits for a step to end, and for other prompts as in a queue with one server and equal times
    (M/D/1).
    """
    each = max(costs.sequence * load.output, 0.0)  # seconds of a request in steps, next to others
    # With the most sequences in each step a request costs its prompt, and its share of each step.
    shared = costs.prompt + (costs.step / most_sequences + costs.sequence) * load.output
    most = 1 / shared
    prompts = load.requests * costs.prompt
    left = 1 - prompts - load.requests * each
    if load.requests >= most or left <= 0:
        return Forecast(most, load.requests / most, most_sequences, math.inf, math.inf, math.inf)
    running = load.requests * load.output * (costs.step + costs.sequence) / left
    step = costs.step + costs.sequence * (1 + running)  # a sequence sees itself and the mean of the others
    waiting = prompts * costs.prompt / (2 * (1 - prompts))
    first = costs.prompt + waiting + (step / 2 * min(running, 1.0) if load.output else 0.0)
    between = step / (1 - prompts) if load.output > 1 else 0.0
    return Forecast(most, load.requests / most, running, first, between, first + between * max(load.output - 1, 0))


def prepare(pod: Pod) -> None:
    """Let this process use as many CPUs as the pod has. Call it before torch is imported. Raises `ConfigError`."""
    if pod.cpus > usable_cpus():
        raise ConfigError(f"--pod: cpu={pod.cpus}, and this machine has {usable_cpus()} to measure on")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: pod.cpus])
    set_threads(pod.cpus)


def report(name: str, path: str, pod: Pod, load: Load, *, as_json: bool) -> int:
    """Load and measure a model, print what the pod does with it, and return 0 if both memory and load fit, else 1."""
    from triptych.model.llm import LLM

    with LLM(path, EngineConfig(device="cpu", prefix_caching=False)) as llm:
        info = llm.info
        output = load.output if llm.checkpoint.config.can_generate else 0
        load = Load(load.requests, load.prompt, output)
        if load.prompt + load.output > info.max_model_len:
            raise ConfigError(f"{load.prompt} + {load.output} tokens are more than the {info.max_model_len} of {name}")
        costs = _measure(llm, load)
        found = forecast(costs, load, info.max_num_seqs)
        resident = _resident()
    pool = info.kv_bytes_per_token * info.block_size * info.num_blocks
    running = math.ceil(min(found.sequences, info.max_num_seqs)) or 1
    cache = info.kv_bytes_per_token * running * (load.prompt + load.output)
    needed = {"weights": info.weight_bytes, "processes": max(resident - info.weight_bytes - pool, 0) + _FRONT_BYTES}
    needed |= {"kv_cache": cache, "spare": round(_SPARE * pod.memory)}
    left = pod.memory - sum(needed.values())
    fits = {"memory": left >= 0, "load": found.busy < 1}
    if as_json:
        reckoned = {key: value if math.isfinite(value) else None for key, value in asdict(found).items()}
        about = {"schema": 1, "name": name, "pod": asdict(pod), "load": asdict(load), "fits": fits}
        print(json.dumps(about | {"bytes": {**needed, "left": left}, "measured": asdict(costs), "reckoned": reckoned}))
    else:
        print("\n".join(_lines(name, pod, load, costs, found, needed, left)))
    return 0 if all(fits.values()) else 1


def _lines(
    name: str, pod: Pod, load: Load, costs: Costs, found: Forecast, needed: dict[str, int], left: int
) -> list[str]:
    def gib(size: float) -> str:
        return f"{size / (1 << 30):.2f} GiB"

    sizes = ", ".join(f"{part.replace('_', ' ')} {gib(size)}" for part, size in needed.items())
    verdict = f"fits, {gib(left)} left" if left >= 0 else f"DOES NOT FIT: {gib(-left)} too little"
    steps = (
        f"; a step of 1 sequence {1e3 * (costs.step + costs.sequence):.1f} ms, each more {1e3 * costs.sequence:.2f} ms"
    )
    lines = [
        f"{name} on {pod.cpus} CPUs and {gib(pod.memory)}, {load.requests:g} requests a second of "
        f"{load.prompt} + {load.output} tokens",
        f"  memory    {verdict} ({sizes})",
        f"  measured  {load.prompt} tokens {1e3 * costs.prompt:.1f} ms" + (steps if load.output else ""),
    ]
    if found.busy >= 1:
        return [*lines, f"  load      DOES NOT FIT: at most {_number(found.most_requests)} requests a second"]
    lines.append(
        f"  load      fits: {found.busy:.0%} of the {_number(found.most_requests)} requests a second that it can serve"
    )
    if not load.output:
        return [*lines, f"  reckoned  a request takes {1e3 * found.first_token:.0f} ms on average"]
    return [
        *lines,
        f"  reckoned  {found.sequences:.1f} sequences run; first token after {1e3 * found.first_token:.0f} ms, then "
        f"one each {1e3 * found.between_tokens:.1f} ms, the whole in {found.request:.1f} s, on average",
    ]


def _number(value: float) -> str:
    """Write a number with two digits, or all of a larger one."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _measure(llm: object, load: Load) -> Costs:
    from triptych.model.llm import LLM

    assert isinstance(llm, LLM)
    draw = random.Random(0)
    size = llm.checkpoint.config.source_vocab_size

    def prompts(number: int, length: int) -> list[list[int]]:
        return [[draw.randrange(size // 2, size) for _ in range(length)] for _ in range(number)]

    if not load.output:
        return Costs(_median(lambda: llm.encode(prompts(4, load.prompt))) / 4, 0.0, 0.0)

    def generated(given: list[list[int]], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        return _seconds(lambda: llm.generate(given, params))

    one = prompts(1, load.prompt)
    prompt = _median(lambda: llm.generate(one, SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)))
    steps = {}
    for batch in (one for one in _BATCHES if one <= llm.info.max_num_seqs):
        given = prompts(batch, min(load.prompt + load.output // 2, llm.info.max_model_len - _STEPS - 1))
        generated(given, 1 + _STEPS)
        # In turns, so that other work on the machine falls on both.
        steps[batch] = (
            statistics.median(generated(given, 1 + _STEPS) - generated(given, 1) for _ in range(_RUNS)) / _STEPS
        )
    return fitted(prompt, steps)


def fitted(prompt: float, steps: Mapping[int, float]) -> Costs:
    """Return the line through the seconds of decode steps, by their number of sequences. Raises `ConfigError`.

    A step of more sequences is no quicker; where it was measured so, the machine did something else.
    """
    if min(prompt, *steps.values()) <= 0:
        raise ConfigError("--pod: steps could not be measured, as this machine does other work; try again")
    seconds = list(itertools.accumulate(steps.values(), max))
    if len(seconds) == 1:
        return Costs(prompt, seconds[0], 0.0)
    slope, base = statistics.linear_regression(list(steps), seconds)
    if base < 0:
        slope, base = statistics.mean(each / number for number, each in zip(steps, seconds, strict=True)), 0.0
    return Costs(prompt, base, slope)


def _median(work: Callable[[], object]) -> float:
    """Return the median of the seconds that `work` takes, after one run that does not count."""
    work()
    return statistics.median(_seconds(work) for _ in range(_RUNS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _resident() -> int:
    """Return the bytes that this process has in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
