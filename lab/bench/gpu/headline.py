"""The command `headline`: every check in parallel processes, then the main workloads one after the other.

Uses only the standard library at import: `check_in_parallel` runs in the supervisor's process, which has no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.gpu import caches
from lab.bench.gpu.supervisor import RESULTS, Task, read

if TYPE_CHECKING:
    from lab.bench.gpu.cases import Case
    from lab.bench.gpu.machine import Bench

WORKLOADS = (  # the most important first
    "llama-8b, one stream",
    "qwen3-0.6b x256, greedy",
    "llama-8b, prefill 2k",
    "bart-large x128",
    "bert-base, texts of 512",
    "bert-base, recorded or not",
    "llama-8b x128 1k/1k",
    "t5-xl x128",
    "qwen3.5-9b, one stream",
    "whisper-small x128",
    "llama-1b, one stream",
    "qwen3-0.6b, 256 clients, short requests",
)
_MAX_PROCESSES = 12  # each has a device context of half a gigabyte
_MOST_CHECKING = 0.5  # of the deadline
_SECONDS = 12.0  # of a workload whose kernels are compiled
_IN_PARALLEL = ("prepare", "check")


def cases(bench: Bench) -> list[Case]:
    from lab.bench.gpu import workloads

    found = {case.name: case for case in workloads.cases(bench)}
    return [replace(found[name], seconds=_SECONDS) for name in WORKLOADS]


def check_in_parallel(task: Task) -> Task:
    """Run `check` and `prepare` in several processes; return the task of what is left, with the rest of the time.

    Kernels are compiled as they are checked, in all processes at once. Times measured here say nothing.
    """
    began = time.monotonic()
    count = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) - 2))
    for folder in (*task.before, task.folder):
        caches.unpack(folder, task.cache_folder)
    minutes = task.minutes * _MOST_CHECKING
    work, known = task.folder / "parts", task.folder / "known"
    known.mkdir(parents=True, exist_ok=True)  # results that are not checked again, without compiled kernels
    rows = read([*task.before, task.folder]) if task.resume else []
    (known / RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    running = []
    for which in range(count):
        part = work / str(which)
        part.mkdir(parents=True, exist_ok=True)
        running.append(_start(task, known, part, (which, count), minutes))
    lock = threading.Lock()
    readers = [threading.Thread(target=_relay, args=(process, lock)) for process in running]
    for reader in readers:
        reader.start()
    try:
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.terminate()
    for reader in readers:
        reader.join()
    shutil.rmtree(known)
    _merge(work, task.folder)
    return replace(task, resume=True, minutes=task.minutes - (time.monotonic() - began) / 60)


def _start(task: Task, known: Path, folder: Path, part: tuple[int, int], minutes: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "lab.bench.gpu",
        *_IN_PARALLEL,
        "--out",
        str(folder),
        "--minutes",
        f"{minutes:.2f}",
    ]
    command += ["--cache-dir", str(task.cache_folder), "--part", f"{part[0]}/{part[1]}", "--only", task.only]
    command += ["--resume", "--before", str(known)]
    if task.tiny:
        command.append("--tiny")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def _relay(process: subprocess.Popen[str], lock: threading.Lock) -> None:
    """Print the lines of a process whole."""
    assert process.stdout is not None
    for line in process.stdout:
        with lock:
            print(line, end="", flush=True)


def _merge(work: Path, folder: Path) -> None:
    """Append the rows and profiles of the parts to those of the folder, and remove the parts."""
    for name in (RESULTS, "profiles.txt"):
        with (folder / name).open("a") as file:
            for path in sorted(work.glob(f"*/{name}")):
                file.write(path.read_text())
                path.unlink()
    for part in work.glob("*"):
        part.rmdir()
    work.rmdir()
