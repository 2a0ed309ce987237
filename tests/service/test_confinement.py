"""Hostile code in a worker of the sandbox: what it can reach, with what the kernel has and without it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from jinja2 import filters

from tests.service.hostile_worker import KERNEL_ALONE
from tests.service.support import ask, make_app
from triptych.service.chat.render_pool import RenderWorker
from triptych.service.cli.main import main
from triptych.service.lifecycle.state import logger as state_logger
from triptych.service.sandbox import confinement
from triptych.service.sandbox.process_pool import ForkingWorker, Worker, WorkerError

MODULE, UNPRIVILEGED = "tests.service.hostile_worker", "65534"
KINDS = {"lasting": Worker, "forking": ForkingWorker}
needs_all = pytest.mark.skipif(bool(confinement.support().missing), reason="this kernel has no Landlock or no seccomp")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def worker(kind: str) -> Iterator[Worker]:
    with closing(KINDS[kind](2.0, MODULE, kind, "0")) as worker:
        yield worker


@needs_all
@pytest.mark.parametrize("user", ["0", UNPRIVILEGED])
def test_hostile_code_reaches_nothing(kind: str, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEYS", "canary")
    with closing(KINDS[kind](5.0, MODULE, kind, user)) as worker:
        found = worker.ask({"front": os.getpid()})
        assert found == {"open": [], "descriptors": [0, 1, 2], "environment": []}


def test_without_help_of_the_kernel_it_still_opens_nothing(kind: str) -> None:
    with closing(KINDS[kind](5.0, MODULE, kind, UNPRIVILEGED, "none")) as worker:
        found = worker.ask({"front": os.getpid()})
        assert set(found["open"]) <= KERNEL_ALONE and found["descriptors"] == [0, 1, 2]


def test_what_a_worker_says_unasked_is_nobodys_reply(worker: Worker) -> None:
    for _ in range(2):
        worker.ask({"front": 1, "write": True})
        time.sleep(0.05)
        assert "open" in worker.ask({"front": 1})


@pytest.mark.parametrize("way", ["huge", "garbage", "stay"])
def test_a_reply_that_is_none_costs_its_own_request_alone(worker: Worker, way: str) -> None:
    with pytest.raises(WorkerError) as caught:
        worker.ask({"front": 1, way: True})
    assert caught.value.kind == ("time" if way == "stay" else "crashed")
    assert "open" in worker.ask({"front": 1})


def test_a_process_that_hides_is_closed_to_its_own_user() -> None:
    code = """
import os, sys
from triptych.service.sandbox import confinement
if os.geteuid() == 0:  # root may read everything
    os.setresuid(65534, 65534, 65534)
    confinement._prctl(confinement._DUMPABLE, 1)  # which changing the user has ended
if sys.argv[1] == "hide":
    confinement.hide_process()
read, write = os.pipe()
if os.fork() == 0:
    for name in ("environ", "mem", "fd/0"):
        try:
            print(name, os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY) > 0, flush=True)
        except PermissionError:
            print(name, False, flush=True)
    os._exit(0)
os.wait()
"""
    for mode, is_open in (("show", True), ("hide", False)):
        command = [sys.executable, "-c", code, mode]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        assert done.stdout.split() == ["environ", str(is_open), "mem", str(is_open), "fd/0", str(is_open)], done.stderr


def test_filters_refuse_what_they_do_not_list() -> None:
    for machine in ("x86_64", "aarch64"):
        program = confinement.filter_program(machine)
        steps = [program[place : place + 8] for place in range(0, len(program), 8)]
        allow = len(steps) - 1
        jumps = [(place, step[2]) for place, step in enumerate(steps) if step[0] == 0x15][1:]
        assert len(jumps) > 35 and all(place + 1 + jump == allow for place, jump in jumps)


def test_every_filter_of_templates_works_confined() -> None:
    given = {"batch": "(2)", "slice": "(2)", "replace": "('a','b')", "attr": "('a')", "groupby": "(0)"}
    values = ("'a b http://x.de <b>\\n'", "[3, 1]", "{'a': 1}", "1.5", "['ab']")
    ended: dict[str, set[str]] = {}
    with closing(RenderWorker(5.0)) as worker:
        for name in filters.FILTERS:
            for value in values:
                try:
                    worker.render(f"{{{{ {value} | {name}{given.get(name, '')} }}}}", {}, 10_000)
                except WorkerError as error:
                    ended.setdefault(str(error), set()).add(name)
        assert worker.render("{{ strftime_now('%Y') }}", {}, 100) == time.strftime("%Y")
    missing = {"ModuleNotFoundError", "ImportError", "LookupError", "OSError", "PermissionError"}
    assert not missing & ended.keys(), ended


def test_the_service_says_what_confines_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    found = confinement.support()
    assert ask(app, "GET", "/info").json()["confinement"] == {"landlock": found.landlock, "seccomp": found.seccomp}
    app = make_app()
    app.service.confinement = confinement.Support(0, False)
    caplog.set_level("WARNING", state_logger.name)
    ask(app, "GET", "/info")
    assert "processed without Landlock and seccomp" in caplog.text


def test_keys_leave_the_environment_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEYS", "canary")
    monkeypatch.setenv("TRIPTYCH_ADMIN_KEYS", "other")
    with pytest.raises(SystemExit):
        main(["serve", "/nowhere"])
    assert not {"TRIPTYCH_API_KEYS", "TRIPTYCH_ADMIN_KEYS"} & os.environ.keys()
