"""Profiles of steps: host time by phase, and device time by kernel.

Host time is measured in separate steps without the profiler, which would take most of it. The share of time in which
the device is busy is the union of its kernels' times over elapsed time, in the profiled steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lab.bench.gpu.engines import BenchModel
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench
from lab.bench.gpu.timers import Timers, Where
from triptych.model.api.request import FinishReason
from triptych.model.engine import encode_engine
from triptych.model.engine.execution import model_runner
from triptych.model.system import devices

_STEPS, _TINY_STEPS = 20, 3
_SHOWN = 5  # kernels in the results; the text has more
_LISTED = 25


def steps_of(bench: Bench) -> int:
    """Return how many steps are timed, and how many are profiled after them."""
    return _TINY_STEPS if bench.tiny else _STEPS


def generating(ready: BenchModel) -> list[Where]:
    """Return the phases of a generation step: schedule, pack, launch, collect (with waiting for the device), update."""
    return [
        (ready.engine.scheduler, "schedule", "schedule"),
        (model_runner, "pack", "pack"),
        (ready.engine.runner, "launch", "launch"),
        (model_runner.Launched, "collect", "collect"),
        (devices.HostCopy, "get", "wait"),
        (ready.engine, "_update", "update"),
    ]


def encoding(ready: BenchModel) -> list[Where]:
    """Return the phases of an encoder step; the rest of its time copies each text's vectors to the host."""
    engine = ready.loaded.encode
    return [
        (engine, "_next_batch", "schedule"),
        (encode_engine, "source_input", "pack"),
        (engine, "_encode", "launch"),
        (devices.HostCopy, "get", "wait"),
    ]


def profiled(bench: Bench, title: str, step: Callable[[], object], places: list[Where], rows: int = 0) -> Figures:
    """Time the phases of `steps_of` steps, then profile as many with torch's profiler, whose text goes to profiles.txt.

    `rows`: sequences in a step, for host time per token. A failed profile does not fail the case.
    """
    timers, steps = Timers(), steps_of(bench)
    with timers.on(*places):
        bench.wait()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - began
    split = {name: 1e3 * spent / steps for name, spent in timers.seconds.items()}
    split["rest"] = 1e3 * seconds / steps - sum(split.values())
    found: Figures = {"step_ms": 1e3 * seconds / steps, "host_ms": split}
    if rows:
        found["host_us_a_token"] = 1e3 * (found["step_ms"] - split.get("wait", 0.0)) / rows
    try:
        found |= _on_device(bench, title, step)
    except Exception as error:
        found["profile_failed"] = f"{type(error).__name__}: {error}"[:300]
    return found


def decoding(bench: Bench, ready: BenchModel, title: str) -> Figures:
    """Profile the engine once all its requests decode, then cancel them."""
    engine = ready.engine
    stats = None
    while engine.has_work:
        _, stats = engine.step()
        if stats is not None and stats.num_tokens == stats.num_sequences and not engine.scheduler.waiting:
            break
    if stats is None or not engine.has_work:
        return {"profile_failed": "never did all of it decode at once"}
    rows = stats.num_sequences
    found = profiled(bench, title, engine.step, generating(ready), rows)
    cancel(ready)
    return found


def cancel(ready: BenchModel) -> None:
    """Cancel all requests of the engine."""
    for name in {sequence.request.request_id for sequence in ready.engine.scheduler}:
        ready.engine.abort(name, None, FinishReason.CANCELLED)
    while ready.engine.has_work:
        ready.engine.step()


def _on_device(bench: Bench, title: str, step: Callable[[], object]) -> Figures:
    steps = steps_of(bench)
    kind = torch.profiler.ProfilerActivity.CUDA if bench.cuda else torch.profiler.ProfilerActivity.CPU
    bench.wait()
    with torch.profiler.profile(activities=[kind]) as profile:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        bench.wait()
        seconds = time.perf_counter() - began
    events = [event for event in profile.events() or () if event.device_type.name == kind.name]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy, total = covered(spans) / 1e6, sum(end - start for start, end in spans) / 1e6
    kernels = _by_name(events)
    _write(bench, title, seconds, busy, kernels)
    top = [
        {"kernel": name[:80], "ms_a_step": 1e3 * spent / steps, "share": spent / max(total, 1e-12)}
        for name, spent, _ in kernels[:_SHOWN]
    ]
    return {
        "busy": busy / seconds,
        "device_ms": 1e3 * busy / steps,
        "kernels_a_step": len(events) / steps,
        "top": top,
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _by_name(events: Iterable[Any]) -> list[tuple[str, float, int]]:
    """Return name, seconds and calls of each kernel, by descending time."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in events:
        spent = (event.time_range.end - event.time_range.start) / 1e6
        seconds[event.name] = seconds.get(event.name, 0.0) + spent
        calls[event.name] = calls.get(event.name, 0) + 1
    return sorted(((name, spent, calls[name]) for name, spent in seconds.items()), key=lambda row: -row[1])


def _write(bench: Bench, title: str, seconds: float, busy: float, kernels: list[tuple[str, float, int]]) -> None:
    steps = steps_of(bench)
    with (bench.folder / "profiles.txt").open("a") as file:
        file.write(f"\n{title}: {steps} steps, {1e3 * seconds / steps:.3f} ms each, busy {busy / seconds:.1%}\n")
        for name, spent, calls in kernels[:_LISTED]:
            file.write(f"{1e3 * spent / steps:10.4f} ms {calls / steps:8.1f} calls a step  {name[:160]}\n")
