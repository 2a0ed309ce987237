"""How pytest-xdist distributes the suite: by file, so that a file's fixtures are made once.

A test marked `alone` measures time or needs all cores: no other worker runs a test during it.
Files with such tests come last, and files with only such tests at the very end.
Files that start Ray come first, one after the other in one worker, because they take longest.
Without xdist nothing here does anything.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RAY = frozenset(
    {"tests/service/test_runtimes.py", "tests/service/test_lifetimes.py", "tests/service/test_deployment.py"}
)
EMBEDDED = frozenset(  # they share one service of the embedded models
    {
        *("tests/service/test_embedded.py", "tests/service/test_assistant.py", "tests/service/test_examples_run.py"),
        *("tests/loadtest/test_service.py", "tests/test_examples.py", "tests/deploy/test_monitoring.py"),
    }
)
_LONG = EMBEDDED | frozenset(  # of single tests or fixtures that take long: begun late they would be waited for
    {"tests/lab/test_gpu_bench.py", "tests/engine/test_process_transport.py", "tests/service/test_openapi.py"}
)
_CHECKPOINTS = "CHECKPOINTS_OF_TRIPTYCH_TESTS"
_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ


class Turns:
    """Readers and writers across all workers, with locks on two existing files.

    A worker that waits for the room holds the gate, so that later workers cannot keep it waiting.
    """

    def __init__(self) -> None:
        here = Path(__file__)
        self._gate, self._room = (path.open("rb") for path in (here, here.with_name("conftest.py")))
        self._alone = False  # the room is held by this worker alone

    def begin(self, *, alone: bool) -> None:
        if self._alone and alone:
            return
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        self._alone = alone

    def end(self, *, next_alone: bool) -> None:
        """Keep the room if the next test runs alone too."""
        if not (self._alone and next_alone):
            fcntl.flock(self._room, fcntl.LOCK_UN)
            self._alone = False


_turns = Turns()


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of a run one folder of tiny checkpoints; the first process that needs one writes it."""
    if _CHECKPOINTS not in os.environ:
        os.environ[_CHECKPOINTS] = tempfile.mkdtemp(prefix="triptych-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_CHECKPOINTS), ignore_errors=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    if not _PARALLEL:
        return (yield)
    _turns.begin(alone=_is_alone(item))
    try:
        return (yield)
    finally:
        _turns.end(next_alone=nextitem is not None and _is_alone(nextitem))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _PARALLEL:
        alone, shared = ({_file(item.nodeid) for item in items if _is_alone(item) is is_} for is_ in (True, False))
        items.sort(key=lambda item: _rank(_file(item.nodeid), alone, shared))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        """By file, in collection order; files that start Ray stay together, and those of the embedded models."""

        def _split_scope(self, nodeid: str) -> str:
            file = _file(nodeid)
            return "Ray" if file in RAY else "embedded models" if file in EMBEDDED else file

    return Files(config, log)


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _rank(file: str, alone: set[str], shared: set[str]) -> int:
    """Return a file's place in the order; `alone` and `shared` are the files with such tests."""
    if file in alone:
        return 3 if file in shared else 4
    return 0 if file in RAY else 1 if file in _LONG else 2
