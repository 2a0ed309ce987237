"""The application as a Ray cluster deploys it, from the arguments of a Serve configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.service.processes import eventually
from triptych.service.runtimes.ray_serve.haproxy import free_port

DEPLOY = """
import json, sys
from pathlib import Path
from triptych.service.runtimes.ray_serve import environment
from triptych.service.settings.serve_config import ServeConfig
from triptych.model.api.messages import ModelSpec

arguments, port = json.loads(sys.argv[1]), int(sys.argv[2])
with environment.prepared(ServeConfig((ModelSpec("x", "x"),))) as folder:
    import ray
    from ray import serve
    from triptych.service.runtimes.ray_serve.deployment import application

    ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=str(folder))
    serve.start(http_options={"port": port})
    serve.run(application(arguments), name="text", route_prefix="/text")
    print("deployed", flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()
"""
# Ray changes the process that imports it, and takes seconds to: one other process for all that is asked.
BUILD = """
import json, sys
from triptych.service.runtimes.ray_serve import deployment
from triptych.service.runtimes.ray_serve.deployment import application
from triptych.service.settings.resolve import resolve_config

for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"actor": application(arguments)._bound_deployment.ray_actor_options}))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))

import os
from types import SimpleNamespace as Simple

config = resolve_config({"x": {"path": "/x"}}, {})
for ids, gpus in ((["3"], 0.5), ([], 0.0)):
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    given = Simple(get_accelerator_ids=lambda: {"GPU": ids}, get_assigned_resources=lambda: {"GPU": gpus})
    deployment.ray = Simple(get_runtime_context=lambda: given)
    own = deployment._on_own_gpus(config)
    print(json.dumps({"visible": os.environ["CUDA_VISIBLE_DEVICES"], "share": own.models[0].engine.gpu_share}))

ports = []

def start(http_options, **options):
    ports.append(http_options.port)
    if len(ports) == 1:
        raise TimeoutError("HTTP proxies not available after 60s.")

deployment.serve.start = start
deployment._start_serve(resolve_config({"x": {"path": "/x"}}, {"port": 7}), None)
print(json.dumps({"starts": ports}))

from pathlib import Path
from triptych.service.runtimes.ray_serve import session

def fail(**options):
    raise Exception("The current node timed out during startup.\\nMore of it.")

session.ray = Simple(init=fail)
try:
    session._init_ray(Path("/nowhere"))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""
REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": ({"prot": 1}, "key prot is not known; did you mean port?"),
    "the cluster's": ({"port": 1}, "port is set by the cluster (http_options), not by an application"),
    "list": ([], "expected a mapping, found list"),
    "text": ({"max_num_seqs": "many"}, "max_num_seqs: found 'many', expected a whole number"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, dict[str, Any]]:
    """By the name of what was asked: what Ray's actors are to have, or the error."""
    asked = {name: arguments for name, (arguments, _) in REFUSED.items()}
    asked["several"] = {"models": {"gen": str(folder)}, "replicas": "1-3", "max_n": 2, "drain-timeout": 5}
    asked["embedded"] = {}
    asked["one rank"] = {"models": {"gen": {"path": str(folder), "device": "cuda"}}}
    asked["half"] = asked["one rank"] | {"gpus-per-replica": 0.5}
    for device in ("cuda", "cpu"):
        asked[device] = {"models": {"gen": {"path": str(folder), "device": device, "tensor_parallel_size": 2}}}
    command = [sys.executable, "-c", BUILD, json.dumps(list(asked.values()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    printed = [*asked, "a share", "no GPU", "late proxy", "no Ray"]
    return dict(zip(printed, map(json.loads, done.stdout.splitlines()), strict=True))


def test_ray_that_does_not_start_is_one_line(built: dict[str, dict[str, Any]]) -> None:
    said = "Ray did not start: The current node timed out during startup."
    assert built["no Ray"] == {"error": f"EngineDeadError: {said}"}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_deployments_are_refused_at_once(built: dict[str, dict[str, Any]], name: str) -> None:
    assert built[name] == {"error": f"ConfigError: args: {REFUSED[name][1]}"}


def test_valid_deployments_are_built(built: dict[str, dict[str, Any]]) -> None:
    assert [list(built[name]) for name in ("several", "embedded")] == [["actor"]] * 2, built


def test_a_replica_requests_the_gpus_of_its_ranks(built: dict[str, dict[str, Any]]) -> None:
    cuda, cpu = built["cuda"]["actor"], built["cpu"]["actor"]
    assert cuda["num_gpus"] == 2
    assert "num_gpus" not in cpu and cpu["num_cpus"] == 0
    assert [built[name]["actor"]["num_gpus"] for name in ("one rank", "half")] == [1, 0.5]


def test_a_replica_sees_its_own_gpus_and_no_other(built: dict[str, dict[str, Any]]) -> None:
    assert built["a share"] == {"visible": "3", "share": 0.5}
    assert built["no GPU"] == {"visible": "", "share": 1.0}  # Ray leaves the variable as it was


def test_a_proxy_that_is_later_than_ray_allows_is_waited_for_again(built: dict[str, dict[str, Any]]) -> None:
    assert built["late proxy"] == {"starts": [7, 7]}


@pytest.fixture
def deployed(folder: Path) -> Iterator[str]:
    port = free_port()  # seconds pass until Serve has it
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
        assert "playground" in client.get("/", headers={"accept": "text/html"}).text.lower()
        assert httpx.get(deployed, headers=client.headers).headers["location"] == "/text/"
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/text"}]
