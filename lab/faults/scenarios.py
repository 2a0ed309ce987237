"""The scenarios: a fault each, and the endings of requests that are allowed with it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from lab.faults import hostile
from lab.faults.batch import KILLS, BatchUnderFaults, killed_at_random
from lab.faults.load import Stages
from lab.faults.outcomes import Ending
from lab.faults.site import REDEPLOY, SERVE, STOP_S, Site

LOAD_S = 20.0
_JUMP_S = 3600
_WAIT_S = 60.0
_SURGE_S = 50.0  # of load: the replica stops only after its successor has loaded
_HANGING_S = 90.0  # of load: Serve checks health three times with a timeout of ten seconds, then drains the replica

Inject = Callable[[Site, str], str]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Describes a fault. `inject` causes it at a service, waits until it is over, and returns a remark."""

    name: str
    inject: Inject
    runtime: str
    arguments: tuple[str, ...] = ()  # more arguments of `triptych serve`
    program: tuple[str, ...] = SERVE
    environment: Mapping[str, str] = field(default_factory=dict)
    stderr: str = ""
    allowed: frozenset[Ending] = frozenset()  # endings that are allowed, in addition to complete
    stages: Stages = ((0.7, LOAD_S),)  # shares of the capacity, seconds
    after_s: float = 5.0  # of load
    fatal: bool = False  # the service ends

    @property
    def site(self) -> tuple[object, ...]:
        """The arguments that the service starts with; scenarios with equal ones share a service."""
        environment = tuple(self.environment.items())
        return (self.runtime, self.arguments, self.program, environment, self.stderr)


def all_of(folder: Path, clock_library: str) -> list[Scenario]:
    """Return all scenarios; `folder` is for files, `clock_library` is libfaketime, without which no clock jumps."""
    found = []
    for runtime in ("local", "ray"):
        found += _hostile(runtime)
        hangs, quick = _sending(_HALT, _ENGINE), ("--stall-timeout", "5")
        found.append(Scenario("engine hangs (stall_timeout 5)", hangs, runtime, quick, allowed=_FAILURES))
        found.append(Scenario("engine killed", _sending(_KILL, _ENGINE), runtime, allowed=_FAILURES))
        found.append(_batch(f"a batch, its engine ended {KILLS} times", _ENGINE, runtime, folder))
        if runtime == "ray":
            name = f"a batch, its replica ended {KILLS} times, of 2"
            found += [*_of_ray(), _batch(name, "ServeReplica", runtime, folder, "--replicas", "2")]
        found.append(Scenario("log on a full disk", _nothing, runtime, stderr="/dev/full"))
        if clock_library and runtime == "local":  # Ray does not start with this library
            found.append(_clock(folder / "clock", clock_library))
        drained = frozenset({Ending.UNAVAILABLE, Ending.REFUSED})
        found.append(Scenario("SIGTERM", _terminate, runtime, allowed=drained, fatal=True))
    return found


_KILL, _HALT = signal.SIGKILL, signal.SIGSTOP
_ENGINE = "-m triptych.model.engine "
_BEGUN = frozenset({Ending.ERROR_EVENT})  # only streams that had begun: another replica answers the others
_FAILURES = frozenset({Ending.ERROR_EVENT, Ending.UNAVAILABLE})
_CUTS = frozenset({Ending.CUT, Ending.RESET, Ending.UNAVAILABLE})
# Requests that waited for the only replica arrive at once, and may overflow its queue.
_CROWD = frozenset({Ending.BUSY})


def _hostile(runtime: str) -> list[Scenario]:
    never = "a client that never reads (stream_stall_s 15)"
    clients: tuple[tuple[str, Inject, float], ...] = (
        ("2,000 idle connections", lambda site, _: hostile.stay_idle(site), LOAD_S),
        ("20 MB of headers", lambda site, _: hostile.send_large_headers(site), LOAD_S),
        ("headers that never end (receive_s 15)", lambda site, _: hostile.never_end_headers(site), hostile.PATIENCE_S),
        ("bodies that dribble (receive_s 15)", lambda site, _: hostile.dribble_body(site), hostile.PATIENCE_S),
    )
    quick = ("--receive-s", "15", "--stream-stall-s", "15")
    rest = [Scenario(name, inject, runtime, quick, stages=((0.7, seconds),)) for name, inject, seconds in clients]
    # The unread streams themselves use much of the capacity.
    stages = ((0.25, hostile.STALL_PATIENCE_S),)
    return [Scenario(never, hostile.never_read, runtime, quick, stages=stages), *rest]


_BATCH_WAIT_S = 300.0
_BATCH_S = 120.0  # of load: longer than the kills take


def _batch(name: str, process: str, runtime: str, folder: Path, *arguments: str) -> Scenario:
    def inject(site: Site, model: str) -> str:
        batch = BatchUnderFaults(site.url, model)
        return killed_at_random(
            batch, lambda: _kill_when_ready(site, process), lambda holds: site.wait(_trying(holds), _BATCH_WAIT_S)
        )

    state = ("--state-dir", str(folder / f"state-{runtime}{len(arguments)}"))
    stages = ((0.1, _BATCH_S),)
    return Scenario(name, inject, runtime, (*state, *arguments), allowed=_FAILURES | _CUTS | _CROWD, stages=stages)


