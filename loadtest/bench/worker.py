"""One engine with one model in a process of its own: tasks come as JSON lines on stdin, answers leave on stdout.

A process an engine keeps thread pools and memory apart, so that peers can take turns on the same work.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.bench.workloads import Scale, workloads
from model.checkpoint import read_checkpoint
from model.engine.config import EngineConfig
from model.engine.sockets import engine_environment


class Worker:
    """The benchmark's end of such a process."""

    def __init__(self, engine: str, path: Path, settings: dict[str, Any]) -> None:
        arguments = json.dumps({"engine": engine, "path": str(path), "settings": settings})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.bench.worker", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=engine_environment() if engine == "triptych" else None,
        )
        self.info = self._read()

    def ask(self, **task: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # peers print other things too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the benchmark's worker ended with code {self._process.wait()}")


def main() -> None:
    started = json.loads(sys.argv[1])
    path, settings = Path(started["path"]), started["settings"]
    vocab = read_checkpoint(path).config.embedding.vocab_size
    engine = _engine(started["engine"], path, settings)
    _answer(getattr(engine, "info", {}))
    for line in sys.stdin:
        task = json.loads(line)
        if "step" in task:
            _answer({"seconds": engine.step_seconds(**task["step"])})
            continue
        workload = workloads(task["form"], vocab, Scale(**task["scale"]))[task["workload"]]
        result = asdict(engine.run(workload))
        _answer({**result, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})


def _engine(name: str, path: Path, settings: dict[str, Any]) -> Any:
    if name == "triptych":
        from loadtest.bench.ours import Ours

        return Ours(path, EngineConfig(**settings))
    from loadtest.bench.peers import PEERS

    return PEERS[name](path, settings)


def _answer(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


if __name__ == "__main__":
    main()
