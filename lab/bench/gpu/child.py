"""The process that runs the cases, `python -m lab.bench.gpu.child ORDER`, started by `supervisor`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.bench.gpu.cases import Case, cases_of
from lab.bench.gpu.figures import LOST, Figures, Skip, Stop
from lab.bench.gpu.machine import Bench, describe, release, require_gpu

Send = Callable[[Figures], None]


class Warnings(logging.Handler):
    """Collects the engine's warnings, such as of a graph that was not recorded."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        reason = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        self.texts.append(f"{record.getMessage()}{reason}"[:500])


def main() -> None:
    order = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # prints a traceback for the supervisor's SIGABRT at the deadline
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    answers = os.fdopen(order["pipe"], "w")

    def send(message: Figures) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        _run(order, send)
    except Stop as stop:
        send({"stop": str(stop)})


def _run(order: dict[str, Any], send: Send) -> None:
    bench = Bench.here(Path(order["folder"]), tiny=order["tiny"], ends=time.monotonic() + order["seconds"])
    logging.getLogger().addHandler(kept := Warnings())
    bench.warnings = kept.texts
    wanted = selected(cases_of(order["commands"], bench), order["only"], order["part"])
    wanted = [case for case in wanted if case.name not in order["leave"]]
    if order["part"] is None and "machine" not in order["leave"]:
        wanted.insert(0, Case("machine", describe, 0.0))
    send({"plan": [case.name for case in wanted]})
    if not bench.cuda:
        require_gpu(bench)
    for case in wanted:
        if bench.left < case.seconds and not bench.tiny:
            about = f"it takes some {case.seconds:.0f} s, {bench.left:.0f} s are left"
            send({"case": case.name, "skipped": f"out of time: {about}"})
            continue
        send({"begin": case.name})
        send({"case": case.name, **_answer(case, bench)})
        if case.name == "machine":
            require_gpu(bench)
        if not bench.alive():
            sys.exit(LOST)


def selected(cases: list[Case], only: str, part: Sequence[int] | None) -> list[Case]:
    """Return the cases whose name contains one of the texts in `only`, separated by `|`; of these every n-th.

    Parts are balanced: cases are dealt by descending duration, so that each part begins with its longest.
    """
    found = [case for case in cases if any(text in case.name for text in only.split("|"))]
    if part is None:
        return found
    which, parts = part
    found = [case for case in found if not case.name.startswith("compile ")]  # each part compiles what it runs
    return sorted(found, key=lambda case: -case.seconds)[which::parts]


def _answer(case: Case, bench: Bench) -> Figures:
    """Run a case and return its figures, or its failure; only `Stop` is raised."""
    began, cuda = time.monotonic(), bench.device.type == "cuda"
    bench.warnings.clear()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        found = case.run(bench)
    except Stop:
        raise
    except Skip as reason:
        found = {"skipped": str(reason)}
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"[:500]}
    found["seconds"] = round(time.monotonic() - began, 2)
    if cuda and bench.alive():
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        release(bench.device)
    if bench.warnings:
        found["warnings"] = sorted(set(bench.warnings))[:8]
    return found


if __name__ == "__main__":
    main()
