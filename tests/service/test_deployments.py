"""The application as a Ray cluster deploys it, from the arguments of a Serve configuration."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import checkpoints
from tests.service.processes import eventually

DEPLOY = """
import json, sys
from pathlib import Path
from service import ray_environment
from service.runtime import ServeConfig
from model.engine.protocol import ModelSpec

arguments, port = json.loads(sys.argv[1]), int(sys.argv[2])
with ray_environment.prepared(ServeConfig((ModelSpec("x", "x"),))) as folder:
    import ray
    from ray import serve
    from service.deployments import application

    ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=str(folder))
    serve.start(http_options={"port": port})
    serve.run(application(arguments), name="text", route_prefix="/text")
    print("deployed", flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()
"""
CHECK = "import json, sys; from service.deployments import application; application(json.loads(sys.argv[1]))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("models") / "llama")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"prot": 1}', "args: key prot is not known; did you mean port?"),
        ('{"port": 1}', "args: port is the cluster's to set (http_options), not an application's"),
        ("[]", "args: expected a mapping, found list"),
        ('{"max_num_seqs": "many"}', "args: max_num_seqs: found 'many', expected a whole number"),
    ],
)
def test_what_cannot_be_deployed_is_said_at_once(arguments: str, message: str) -> None:
    assert f"ConfigError: {message}" in run(CHECK, arguments).stderr


def test_what_can_be_is(folder: Path) -> None:
    found = run(CHECK, f'{{"models": {{"gen": "{folder}"}}, "replicas": "1-3", "max_n": 2, "drain-timeout": 5}}')
    assert found.returncode == 0, found.stderr
    assert run(CHECK, "{}").returncode == 0  # the embedded models


OPTIONS = """
import json, sys
from service.deployments import application

print(application(json.loads(sys.argv[1]))._bound_deployment.ray_actor_options)
"""


def test_a_replica_asks_for_the_gpus_of_its_ranks(folder: Path) -> None:
    for device, asked in (("cuda", "'num_gpus': 2"), ("cpu", "'num_cpus': 0")):
        arguments = {"models": {"gen": {"path": str(folder), "device": device, "tensor_parallel_size": 2}}}
        found = run(OPTIONS, json.dumps(arguments))
        assert asked in found.stdout, found.stderr
        assert ("num_gpus" in found.stdout) == (device == "cuda")


@pytest.fixture
def deployed(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = f'{{"models": {{"gen": "{folder}"}}, "max_n": 2, "api_keys": ["k"]}}'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", DEPLOY, arguments, str(port)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdin is not None
        assert "deployed" in process.stdout.readline()
        try:
            yield f"http://127.0.0.1:{port}/text"
        finally:
            process.stdin.close()
            process.wait(60)


@pytest.mark.slow
def test_under_a_route_prefix_it_is_what_it_is_at_the_root(deployed: str) -> None:
    eventually(lambda: httpx.get(f"{deployed}/readyz").status_code == 200, 30)  # which asks for no key
    assert httpx.get(f"{deployed}/info").status_code == 401
    with httpx.Client(base_url=deployed, headers={"Authorization": "Bearer k"}, timeout=60) as client:
        reply = client.post("/generate", json={"prompt": "def", "max_tokens": 3}).json()
        assert reply["usage"]["completion_tokens"] == 3
        refused = client.post("/generate", json={"prompt": "def", "n": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        metrics = client.get("/metrics").text
        assert 'triptych_requests_total{model="gen",outcome="length",task="generate"} 1.0' in metrics
        assert "playground" in client.get("/").text.lower()
