"""The chart and the manifests of KubeRay: held to the published schemas without a cluster, and to rules of our own."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy import helm
from tests.deploy.docker import ROOT
from tests.deploy.kustomize import Manifest, containers, pod_specs, render
from triptych.model.api.messages import ModelSpec
from triptych.service.runtimes.ray_serve import environment
from triptych.service.settings.option_table import OPTIONS
from triptych.service.settings.serve_config import ServeConfig

KUBERAY = ROOT / "deploy" / "kuberay"
VERSION = "1.37"
RENDERED = {"kuberay": render(KUBERAY), "kuberay-production": render(KUBERAY / "production"), **helm.charts()}
MANIFESTS = {
    f"{example} {one['kind']} {one['metadata']['name']}": one for example, found in RENDERED.items() for one in found
}
PODS = {f"{name} {number}": spec for name, one in MANIFESTS.items() for number, spec in enumerate(pod_specs(one))}
CONTAINERS = {
    f"{name} {container['name']}": container for name, one in MANIFESTS.items() for container in containers(one)
}
SERVING = {name: one for name, one in CONTAINERS.items() if "ports" in one}
OPERATORS = {
    "RayService",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "HTTPRoute",
    "InferencePool",
}  # kinds that Kubernetes does not define


def rayservice(rendered: str = "kuberay") -> Manifest:
    return next(one for one in RENDERED[rendered] if one["kind"] == "RayService")


def serve_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(rayservice()["spec"]["serveConfigV2"])
    return config


@pytest.mark.parametrize(("folder", "name"), [(".", "kuberay"), ("production", "kuberay-production")])
def test_kubectl_renders_the_same(folder: str, name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERAY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(one["kind"], one["metadata"]["name"]): one for one in manifests}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(RENDERED[name])


@pytest.mark.parametrize("name", [name for name, one in MANIFESTS.items() if one["kind"] not in OPERATORS])
def test_kubernetes_knows_every_field(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], VERSION, strict=True)


def test_control_a_field_that_does_not_exist_is_refused() -> None:
    wrong = json.loads(json.dumps(next(one for one in RENDERED["defaults"] if one["kind"] == "Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def rayservice_schema() -> dict[str, Any]:
    folder = Path(os.environ.get("SHARED_SCHEMAS", ROOT.parent / "shared" / "schemas"))
    if not (folder / "rayservice-v1.json").exists():
        pytest.skip("the schema of RayService is not here (SHARED_SCHEMAS)")
    return closed(json.loads((folder / "rayservice-v1.json").read_text()))


def closed(schema: Any) -> Any:
    """The schema, which knows no field but its properties: an API server would drop the others."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    return {**inner, "additionalProperties": False} if is_object and not keeps else inner


def test_kuberay_knows_every_field() -> None:
    schema = rayservice_schema()
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(rayservice(), schema)
    jsonschema.validate(rayservice("kuberay-production"), schema)
    wrong = rayservice() | {"spec": {**rayservice()["spec"], "upgradeStrategie": {}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)
    for template in (spec for spec in pod_specs(rayservice())):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template}
        kubernetes_validate.validate(pod, VERSION, strict=True)


# Ray reads its environment when it is imported, and changes the process that imports it: not this one.
BUILD = """
import json, sys
from importlib import import_module
from ray.serve.schema import ServeDeploySchema
(application,) = ServeDeploySchema.model_validate(json.loads(sys.argv[1])).applications
module, _, name = application.import_path.partition(":")
built = getattr(import_module(module), name)({k: v for k, v in application.args.items() if k != "api_key_file"})
assert built._bound_deployment.name == application.deployments[0].name, built
"""
RUN = """
import httpx, json, os, ray, sys, time
from ray import serve
config, folder, port = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ray.init(address="local", include_dashboard=False, num_cpus=4, _temp_dir=folder, _node_ip_address="127.0.0.1")
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
from triptych.service.runtimes.ray_serve.deployment import application
serve.run(application(config["applications"][0]["args"]), name="triptych")
base = f"http://127.0.0.1:{port}"
assert httpx.get(base + "/-/healthz").status_code == 200
assert httpx.get(base + "/readyz").json() == {"status": "ok"}
body = {"model": "normalize", "prompt": "the third of march twenty twenty four"}
assert httpx.post(base + "/generate", json=body).status_code == 401
reply = httpx.post(base + "/generate", json=body, headers={"Authorization": "Bearer a-key"}, timeout=60)
assert reply.json()["choices"][0]["text"] == "2024-03-03", reply.text
serve.shutdown()
ray.shutdown()
"""


def in_rays_environment(script: str, *arguments: str) -> None:
    """Run it with the variables of the manifest's containers, the token as the operator would set it."""
    found = next(containers(rayservice()))["env"]
    ours = {one["name"]: one["value"] for one in found} | {"RAY_AUTH_TOKEN": "a" * 64, "PYTHONPATH": str(ROOT)}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRIPTYCH_"))}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, env=others | ours, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_serve_knows_every_field_and_finds_the_application() -> None:
    in_rays_environment(BUILD, json.dumps(serve_config()))


