"""Running of the suite in several processes: `pytest --workers 3`.

The tests are collected once. Then the workers are forked: each has all collected tests and imported packages at once.
A worker gets a file at a time, so that a file's fixtures are made once.

Some tests measure time: they run after the others. Of those marked `quiet`, which mostly wait, two run at the same
time. One marked `alone` needs all cores: it runs when no other worker is left.
A worker that dies fails the test that it ran, and a new worker runs the rest of the file. A test that takes longer than
`LONGEST` is ended in the same way. Processes that a worker or an interrupted run has left are killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

LONGEST = 600.0  # seconds
_FAREWELL = 60.0  # seconds in which an interrupted worker ends its fixtures
_MOST = {"quiet": 2, "alone": 1}  # how many workers run tests with this marker at the same time
_ANY = 1_000
SHARED = "embedded_service"  # a fixture of the session that is too dear for two workers: its files share one
_FIRST = {  # files that run in one worker one after the other; what takes longest begins first
    "Ray": (
        *("tests/service/test_runtimes.py", "tests/service/test_lifetimes.py", "tests/service/test_deployment.py"),
    ),
    SHARED: (),
    "bench": ("tests/lab/test_gpu_bench.py",),
    "transport": ("tests/engine/test_process_transport.py",),
    "schemathesis": ("tests/service/test_openapi.py",),
    "whisper": ("tests/service/test_whisper.py",),
}
_GROUP = {file: group for group, files in _FIRST.items() for file in files}
_CHECKPOINTS = "CHECKPOINTS_OF_TRIPTYCH_TESTS"
_STARTED_BY = "STARTED_BY_TRIPTYCH_TESTS"  # in the environment of each process that a worker starts
VARIABLES = (_CHECKPOINTS, _STARTED_BY)
_PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in this number of forked processes")


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of a run one folder of tiny checkpoints; the first process that needs one writes it."""
    if _CHECKPOINTS not in os.environ:
        os.environ[_CHECKPOINTS] = tempfile.mkdtemp(prefix="triptych-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_CHECKPOINTS), ignore_errors=True))
    if _STARTED_BY not in os.environ:
        os.environ[_STARTED_BY] = str(os.getpid())
        config.add_cleanup(lambda: _kill_left(os.environ.pop(_STARTED_BY)))
    for asked in (signal.SIGINT, signal.SIGTERM):  # a shell's background processes ignore the first
        signal.signal(asked, signal.default_int_handler)  # so that fixtures end what they started


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--workers")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    _Run(session).run(count)
    return True


class _Unit:
    """Tests for one worker, as places in `session.items`; `most` workers run units of its kind at the same time."""

    def __init__(self, places: list[int], most: int) -> None:
        self.places = places
        self.most = most


def _units(items: list[pytest.Item]) -> deque[_Unit]:
    """Return the units in the order in which they begin; those that run alone come last."""
    found: dict[tuple[int, str], list[int]] = {(_ANY, group): [] for group in _FIRST}
    sharing = {_file(item) for item in items if SHARED in item.fixturenames}  # type: ignore[attr-defined]
    for place, item in enumerate(items):
        file = _file(item)
        most = min((most for name, most in _MOST.items() if item.get_closest_marker(name)), default=_ANY)
        found.setdefault((most, SHARED if file in sharing else _GROUP.get(file, file)), []).append(place)
    units = [_Unit(places, most) for (most, _), places in found.items() if places]
    return deque(sorted(units, key=lambda unit: -unit.most))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class _Worker:
    """A forked process, as the process that collected sees it."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.mark = f"{os.environ[_STARTED_BY]}.{number}"
        self.unit: _Unit | None = None
        self.place: int | None = None  # of the test that it runs
        self.limit = 0.0  # when that takes too long
        self.is_aborted = False
        self.pid = os.fork()
        if self.pid == 0:
            _work(session, theirs, number, self.mark)
        theirs.close()
        self.death = os.pidfd_open(self.pid)

    def give(self, unit: _Unit | None) -> None:
        """Let it run `unit`; None lets it end."""
        self.unit = unit
        with suppress(OSError):  # it died meanwhile
            self.connection.send(unit and unit.places)

    def messages(self) -> list[Any]:
        found = []
        with suppress(EOFError, OSError):
            while self.connection.poll():
                found.append(self.connection.recv())
        return found

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_dead(self, seconds: float) -> bool:
        return bool(wait([self.death], seconds))

    def bury(self) -> str:
        """Kill what it left; returns how it ended, "" if well."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.death)
        self.connection.close()
        _kill_left(self.mark)
        code = os.waitstatus_to_exitcode(status)
        return "" if code == 0 else f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


class _Run:
    """Distributes the tests and hands on the workers' reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        self._todo = _units(session.items)
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []  # they wait until no others run, or run something of another kind
        self._started = 0
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # before it is inherited

    def run(self, count: int) -> None:
        try:
            for _ in range(min(count, len(self._todo))):
                self._next(self._start())
            while self._workers:
                self._step()
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._interrupt()

    def _start(self) -> _Worker:
        worker = _Worker(self._session, self._started)
        self._started += 1
        self._workers.append(worker)
        return worker

    def _step(self) -> None:
        """Handle what the workers sent until now; wait if nothing."""
        wait([one for worker in self._workers for one in (worker.connection, worker.death)], 1.0)
        for worker in list(self._workers):
            is_dead = worker.is_dead(0)  # asked first: then no message can follow
            for kind, content in worker.messages():
                self._handle(worker, kind, content)
            if is_dead:
                self._ended(worker)
            elif worker.place is not None and time.monotonic() > worker.limit:
                # The first signal writes all stacks to stderr (faulthandler).
                worker.signal(signal.SIGKILL if worker.is_aborted else signal.SIGABRT)
                worker.is_aborted, worker.limit = True, time.monotonic() + 10

    def _handle(self, worker: _Worker, kind: str, content: Any) -> None:
        if kind == "begins":
            worker.place, worker.limit = content, time.monotonic() + LONGEST
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=content)
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, category, file, line, when, nodeid, location = content
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
            warned = dict(warning_message=message, when=when, nodeid=nodeid, location=location)
            self._hook.pytest_warning_recorded.call_historic(kwargs=warned)
        elif kind == "error":
            self._fail(f"worker {worker.mark}", ("", None, ""), content)
        elif kind == "ended":
            worker.place = None
            assert worker.unit is not None
            worker.unit.places.remove(content)
            if not worker.unit.places:
                self._next(worker)

    def _next(self, worker: _Worker) -> None:
        """Give it the next unit as soon as that may begin."""
        worker.unit = None
        self._idle.append(worker)
        self._distribute()

    def _distribute(self) -> None:
        """Give units to idle workers, or end those that are too many for the units that come next."""
        while self._idle:
            busy = [worker.unit.most for worker in self._workers if worker.unit is not None]
            most = self._todo[0].most if self._todo else 0
            if self._todo and len(self._workers) <= most and all(kind == most for kind in busy):
                self._idle.pop(0).give(self._todo.popleft())
            elif len(self._idle) > most - busy.count(most):
                self._idle.pop().give(None)
            else:
                break

    def _ended(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        how = worker.bury()
        if worker.unit is not None and worker.unit.places:
            place = worker.unit.places.pop(0)
            item = self._session.items[place]
            self._fail(item.nodeid, item.location, f"the worker process {how or 'exited'} during this test")
            if worker.unit.places:
                self._start().give(worker.unit)
            elif self._todo:
                self._next(self._start())
        elif how:
            self._fail(f"worker {worker.mark}", ("", None, ""), f"the worker process {how} after its last test")
        self._distribute()

    def _fail(self, nodeid: str, location: tuple[str, int | None, str], why: str) -> None:
        report = pytest.TestReport(nodeid, location, {}, "failed", why, "call")
        self._hook.pytest_runtest_logreport(report=report)

    def _interrupt(self) -> None:
        """End all workers; their fixtures end what they started."""
        for worker in self._workers:
            worker.signal(signal.SIGINT)
        end = time.monotonic() + _FAREWELL
        for worker in self._workers:
            with suppress(KeyboardInterrupt):  # asked again: not that patiently
                while not worker.is_dead(0.1) and time.monotonic() < end:
                    worker.messages()
            worker.signal(signal.SIGKILL)
            worker.bury()


def _kill_left(mark: str) -> None:
    """Kill all processes whose environment says that they were started by this run or worker."""
    ours = f"{_STARTED_BY}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            found = [one for one in (entry / "environ").read_bytes().split(b"\0") if one.startswith(ours)]
            if found and found[0][len(ours) :][:1] in (b"", b"."):
                os.kill(int(entry.name), signal.SIGKILL)


class _Nothing:
    """Stands for the next test of another file, which shares only the session's fixtures."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


class _Sender:
    """The plugin of a worker that sends what the terminal would show."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._is_registered = False
        config.pluginmanager.register(self)  # which repeats all warnings until now
        self._is_registered = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        one = warning_message
        shown = (str(one.message), one.category.__name__, one.filename, one.lineno, when, nodeid, location)
        if self._is_registered:
            self._connection.send(("warning", shown))


def _work(session: pytest.Session, connection: Connection, number: int, mark: str) -> NoReturn:
    """Run units until there is none."""
    status = 1
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for asked in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asked, _end_once)
        os.environ[_STARTED_BY] = mark
        _separate(session.config, number)
        _Sender(session.config, connection)
        with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
            while parent == os.getppid() and (places := connection.recv()) is not None:
                _run_unit(session, places, connection)
        session._setupstate.teardown_exact(None)
        status = 0
    except BaseException:
        with suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(status)


def _end_once(*_: Any) -> NoReturn:
    """Interrupt the test; from now on nothing interrupts the ends of its fixtures."""
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run_unit(session: pytest.Session, places: list[int], connection: Connection) -> None:
    following = [*(session.items[place] for place in places[1:]), _Nothing(session)]
    for place, nextitem in zip(places, following, strict=True):
        connection.send(("begins", place))
        session.config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=nextitem)
        connection.send(("ended", place))


def _separate(config: Any, number: int) -> None:
    """Give this fork temporary files of its own and a terminal that shows nothing."""
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are open in the other forks too, at the same place
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
