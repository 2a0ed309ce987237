"""Helpers that run `triptych serve` as a process and examine its descendants."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.service.in_image import IMAGE, ImageCommand

ROOT = Path(__file__).parents[2]
START_SECONDS = 240
PATIENCE = 60.0  # enough on a busy machine for what takes a moment on an idle one
_LISTEN = "0A"  # as in /proc/net/tcp


def eventually(
    condition: Callable[[], bool], seconds: float = PATIENCE, *, output: Callable[[], str] = lambda: ""
) -> None:
    """Wait until `condition` holds; fails after `seconds`, with what `output` then says."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come about in {seconds} s\n{output()}"
        time.sleep(0.05)


class ServiceProcess:
    """A started `triptych serve`; `url` is known once it is ready."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path = ROOT,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Start it in `folder`, with the import path of the installed `triptych` and more environment variables."""
        in_image = IMAGE and python == sys.executable
        self._in_image = ImageCommand(arguments, folder, variables or {}) if in_image else None
        command = [python, "-P", "-m", "triptych.service.cli.main", "serve", "--port", "0", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRIPTYCH_", "RAY_"))}
        environment |= variables or {}
        self._process = subprocess.Popen(
            self._in_image.line if self._in_image else command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        def banner() -> bool:
            assert self._process.poll() is None, self.output
            return "ready in" in self.output

        eventually(banner, START_SECONDS, output=lambda: self.output)
        found = re.search(r"on (http://\S+)", self.output)
        assert found is not None, self.output
        self.url = found[1]

    @property
    def pid(self) -> int:
        return self._in_image.pid() if self._in_image else self._process.pid

    def signal(self, number: signal.Signals) -> None:
        if self._in_image:
            os.kill(self.pid, number)
        else:
            self._process.send_signal(number)

    def wait(self, seconds: float = 120) -> int:
        """Return the exit code."""
        code = self._process.wait(seconds)
        self._reader.join(60)
        return code

    def stop(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                for pid in [self.pid, *self.descendants()]:
                    _kill(pid)
                raise

    def descendants(self) -> dict[int, str]:
        """Return pid and command line of each descendant."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (parent := _parent(entry)) is not None:
                children.setdefault(parent, []).append(int(entry.name))
        found, todo = {}, [self.pid]
        while todo:
            for pid in children.get(todo.pop(), []):
                found[pid] = _command_line(pid)
                todo.append(pid)
        return found

    def listeners(self) -> list[tuple[str, int, int]]:
        """Return (address, port, pid) of each TCP socket on which it or a descendant listens; "" is any address."""
        inodes = {inode: pid for pid in [self.pid, *self.descendants()] for inode in _sockets(pid)}
        return [(address, port, inodes[inode]) for address, port, inode in _listening() if inode in inodes]

    def engine_pids(self) -> list[int]:
        """Return the processes of the engines, one for each replica."""
        return [pid for pid, line in self.descendants().items() if "-m triptych.model.engine " in line]

    def engine_pid(self) -> int:
        """Return the process of the engines; there must be exactly one."""
        (pid,) = self.engine_pids()
        return pid

    def visible_gpus(self) -> list[str | None]:
        """Return each engine's CUDA_VISIBLE_DEVICES, sorted; None if it is not set."""
        environments = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in self.engine_pids()]
        found = [dict(one.split("=", 1) for one in lines if "=" in one) for lines in environments]
        return sorted((one.get("CUDA_VISIBLE_DEVICES") for one in found), key=str)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the engine for the block, so that running requests do not end meanwhile."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def strange_folder(folder: Path) -> Path:
    """Return `folder` with modules like those in models' folders; they record that they were imported."""
    for name in ("model", "service", "json", "torch", "ray", "msgspec"):
        noted = f"open({str(folder / 'imported')!r}, 'a').write(__name__)"
        (folder / f"{name}.py").write_text(f"{noted}; raise SystemExit(9)")
    return folder


@contextmanager
def running(
    arguments: Sequence[str],
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[ServiceProcess]:
    """Yield a service that is ready; it is stopped at the end if it still runs."""
    service = ServiceProcess(arguments, folder, variables, python)
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


def _listening() -> Iterator[tuple[str, int, str]]:
    """Return address, port and inode of every listening TCP socket of this machine."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN:
                hexadecimal, _, port = fields[1].rpartition(":")
                words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
                address = ipaddress.ip_address(b"".join(words))
                mapped = getattr(address, "ipv4_mapped", None) or address
                yield "" if mapped.is_unspecified else str(mapped), int(port, 16), fields[9]


def _sockets(pid: int) -> Iterator[str]:
    """Return the inodes of its sockets."""
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            kind, _, inode = os.readlink(descriptor).partition(":")
            if kind == "socket":
                yield inode.strip("[]")
    except OSError:
        return


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
