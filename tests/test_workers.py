"""Running of tests in forked workers: what a crash, a hang, an interrupt and a test that runs alone do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from tests import workers
from tests.service.processes import ROOT, eventually

TESTS = """
    import os, subprocess, sys, time, warnings
    from pathlib import Path
    import pytest

    HERE = Path(__file__).parent
    FILE = Path(__file__).stem

    def note(what):
        with (HERE / "notes").open("a") as file:
            file.write(f"{what}\\n")

    @pytest.fixture(scope="module")
    def of_module():
        note(f"{FILE} begins")
        yield
        note(f"{FILE} ends")

    @pytest.fixture(scope="session")
    def of_session():
        yield
        note("session ends")

    @pytest.fixture
    def child():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        (HERE / "child").write_text(str(process.pid))
        yield process
        process.kill()
        process.wait()
        note("child ended")
"""
PASSES = """
    @pytest.mark.parametrize("number", range(3))
    def test_passes(number, of_module, of_session):
        print("this is shown for a failure only")

    def test_warns():
        warnings.warn("look here")
"""
FAILS = """
    def test_fails(tmp_path):
        print("this is shown")
        assert tmp_path.parent.name == "none"
"""
CRASHES = """
    def test_crashes(of_module, child):
        os.abort()
"""
HANGS = """
    def test_hangs(child):
        time.sleep(1000)
"""
ALONE = """
    @pytest.mark.alone
    def test_alone():
        note(f"{FILE} alone")
        time.sleep(0.2)
        note(f"{FILE} not alone")
"""


QUIET = """
    @pytest.mark.quiet
    def test_quiet():
        note("quiet begins")
        end = time.monotonic() + 10
        while (HERE / "notes").read_text().count("quiet begins") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        note("quiet ends")
"""


def start(folder: Path, files: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start pytest with two workers on `files`, without the plugins and settings of this suite."""
    for name, tests in files.items():
        (folder / f"test_{name}.py").write_text("\n".join(line[4:] for line in (TESTS + tests).splitlines()))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone\n  quiet\n")
    environment = {name: value for name, value in os.environ.items() if name not in workers.VARIABLES}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.workers", "--workers", "2", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    started = start(folder, files, *arguments)
    output, _ = started.communicate(timeout=60)
    return started.returncode, output


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_output_and_warnings_are_those_of_one_process(tmp_path: Path) -> None:
    code, output = finished(tmp_path, {"a": PASSES, "b": PASSES + FAILS})
    assert code == 1 and "1 failed, 8 passed, 2 warnings" in output, output
    assert output.count("this is shown\n") == 1 and "for a failure only" not in output
    assert output.count("UserWarning: look here") == 2
    for file in ("test_a", "test_b"):
        assert notes(tmp_path).count(f"{file} begins") == notes(tmp_path).count(f"{file} ends") == 1
    assert 1 <= notes(tmp_path).count("session ends") <= 2  # one worker can have done both files


def test_a_crash_fails_its_test_and_the_rest_runs(tmp_path: Path) -> None:
    code, output = finished(tmp_path, {"a": CRASHES + PASSES, "b": PASSES})
    assert code == 1 and "1 failed, 8 passed" in output, output
    assert "FAILED test_a.py::test_crashes" in output and "died of SIGABRT during this test\n" in output
    assert not is_running(int((tmp_path / "child").read_text()))


def test_a_test_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import tests.workers\ntests.workers.LONGEST = 0.5\n")
    code, output = finished(tmp_path, {"a": HANGS + PASSES})
    assert code == 1 and "1 failed, 4 passed" in output, output
    assert "in test_hangs" in output  # where it was
    assert not is_running(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_fixtures_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    started = start(tmp_path, {"a": HANGS})
    eventually(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    started.send_signal(number)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 2 and "KeyboardInterrupt" in output, output
    assert notes(tmp_path) == ["child ended"]
    assert not is_running(int((tmp_path / "child").read_text()))


def test_workers_of_a_run_that_is_killed_end(tmp_path: Path) -> None:
    started = start(tmp_path, {"a": HANGS})
    eventually(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    started.kill()
    started.communicate(timeout=60)  # until the workers have closed the output
    assert notes(tmp_path) == ["child ended"]


def test_tests_marked_alone_come_last_one_by_one(tmp_path: Path) -> None:
    code, output = finished(tmp_path, {"a": ALONE + PASSES, "b": ALONE, "c": PASSES})
    assert code == 0 and "10 passed" in output, output
    assert notes(tmp_path)[-5:-1] == ["test_a alone", "test_a not alone", "test_b alone", "test_b not alone"]


def test_two_tests_marked_quiet_run_at_the_same_time(tmp_path: Path) -> None:
    code, output = finished(tmp_path, {"a": ALONE + QUIET, "b": QUIET, "c": QUIET + PASSES}, "--workers", "3")
    assert code == 0 and "8 passed" in output, output
    said = [note for note in notes(tmp_path) if note != "session ends"]
    assert said[2:4] == ["quiet begins"] * 2
    assert said[-3:] == ["quiet ends", "test_a alone", "test_a not alone"]
    running = accumulate(1 if note == "quiet begins" else -1 for note in said if note.startswith("quiet"))
    assert max(running) == 2


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    code, output = finished(tmp_path, {"a": FAILS, "b": HANGS}, "-x")
    assert code == 1 and "1 failed" in output and "stopping after 1 failures" in output, output
