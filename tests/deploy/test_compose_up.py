"""compose.yaml, started: gates, what the service's Prometheus then answers to the dashboard's queries, and the end."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.docker import BASE_IMAGE, ROOT, build, docker, inspect, need_engine
from tests.deploy.monitoring import dashboard_queries, rules
from tests.service.processes import eventually
from triptych.model.pretrained import CHECKPOINTS

pytestmark = [pytest.mark.slow, pytest.mark.docker]

IMAGE = "triptych:test"
PROMETHEUS = "triptych-prometheus:test"
FILE = ROOT / "deploy" / "compose.yaml"
SAMPLE = CHECKPOINTS / "speech" / "sample.flac"
UP_SECONDS = 240
# Empty here: no model comes or goes, none that is in the image has recurrent layers, and there are no names of keys.
MAY_BE_EMPTY = {f"{panel} {query}" for panel in ("Models loaded and unloaded", "State slots") for query in "AB"} | {
    f"{panel} by name of key A" for panel in ("Tokens", "Requests", "Engine time")
}


@dataclass
class Project:
    """One `docker compose` project of this test's own, on free ports."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, timeout: float = UP_SECONDS, check: bool = True) -> str:
        ports = {"PORT": "0", "PROMETHEUS_PORT": "0", "GRAFANA_PORT": "0"}
        images = {"IMAGE": IMAGE, "PROMETHEUS_IMAGE": PROMETHEUS}
        command = ["docker", "compose", "-p", self.name, "-f", str(FILE), *arguments]
        environment = {**os.environ, **ports, **images, **self.variables}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def url(self, service: str, port: int) -> str:
        return f"http://{self.compose('port', service, str(port)).strip()}"

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def query(self, promql: str) -> list[dict[str, Any]]:
        reply = httpx.get(f"{self.url('prometheus', 9090)}/api/v1/query", params={"query": promql})
        assert reply.status_code == 200, f"{promql}: {reply.text}"
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "60", check=False)


@pytest.fixture(scope="module")
def images() -> list[str]:
    """The services whose images are here or were built here."""
    need_engine()
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose plugin")
    build(IMAGE)
    file = ROOT / "tests/deploy/prometheus.Dockerfile"
    base = f"--build-arg=BASE_IMAGE={BASE_IMAGE}"
    docker("build", "--network=host", "-t", PROMETHEUS, base, "-f", str(file), str(file.parent), timeout=600)
    grafana = docker("pull", "grafana/grafana:12.1.0", check=False).returncode == 0
    return ["triptych", "prometheus", *(["grafana"] if grafana else [])]


@pytest.fixture(scope="module")
def project(images: list[str]) -> Iterator[Project]:
    """With the image's speech model in addition to the default models."""
    folder = "from triptych.model.pretrained import CHECKPOINTS; print(CHECKPOINTS / 'speech')"
    speech = docker("run", "--rm", "--entrypoint=python", IMAGE, "-c", folder).stdout.strip()
    one = Project(f"triptych-test-{os.getpid()}", {"MODELS": f"code normalize embed speech={speech}"})
    try:
        one.compose("up", "--detach", "--wait", *images)
        yield one
    finally:
        one.down()


def load(url: str, seconds: float) -> None:
    """Some of every kind of request, refused ones too."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"model": "code", "prompt": "import os\n", "max_tokens": 24}),
        ("/generate", {"model": "normalize", "prompt": "ten past nine"}),
        ("/encode", {"model": "embed", "input": ["a cat", "a dog"]}),
        ("/generate", {"model": "code", "prompt": "x", "max_tokens": -1}),
    ]
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end:
            for path, body in bodies:
                client.post(path, json=body)
            client.post("/v1/audio/transcriptions", files={"file": SAMPLE.read_bytes()})


def test_compose_up_waits_until_the_service_is_ready(project: Project, images: list[str]) -> None:
    assert httpx.get(f"{project.url('triptych', 8000)}/readyz").status_code == 200
    for service in images:
        assert inspect(project.container(service))["State"]["Health"]["Status"] == "healthy"


def test_only_loopback_is_published(project: Project, images: list[str]) -> None:
    for service in images:
        published = inspect(project.container(service))["NetworkSettings"]["Ports"]
        addresses = {one["HostIp"] for bindings in published.values() for one in bindings or []}
        assert addresses == {"127.0.0.1"}, service


def test_the_dashboard_has_data(project: Project) -> None:
    load(project.url("triptych", 8000), 35)
    time.sleep(6)  # one more scrape
    empty = {name for name, query in dashboard_queries().items() if not project.query(query)}
    assert empty == MAY_BE_EMPTY
    assert project.query("sum(triptych_requests_total)")[0]["value"][1] != "0"


def test_prometheus_runs_the_rules_and_nothing_is_broken(project: Project) -> None:
    def evaluated() -> dict[str, dict[str, Any]]:
        groups = httpx.get(f"{project.url('prometheus', 9090)}/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    eventually(lambda: all(rule["health"] == "ok" for rule in evaluated().values()), 60)
    found = evaluated()
    assert set(found) == {rule.get("alert") or rule["record"] for rule in rules()}
    firing = {name for name, rule in found.items() if rule.get("state") == "firing"}
    assert {name for name in firing if "TokenBudget" not in name} == set()  # how fast it is, is the machine's affair


def test_the_inside_has_no_way_out(project: Project) -> None:
    (network,) = docker("network", "ls", "--quiet", "--filter", f"name={project.name}_inside").stdout.split()
    assert inspect(network)["Internal"] is True


def loaded(one: Project, *options: str) -> dict[str, Any]:
    """What the profile `loadtest` says of a run as compose.yaml has it, shorter."""
    command = yaml.safe_load(FILE.read_text())["services"]["loadtest"]["command"]
    shorter = ("--duration", "5", "--concurrency", "2", "--max-lag", "2000")
    out = one.compose("--profile", "loadtest", "run", "--rm", "-T", *options, "loadtest", *command, *shorter)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_the_load_test_reaches_the_service_from_inside(project: Project) -> None:
    found = loaded(project)
    assert found["counts"]["ok"] > 0 and found["shares"]["error_rate"] == 0
    assert project.compose("--profile", "loadtest", "ps", "--all", "--quiet", "loadtest") == ""  # it is gone


def test_stop_drains(project: Project) -> None:
    """Last of all: the service ends by itself within the grace, with exit code 0."""
    project.compose("stop", "triptych")
    state = inspect(project.container("triptych"))["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


def test_keys_are_asked_for_and_prometheus_has_one(images: list[str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-of-a-client\nkey-of-prometheus\n")
    (tmp_path / "metrics").write_text("key-of-prometheus\n")
    one = Project(
        f"triptych-keys-{os.getpid()}",
        {"API_KEYS_FILE": str(tmp_path / "keys"), "METRICS_KEY_FILE": str(tmp_path / "metrics")},
    )
    try:
        one.compose("up", "--detach", "--wait", "triptych", "prometheus")
        url = one.url("triptych", 8000)
        assert httpx.get(f"{url}/info").status_code == 401
        assert httpx.get(f"{url}/info", headers={"Authorization": "Bearer key-of-a-client"}).status_code == 200
        eventually(lambda: bool(one.query('up{job="triptych"} == 1')), 30)
        one.variables["TRIPTYCH_API_KEY"] = "key-of-a-client"
        assert loaded(one, "-e", "TRIPTYCH_API_KEY")["shares"]["error_rate"] == 0
    finally:
        one.down()
