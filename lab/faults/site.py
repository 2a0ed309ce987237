"""The service that faults are injected into: its processes, memory and readiness."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from triptych.loadtest.errors import ServerError

START_S = 120.0
STOP_S = 90.0
_POLL_S = 0.05
_ROOT = Path(__file__).parents[2]

SERVE = ("-m", "triptych.service.cli.main", "serve")
REDEPLOY = ("-m", "lab.faults.operator")


class Site:
    """Runs a service with all its processes, and ends them when the block is left."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        executable: str | Path = sys.executable,
        program: Sequence[str] = SERVE,
        ready_path: str = "/readyz",
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
        stderr: str = "",
        every_core: bool = False,
    ) -> None:
        """Starts `executable` with `program` and `arguments`, by default the service.

        `ready_path` answers 200 within `start_s` seconds. `stderr`: a device for the log; none: a file that is deleted
        at the end. Without `every_core` the service gets all cores but one, which the load generator needs: threads
        that wait for each other suffer most from sharing.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.unanswered = 0
        self._ready_path, self._start_s = ready_path, start_s
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRIPTYCH_", "RAY_"))}
        path = os.pathsep.join([str(_ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 (closed with the site)
        with open(stderr or self._log.name, "w") as log, nullcontext() if every_core else _cores():
            self.process = subprocess.Popen(
                [executable, *program, *arguments, "--port", str(port)],
                env={**kept, **(environment or {}), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def __enter__(self) -> Self:
        try:
            self.wait(self.ready, self._start_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Send SIGTERM, and kill processes that still run after a timeout."""
        below = self.processes()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *below]:
                send(pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait until `condition` holds and return the seconds; failed requests are counted in `unanswered`, except its
        own timeouts. Raises `ServerError` if it does not hold in time or the service ends."""
        began = time.monotonic()
        while not self._holds(condition):
            if not self.running or time.monotonic() - began > seconds:
                how = "did not come so far" if self.running else f"ended with {self.process.returncode}"
                raise ServerError(f"the service {how} within {seconds:g} s; its log ends\n{self._last_lines()}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def _holds(self, condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except httpx.ReadTimeout:  # requests wait while a replica starts
            return False
        except httpx.TransportError:
            self.unanswered += 1
            return False

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self._ready_path}", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of `triptych_NAME` with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = (line for line in text.splitlines() if line.startswith(f"triptych_{name}"))
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted))

    def processes(self) -> dict[int, str]:
        """Return pid and command line of all descendants of the service."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (parent := _parent(entry)) is not None:
                children.setdefault(parent, []).append(int(entry.name))
        found: dict[int, str] = {}
        todo = [self.process.pid]
        while todo:
            for pid in children.get(todo.pop(), []):
                found[pid] = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")
                todo.append(pid)
        return found

    def cpu_s(self, name: str = "") -> float:
        """Return the CPU seconds of its running processes whose command line contains `name`."""
        lines = {self.process.pid: "", **self.processes()}
        return sum(_cpu_s(pid) for pid, line in lines.items() if name in line)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Signal one process whose command line contains `name`; return its pid. Raises `ServerError` without one."""
        pid = next((pid for pid, line in self.processes().items() if name in line), None)
        if pid is None:
            raise ServerError(f"the service has no process {name}")
        send(pid, number)
        return pid

    def memory_mb(self) -> float:
        """Return the MiB of all its processes; shared pages are counted once."""
        texts = (_read(Path(f"/proc/{pid}/smaps_rollup")) for pid in [self.process.pid, *self.processes()])
        lines = (line for text in texts for line in text.splitlines() if line.startswith("Pss:"))
        return sum(int(line.split()[1]) for line in lines) / 1024

    def _last_lines(self) -> str:
        return "\n".join(self._log.read().splitlines()[-5:])


class ReadinessMonitor:
    """Requests /readyz repeatedly and records when it was not 200."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._end = threading.Event()
        self._seen: list[tuple[float, bool]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def ready_again_s(self, since: float) -> float | None:
        """Return the seconds from `since` to the first 200 after the last other reply; 0: no other. None: never."""
        seen = [(at, ready) for at, ready in self._seen if at >= since]
        if all(ready for _, ready in seen):
            return 0.0
        last = max(number for number, (_, ready) in enumerate(seen) if not ready)
        return seen[last + 1][0] - since if last + 1 < len(seen) else None

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            ready = self._site.ready()
            self._seen.append((time.monotonic(), ready))


@contextmanager
def _cores() -> Iterator[None]:
    """Restrict processes started inside the block to all cores but the last."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:-1] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _parent(entry: Path) -> int | None:
    stat = _read(entry / "stat")
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def _cpu_s(pid: int) -> float:
    stat = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
