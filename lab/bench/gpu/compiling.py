"""Parallel compilation of kernel variants, in processes that fill the compiler's cache for later measurements."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from typing import TypeVar

from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench

Job = TypeVar("Job")
_MAX_PROCESSES = 12  # each has a device context of half a gigabyte


def in_parallel(
    bench: Bench, compile_one: Callable[[Job], object], jobs: Sequence[Job], seconds: float | None = None
) -> Figures:
    """Compile all jobs within `seconds`, or half of what is left; failures occur again when the variants are measured.

    What is not ready in time is ended, and compiled where it is used.
    """
    began, most = time.monotonic(), bench.left / 2
    workers = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) - 2, len(jobs)))
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    failures, done = [], 0
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        waiting = [pool.submit(compile_one, job) for job in jobs]
        for future in as_completed(waiting, timeout=max(1.0, most if seconds is None else min(most, seconds))):
            done += 1
            if (error := future.exception()) is not None:
                failures.append(f"{type(error).__name__}: {error}"[:200])
    except Late:
        failures.append(f"{len(jobs) - done} were not ready in time")
        for process in list(pool._processes.values()):  # or they would take processors from what is measured
            process.kill()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    spent = time.monotonic() - began
    return {"variants": len(jobs), "processes": workers, "compile_s": spent, "problems": failures[:10]}
