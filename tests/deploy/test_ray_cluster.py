"""The RayService without its operator: a head and a worker from the image, told what to serve as KubeRay tells them.

The containers have the environment, probes and start parameters of the manifest, on a Docker network instead of pods.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.docker import Container, build, docker, need_engine
from tests.deploy.kustomize import containers
from tests.deploy.test_kubernetes import rayservice, serve_config
from tests.service.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.docker]

IMAGE = "triptych:test"
TOKEN = "t" * 64
START_SECONDS = 180


class Node(Container):
    """A container of the cluster; `at` is where one of its ports is published."""

    def at(self, port: int) -> str:
        return "http://" + docker("port", self.name, f"{port}/tcp").stdout.split()[0]

    def status(self, probe: str) -> int:
        """The status that the manifest's probe of this name gets; 0 without an answer."""
        (container,) = (one for one in containers(rayservice()) if one["name"] == self.role)
        get = container[f"{probe}Probe"]["httpGet"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        try:
            return httpx.get(self.at(ports.get(get["port"], get["port"])) + get["path"]).status_code
        except httpx.TransportError:
            return 0

    def __init__(self, role: str, network: str, keys: Path, start: str) -> None:
        self.role = role
        (container,) = (one for one in containers(rayservice()) if one["name"] == role)
        environment = {one["name"]: one["value"] for one in container["env"]} | {"RAY_AUTH_TOKEN": TOKEN}
        options = [f"--env={name}={value}" for name, value in environment.items()]
        options += [f"--publish=127.0.0.1::{port}" for port in (8000, 8265, 9400, 52365)]
        options += ["--read-only", "--tmpfs=/tmp", "--shm-size=256m", "--cap-drop=ALL", f"--network={network}"]
        options += [f"--name={network}-{role}", f"--volume={keys}:/run/secrets/triptych/api_keys:ro"]
        started = docker("run", "--detach", *options, "--entrypoint=/bin/bash", IMAGE, "-c", "--", start)
        super().__init__(started.stdout.strip())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Start a head and a worker, which have not been told yet what to serve."""
    need_engine()
    build(IMAGE)
    keys = tmp_path_factory.mktemp("secret") / "api_keys"
    keys.write_text("a-key\n")
    keys.chmod(0o644)
    for folder in (keys.parent, keys.parent.parent, keys.parent.parent.parent):
        folder.chmod(0o755)
    network = f"triptych-ray-{os.getpid()}"
    docker("network", "create", network)
    nodes: list[Node] = []
    try:
        head = "ray start --head --num-cpus=0 --dashboard-host=0.0.0.0 --disable-usage-stats --block"
        nodes.append(Node("ray-head", network, keys, head))
        eventually(lambda: nodes[0].status("readiness") == 200, START_SECONDS)
        worker = f"ray start --address={network}-ray-head:6379 --num-cpus=2 --block"
        nodes.append(Node("ray-worker", network, keys, worker))
        eventually(lambda: nodes[1].status("startup") == 200, START_SECONDS)
        yield nodes[0], nodes[1]
    finally:
        for one in nodes:
            docker("rm", "--force", "--volumes", one.name)
        docker("network", "rm", network)


def manifest() -> dict[str, Any]:
    """Return the manifest's configuration for one worker."""
    config: dict[str, Any] = serve_config()
    config["applications"][0]["deployments"][0]["num_replicas"] = 1
    return config


def deploy(head: Node, token: str, config: dict[str, Any]) -> httpx.Response:
    """Deploy as the operator does."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.put(f"{head.at(8265)}/api/serve/applications/", json=config, headers=headers, timeout=60)


def test_it_serves_on_the_worker_what_the_operator_tells_the_head(cluster: tuple[Node, Node]) -> None:
    head, worker = cluster
    assert deploy(head, "wrong", manifest()).status_code in (401, 403)
    assert worker.status("readiness") != 200  # nothing is served yet
    reply = deploy(head, TOKEN, manifest())
    assert reply.status_code == 200, reply.text
    eventually(lambda: worker.status("readiness") == 200, START_SECONDS)
    body = {"model": "normalize", "prompt": "the third of march twenty twenty four"}
    key = {"Authorization": "Bearer a-key"}
    assert httpx.post(f"{worker.at(8000)}/generate", json=body).status_code == 401
    answered = httpx.post(f"{worker.at(8000)}/generate", json=body, headers=key, timeout=60)
    assert answered.json()["choices"][0]["text"] == "2024-03-03", answered.text
    assert [one.status(probe) for one in cluster for probe in ("startup", "readiness", "liveness")] == [200] * 6


def test_the_replica_is_not_on_the_head(cluster: tuple[Node, Node]) -> None:
    head, worker = cluster
    commands = "for c in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$c; echo; done 2>/dev/null"
    engine = f"{commands} | grep -c 'm triptych.model.engine '"
    counts = [one.execute("sh", "-c", engine, check=False).stdout.strip() for one in (head, worker)]
    assert int(counts[0]) < int(counts[1])


# A file for `triptych serve --config`, which knows the embedded models' folders of the image.
GROUPS = """
import json, pathlib
from triptych.model.pretrained import embedded_models
at = {name: str(path) for name, path in embedded_models().items()}
groups = {"text": {"models": {"code": at["code"]}}}
file = {"host": "0.0.0.0", "models": {"normalize": at["normalize"]}, "groups": groups}
pathlib.Path("/tmp/triptych.yaml").write_text(json.dumps(file))
"""


def test_a_file_with_groups_is_deployed_by_what_serve_config_makes_of_it(cluster: tuple[Node, Node]) -> None:
    head, worker = cluster
    head.execute("python", "-c", GROUPS)
    made = head.execute("triptych", "serve-config", "/tmp/triptych.yaml", "--num-cpus", "0.5").stdout
    reply = deploy(head, TOKEN, yaml.safe_load(made))
    assert reply.status_code == 200, reply.text
    body = {"prompt": "import os", "max_tokens": 4}

    def answered(path: str, **fields: str) -> httpx.Response:
        return httpx.post(f"{worker.at(8000)}{path}", json={**body, **fields}, timeout=60)

    eventually(lambda: answered("/text/generate").status_code == 200, START_SECONDS)
    assert answered("/text/generate").json()["usage"]["completion_tokens"] == 4
    elsewhere = answered("/generate", model="code")
    assert elsewhere.status_code == 404 and "served below /text" in elsewhere.text