@pytest.mark.slow
def test_the_application_serves_on_a_ray_of_the_manifests_environment() -> None:
    config = serve_config()
    with (
        tempfile.TemporaryDirectory(prefix="k8s-", dir="/tmp") as folder,
        socket.create_server(("127.0.0.1", 0)) as one,
    ):
        port = one.getsockname()[1]
        one.close()
        (Path(folder) / "keys").write_text("a-key\n")
        config["applications"][0]["args"]["api_key_file"] = str(Path(folder) / "keys")
        in_rays_environment(RUN, json.dumps(config), folder, str(port))


def test_ray_runs_as_the_service_would_run_it() -> None:
    """As `triptych serve --runtime ray` would with Serve's own proxy. The token is the operator's, the log the pod's,
    a pod has one replica, whose figures need no shared folder, and pods must reach each other.
    """
    plain = ServeConfig((ModelSpec("m", "m"),), haproxy=False)
    ours = environment.variables(plain, Path("/tmp/x"))
    others = {"RAY_AUTH_TOKEN", "RAY_SERVE_LOG_TO_STDERR", "PROMETHEUS_MULTIPROC_DIR"}
    others |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", environment.EDGE_LIMITS}  # the default ones
    kept = {name: value for name, value in ours.items() if name not in others}
    assert rayservice()["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for container in containers(rayservice()):
        assert {one["name"]: one["value"] for one in container["env"]} == kept
    args = serve_config()["applications"][0]["args"]
    assert serve_config()["http_options"]["request_timeout_s"] == plain.proxy_timeout_s
    assert set(args) <= {option.name for option in OPTIONS}


def test_no_replica_runs_on_the_head() -> None:
    cluster = rayservice()["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert serve_config()["applications"][0]["deployments"][0]["ray_actor_options"]["num_cpus"] > 0
    assert rayservice()["spec"]["excludeHeadPodFromServeSvc"] is True


def test_kuberays_workers_are_selected_and_the_head_is_not() -> None:
    """By the scrapes, the budget of disruptions and, both, the policy: of this installation alone."""
    groups = rayservice()["spec"]["rayClusterConfig"]
    (workers,) = groups["workerGroupSpecs"]
    labels = workers["template"]["metadata"]["labels"]
    assert groups["headGroupSpec"]["template"]["metadata"]["labels"] == labels
    assert workers["replicas"] == serve_config()["applications"][0]["deployments"][0]["num_replicas"]
    assert workers["minReplicas"] == workers["maxReplicas"] == workers["replicas"]
    found = {one["kind"]: one.get("spec") for one in RENDERED["kuberay-production"]}
    assert found["NetworkPolicy"]["podSelector"]["matchLabels"] == labels
    for kind in ("PodMonitor", "PodDisruptionBudget"):
        assert found[kind]["selector"]["matchLabels"] == labels | {"ray.io/node-type": "worker"}
    (container,) = workers["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (scrape,) = found["PodMonitor"]["podMetricsEndpoints"]
    assert ports[scrape["port"]] == serve_config()["applications"][0]["args"]["metrics_port"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    admitted = [port["port"] for rule in found["NetworkPolicy"]["ingress"] for port in rule.get("ports", [])]
    assert sorted(admitted) == [8000, 8000, 8265, 9400]


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_token_no_root_and_no_links(name: str) -> None:
    pod = PODS[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # they would set TRIPTYCH_PORT
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_bounded_and_cannot_rise(name: str) -> None:
    container = CONTAINERS[name]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    _, colon, tag = container["image"].rpartition(":")
    assert colon and tag != "latest"
    assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", SERVING)
def test_serving_containers_have_probes_and_grace(name: str) -> None:
    container = SERVING[name]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_networks_are_closed_in_both_directions() -> None:
    policies = [one["spec"] for one in MANIFESTS.values() if one["kind"] == "NetworkPolicy"]
    assert len(policies) == len(RENDERED) + 1  # that of the download too
    assert all(set(policy["policyTypes"]) == {"Ingress", "Egress"} for policy in policies)
    assert all(rule.get("from") for policy in policies for rule in policy["ingress"])


def test_control_the_renderer_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: a-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        render(tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [../x.yaml]\n")
    with pytest.raises(ValueError, match="outside"):
        render(tmp_path)


def test_an_image_keeps_the_folders_that_rays_head_serves(tmp_path: Path) -> None:
    """Without them `ray start --head` waits until it fails, and KubeRay has no cluster."""
    build = tmp_path / "ray/dashboard/client/build"
    for name in ("index.html", "static/css/a.css", "static/js/a.js"):
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).touch()
    runpy.run_path(str(ROOT / "deploy/image/slim.py"))["delete"](tmp_path)
    assert sorted(one.name for one in build.rglob("*")) == ["a.css", "css", "index.html", "static"]