def _kill_when_ready(site: Site, process: str) -> None:
    site.wait(site.ready, _WAIT_S)
    site.wait(lambda: any(process in line for line in site.processes().values()), _WAIT_S)
    site.signal(process, _KILL)


def _trying(holds: Callable[[], bool]) -> Callable[[], bool]:
    """Return a condition that does not hold while the service fails."""

    def tried() -> bool:
        try:
            return holds()
        except httpx.HTTPStatusError:
            return False

    return tried


_UP_AND_DOWN = ((0.02, 25.0), (0.7, 25.0), (0.02, 40.0))  # measuring the capacity has added replicas


def _of_ray() -> list[Scenario]:
    two = ("--replicas", "2")
    quick = (*two, "--stall-timeout", "5")
    scales = (
        # One request at a time saturates a replica, so that even a busy machine scales to three.
        *("--replicas", "1-3", "--scale-target", "0.1", "--max-num-seqs", "1", "--max-queued-requests", "64"),
        *("--scale-up-delay", "1", "--scale-down-delay", "3"),
    )
    return [
        Scenario("replica killed, of 1", _sending(_KILL, "ServeReplica"), "ray", allowed=_CUTS | _CROWD),
        Scenario("Serve's controller killed", _sending(_KILL, "ServeController"), "ray"),
        Scenario("engine killed, of 2", _sending(_KILL, _ENGINE), "ray", two, allowed=_BEGUN),
        Scenario("engine hangs, of 2 (stall_timeout 5)", _sending(_HALT, _ENGINE), "ray", quick, allowed=_BEGUN),
        Scenario("replica killed, of 2", _sending(_KILL, "ServeReplica"), "ray", two, allowed=_CUTS),
        Scenario("replica hangs, of 2", _hang_replica, "ray", two, allowed=_CUTS, stages=((0.7, _HANGING_S),)),
        Scenario("redeployed, 2 replicas", _redeploy, "ray", two, program=REDEPLOY),
        Scenario("redeployed, 1 replica", _redeploy, "ray", ("--replicas", "1"), program=REDEPLOY, allowed=_CROWD),
        Scenario(
            "redeployed, 1 replica, surge",
            _redeploy,
            "ray",
            ("--replicas", "1", "--surge"),
            program=REDEPLOY,
            stages=((0.7, _SURGE_S),),
        ),
        Scenario("1 to 3 replicas and back", _scale, "ray", scales, stages=_UP_AND_DOWN, after_s=_UP_AND_DOWN[0][1]),
    ]


def _clock(file: Path, library: str) -> Scenario:
    def jump(site: Site, model: str) -> str:
        seen = []
        for seconds in (_JUMP_S, -_JUMP_S, 0):
            _set_clock(file, seconds)
            time.sleep(5)
            seen.append(f"{_clock_error(site, model):+.0f} s")
        return f"its replies were dated {', '.join(seen)} from now"

    _set_clock(file, 0)
    environment = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as in the kernel, when the time of day is set
    }
    return Scenario("the clock jumps an hour on, and back", jump, "local", environment=environment)


def _set_clock(file: Path, seconds: int) -> None:
    file.write_text(f"{seconds:+d}\n")


def _clock_error(site: Site, model: str) -> float:
    """Return by how many seconds the service's clock is ahead of this process's."""
    body = {"model": model, "prompt": "def", "max_tokens": 1}
    reply = httpx.post(f"{site.url}/generate", json=body, timeout=30, trust_env=False)
    return float(reply.raise_for_status().json()["created"]) - time.time()


def _nothing(site: Site, model: str) -> str:
    return "from the start"


def _sending(number: signal.Signals, process: str) -> Inject:
    def inject(site: Site, model: str) -> str:
        site.signal(process, number)
        return ""

    return inject


def _hang_replica(site: Site, model: str) -> str:
    pid = site.signal("ServeReplica", _HALT)
    gone = site.wait(lambda: pid not in site.processes(), 2 * _HANGING_S)
    new = site.wait(lambda: site.metric("replicas", model=model) == 2, _WAIT_S)
    return f"Serve ended it after {gone:.0f} s, the next was ready {new:.0f} s later"


def _terminate(site: Site, model: str) -> str:
    began = time.monotonic()
    site.process.terminate()
    code = site.process.wait(STOP_S)
    return f"exit code {code} after {time.monotonic() - began:.1f} s"


def _redeploy(site: Site, model: str) -> str:
    def changed() -> bool:
        replies = [httpx.get(f"{site.url}/info", timeout=10, trust_env=False) for _ in range(10)]
        return all(reply.status_code == 200 and reply.json()["limits"]["max_n"] > before for reply in replies)

    before = httpx.get(f"{site.url}/info", timeout=10, trust_env=False).json()["limits"]["max_n"]
    site.process.send_signal(signal.SIGHUP)
    return f"the new setting everywhere after {site.wait(changed, _WAIT_S):.1f} s"


def _scale(site: Site, model: str) -> str:
    before = site.metric("replicas", model=model)
    out = site.wait(lambda: site.metric("replicas", model=model) == 3, _WAIT_S)
    back = site.wait(lambda: site.metric("replicas", model=model) == 1, _WAIT_S)
    return f"from {before:.0f} to 3 after {out:.0f} s, 1 again {back:.0f} s later"
