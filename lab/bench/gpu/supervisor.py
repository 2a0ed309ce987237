"""The supervisor of the GPU benchmark, which enforces the deadline and writes results. Uses only the standard library.

The child process, which imports torch, reports each case that it begins and its result as JSON lines through a pipe. If
it dies, by an illegal access that makes its CUDA context unusable or by a crash of the compiler, that case has failed
and another child continues with the rest. At the deadline the child is killed, and cases that have not run are listed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.gpu import caches
from lab.bench.gpu.figures import LOST, Figures

RESULTS = "results.jsonl"
STOPPED = 2  # exit code: the machine is not suitable
TIMED_OUT = 3  # exit code: the deadline has passed
_ABORT_S = 5.0  # between SIGABRT and SIGKILL


@dataclass
class Task:
    """Holds the settings of a run."""

    commands: list[str]
    folder: Path  # results.jsonl, profiles.txt, caches-*.tar.*
    minutes: float
    tiny: bool = False
    only: str = ""  # cases whose name contains this
    before: list[Path] = field(
        default_factory=list
    )  # folders of earlier runs: their caches are used, and with `resume` their results
    resume: bool = False  # skip cases with a result
    cache_folder: Path = Path("build/gpu-caches")
    child: str = "lab.bench.gpu.child"  # the module of the child process
    part: tuple[int, int] | None = (
        None  # (k, n): every n-th case from the k-th on, while other processes run the others
    )


@dataclass
class Supervisor:
    """Runs the benchmark once."""

    task: Task
    plan: list[str] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    running: str | None = None
    stopped: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return 60 * self.task.minutes - (time.monotonic() - self.began)

    def run(self) -> int:
        """Run all cases until the end or the deadline, and return the exit code."""
        task = self.task
        task.folder.mkdir(parents=True, exist_ok=True)
        folders = [*task.before, task.folder]
        if task.resume:
            self.answered = {row["case"] for row in read(folders) if "skipped" not in row} - {"machine"}
        unpacked = sum(caches.unpack(folder, task.cache_folder) for folder in folders)
        if unpacked:
            print(f"{unpacked} files of compilers' caches are used again", flush=True)
        while self._child():
            pass
        for name in self._rest():
            self._write(name, {"skipped": self.stopped or "out of time"})
        if not task.tiny and task.part is None:
            for line in caches.pack(task.cache_folder, task.folder):
                print(line, flush=True)
        if self.stopped:
            print(f"STOPPED: {self.stopped}", flush=True)
            return STOPPED
        return TIMED_OUT if self.left <= 0 else 0

    def _child(self) -> bool:
        """Run one child process, and return whether cases are left for another."""
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", self.task.child, json.dumps(self._order(writing))],
            env=os.environ | caches.environment(self.task.cache_folder),
            pass_fds=[writing],
            start_new_session=True,  # so that its children end with it
        )
        os.close(writing)
        late = False
        try:
            for message in _lines(reading, self):
                if message is None:
                    late = True
                    break
                self._take(message)
        except BaseException:
            _end(process)
            raise
        if late:
            _end(process)
        code = process.wait()
        if self.running is not None:
            how = "still ran at the deadline" if late else f"its process ended with code {code}"
            self._write(self.running, {"failed": how})
            self.running = None
            code = LOST
        if code == LOST:
            return not late and not self.stopped and bool(self._rest())
        if code and not late and not self.stopped:
            self.stopped = f"the bench itself ended with code {code}"
        return False

    def _order(self, pipe: int) -> dict[str, Any]:
        task = self.task
        return {
            "pipe": pipe,
            "commands": task.commands,
            "folder": str(task.folder),
            "tiny": task.tiny,
            "only": task.only,
            "part": task.part,
            "leave": sorted(self.answered),
            "seconds": self.left,
        }

    def _take(self, message: Figures) -> None:
        if "plan" in message:
            self.plan = self.plan or message["plan"]
        elif "begin" in message:
            self.running = message["begin"]
        elif "stop" in message:
            self.stopped, self.running = message["stop"], None
        else:
            self.running = None
            self._write(message.pop("case"), message)

    def _rest(self) -> list[str]:
        return [name for name in self.plan if name not in self.answered]

    def _write(self, name: str, found: Figures) -> None:
        self.answered.add(name)
        at = round(60 * self.task.minutes - self.left, 1)
        with (self.task.folder / RESULTS).open("a") as file:
            file.write(json.dumps({"case": name, "at_s": at, **found}) + "\n")
        print(f"[{at:5.0f} s] {name:44} {shown(found)}", flush=True)


def _lines(reading: int, supervisor: Supervisor) -> Iterator[Figures | None]:
    """Yield the child's messages, and None at the deadline."""
    messages: queue.Queue[Figures | None] = queue.Queue()

    def read_all() -> None:
        with os.fdopen(reading) as lines:
            for line in lines:
                messages.put(json.loads(line))
        messages.put({})

    threading.Thread(target=read_all, daemon=True).start()
    while True:
        try:
            message = messages.get(timeout=max(0.0, supervisor.left))
        except queue.Empty:
            yield None
            return
        if not message:
            return
        yield message


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and its children: SIGABRT first, for a traceback, then SIGKILL."""
    for how, patience in ((signal.SIGABRT, _ABORT_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, how)
            process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # compilers and other remaining processes
    except ProcessLookupError:
        return


def read(folders: list[Path]) -> list[Figures]:
    """Return all rows of the folders, in order."""
    files = [folder / RESULTS for folder in folders if (folder / RESULTS).exists()]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def shown(found: Figures) -> str:
    """Format figures as one line, without tables and texts."""
    if "failed" in found or "skipped" in found:
        return f"failed: {found['failed']}" if "failed" in found else f"skipped: {found['skipped']}"
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if not isinstance(value, list | dict) and len(str(value)) < 60
    )
