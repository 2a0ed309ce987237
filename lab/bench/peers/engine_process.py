"""A process that runs one engine with one model: it reads tasks as JSON lines on stdin and writes answers to stdout.

With a process for each engine, thread pools and memory are separate, and engines can take turns on the same work. An
answer with `unable` has the reason of a failure; a process that ended or timed out gives the same answer to later
tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.bench.batches import Scale, workloads
from lab.bench.busy import CpuClock
from triptych.model.api.engine_config import EngineConfig
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.system.child_process import engine_environment

ANSWER_TIMEOUT_S = 1200.0
_ROOT = Path(__file__).parents[3]
_CACHE_GB = 3  # as ours
_EXIT_TIMEOUT_S = 10.0  # after the end of its input


class EngineProcess:
    """Starts such a process and sends tasks to it."""

    def __init__(self, engine: str, path: Path, settings: dict[str, Any], patience: float = ANSWER_TIMEOUT_S) -> None:
        arguments = json.dumps({"engine": engine, "path": str(path), "settings": settings})
        self._patience = patience
        self._late = False
        python, variables = _interpreter(engine)
        self._process = subprocess.Popen(
            [python, "-m", "lab.bench.peers.engine_process", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=engine_environment() | variables,  # long spinning of threads would slow peers more
        )
        self.info = self._read()

    def ask(self, **task: Any) -> dict[str, Any]:
        """Send a task and return the answer, which may be `{"unable": REASON}`."""
        assert self._process.stdin is not None
        if "unable" in self.info:
            return self.info
        try:
            print(json.dumps(task), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return self._ended()
        return self._read()

    def close(self) -> None:
        """End the process, by killing it if necessary."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience, self._give_up)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # peers print other lines too
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            timer.cancel()
        return self._ended()

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _ended(self) -> dict[str, Any]:
        code = self._process.wait()
        self.info = {"unable": f"no answer in {self._patience:g} s" if self._late else f"ended with code {code}"}
        return self.info


def _interpreter(engine: str) -> tuple[Path, dict[str, str]]:
    """Return the Python that runs an engine, whose environment is made if missing, and its variables."""
    from lab.bench.peers import PEERS

    own = PEERS[engine].environment if engine in PEERS else None
    if own is None:
        return Path(sys.executable), {}
    from lab.bench.peers.environments import made
    from lab.bench.peers.vllm_engine import variables

    environment = made(own)
    here = {"PYTHONPATH": str(_ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # else other processes would be at work
    return environment / "bin" / "python", variables(environment, _CACHE_GB) | here


def main() -> None:
    started = json.loads(sys.argv[1])
    path, settings = Path(started["path"]), started["settings"]
    # Libraries print to stdout from C too, so answers use a descriptor that only this module has.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(data: dict[str, Any]) -> None:
        print(json.dumps(data), file=answers, flush=True)

    try:
        engine = _engine(started["engine"], path, settings)
    except Exception as error:
        answer(_unable(error))
        return
    answer(getattr(engine, "info", {}))
    serve(engine, read_checkpoint(path).config.embedding.vocab_size, sys.stdin, answer)


def serve(engine: Any, vocab_size: int, lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer each task; an exception of the engine becomes an answer, and the next task is run."""
    for line in lines:
        task = json.loads(line)
        began = CpuClock.now()
        try:
            if "step" in task:
                found = {"seconds": engine.step_seconds(**task["step"])}
            elif "embed" in task:
                found = {"vectors": engine.embed([tuple(ids) for ids in task["embed"]])}
            else:
                found = asdict(
                    engine.run(workloads(task["form"], vocab_size, Scale(**task["scale"]))[task["workload"]])
                )
        except Exception as error:
            answer(_unable(error))
            continue
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer({**found, "foreign_cores": CpuClock.now().foreign_cores(began), "peak_bytes": peak})


def _unable(error: Exception) -> dict[str, Any]:
    from lab.bench.peers import Unsupported

    if isinstance(error, Unsupported):
        return {"unable": str(error)}
    traceback.print_exception(error)
    first_line = next(iter(str(error).strip().splitlines()), "")
    return {"unable": f"{type(error).__name__}: {first_line}"[:120]}


def _engine(name: str, path: Path, settings: dict[str, Any]) -> Any:
    if name == "triptych":
        from lab.bench.ours import Ours

        return Ours(path, EngineConfig(**settings))
    from lab.bench.peers import load

    return load(name, path, settings)


if __name__ == "__main__":
    main()
