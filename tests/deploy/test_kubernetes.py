"""The manifests: rendered, held to the published schemas without a cluster, and to rules of our own."""

from __future__ import annotations

import json
import os
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

from model.api.engine_config import EngineConfig
from model.api.messages import ModelSpec
from service.app import TABLE
from service.runtimes.ray_serve import environment
from service.settings.option_table import OPTIONS
from service.settings.parsers import byte_size
from service.settings.serve_config import Scaling, ServeConfig
from service.settings.service_settings import ServiceSettings
from service.settings.sources import OTHER_VARIABLES
from tests.deploy.docker import ROOT
from tests.deploy.kustomize import Manifest, containers, pod_specs, render

KUBERNETES = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
OVERLAYS = {path.name: render(path) for path in sorted((KUBERNETES / "overlays").iterdir())}
MANIFESTS = {
    f"{overlay} {one['kind']} {one['metadata']['name']}": one for overlay, found in OVERLAYS.items() for one in found
}
PODS = {f"{name} {number}": spec for name, one in MANIFESTS.items() for number, spec in enumerate(pod_specs(one))}
CONTAINERS = {
    f"{name} {container['name']}": container for name, one in MANIFESTS.items() for container in containers(one)
}
SERVING = {name: one for name, one in CONTAINERS.items() if "ports" in one}
OPERATORS = {"RayService", "PodMonitor", "PrometheusRule", "ScaledObject"}  # kinds that Kubernetes does not define


def rayservice() -> Manifest:
    return next(one for one in OVERLAYS["kuberay"] if one["kind"] == "RayService")


def serve_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(rayservice()["spec"]["serveConfigV2"])
    return config


def deployment(overlay: str) -> Manifest:
    return next(one for one in OVERLAYS[overlay] if one["kind"] == "Deployment")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_the_same(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(one["kind"], one["metadata"]["name"]): one for one in manifests}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(OVERLAYS[overlay])


@pytest.mark.parametrize("name", [name for name, one in MANIFESTS.items() if one["kind"] not in OPERATORS])
def test_kubernetes_knows_every_field(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], VERSION, strict=True)


def test_control_a_field_that_does_not_exist_is_refused() -> None:
    wrong = json.loads(json.dumps(deployment("cpu")))
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
from service.runtimes.ray_serve.deployment import application
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


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "hub", "models-dir"])
def test_an_apply_leaves_the_number_of_pods_to_whoever_scales(overlay: str) -> None:
    (deployment,) = (one for one in OVERLAYS[overlay] if one["kind"] == "Deployment")
    assert "replicas" not in deployment["spec"]


def test_no_replica_runs_on_the_head() -> None:
    cluster = rayservice()["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert serve_config()["applications"][0]["deployments"][0]["ray_actor_options"]["num_cpus"] > 0
    assert rayservice()["spec"]["excludeHeadPodFromServeSvc"] is True


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


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "hub", "models-dir"])
def test_probes_ask_what_they_mean(overlay: str) -> None:
    (container,) = (one for one in containers(deployment(overlay)) if "ports" in one)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert set(paths.values()) <= TABLE.open_paths  # probes have no key


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "hub", "models-dir"])
def test_the_grace_is_longer_than_the_drain(overlay: str) -> None:
    (pod,) = pod_specs(deployment(overlay))
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    settings = ServiceSettings(drain_timeout_s=float(variables["TRIPTYCH_DRAIN_TIMEOUT"]))
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest = stop + settings.drain_timeout_s + settings.limits.stream_stall_s + 15
    assert pod["terminationGracePeriodSeconds"] > longest
    readiness = container["readinessProbe"]
    assert stop >= readiness["periodSeconds"] * readiness["failureThreshold"]


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "hub", "models-dir"])
def test_deployments_set_only_known_variables(overlay: str) -> None:
    (container,) = (one for one in containers(deployment(overlay)) if "ports" in one)
    ours = {one["name"] for one in container["env"] if one["name"].startswith("TRIPTYCH_")}
    assert ours <= {option.variable for option in OPTIONS} | OTHER_VARIABLES


def test_everything_selects_the_pods_there_are() -> None:
    for overlay in ("cpu", "gpu"):
        labels = deployment(overlay)["spec"]["template"]["metadata"]["labels"]
        kinds = {one["kind"]: one["spec"] for one in OVERLAYS[overlay] if one["kind"] != "ServiceAccount"}
        assert kinds["Service"]["selector"].items() <= labels.items()
        assert kinds["PodDisruptionBudget"]["selector"]["matchLabels"].items() <= labels.items()
        assert kinds["NetworkPolicy"]["podSelector"]["matchLabels"].items() <= labels.items()
    monitor = next(one for one in OVERLAYS["monitoring"] if one["kind"] == "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "triptych"  # the job that the rules name
    (scaled,) = OVERLAYS["autoscaling"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment("cpu")["metadata"]["name"]
    saturation, tokens = (trigger["metadata"] for trigger in scaled["spec"]["triggers"])
    assert float(saturation["threshold"]) == Scaling().target
    assert float(tokens["threshold"]) == EngineConfig().limits().max_num_batched_tokens


def test_networks_are_closed_in_both_directions() -> None:
    policies = [one["spec"] for one in MANIFESTS.values() if one["kind"] == "NetworkPolicy"]
    assert len(policies) == 6
    assert all(set(policy["policyTypes"]) == {"Ingress", "Egress"} for policy in policies)
    assert all(rule.get("from") for policy in policies for rule in policy["ingress"])
    (job,) = OVERLAYS["loadtest"]
    assert job["spec"]["template"]["metadata"]["labels"]["triptych.io/client"] == "true"


def of_kind(overlay: str, kind: str) -> Manifest:
    (found,) = (one for one in OVERLAYS[overlay] if one["kind"] == kind)
    return found


def test_a_volume_of_models_is_served_as_it_is_and_within_the_pod_s_memory() -> None:
    (pod,) = pod_specs(deployment("models-dir"))
    (container,) = pod["containers"]
    folder = container["args"][container["args"].index("--models-dir") + 1]
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == folder]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    claim = of_kind("models-dir", "PersistentVolumeClaim")["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim and mount["readOnly"]
    budget = next(one["value"] for one in container["env"] if one["name"] == "TRIPTYCH_MODEL_MEMORY")
    assert byte_size(budget) < byte_size(container["resources"]["limits"]["memory"] + "B")


def test_a_gpu_s_pod_asks_for_a_gpu_and_keeps_compiled_kernels_on_a_volume() -> None:
    (pod,) = pod_specs(deployment("gpu"))
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert container["image"].endswith("-cuda")
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["TRIPTYCH_DEVICE"] == "cuda"
    # Kubernetes opens a volume to the pod's group: the service makes a folder of its own in it.
    parent, _, name = variables["TRIPTYCH_KERNEL_CACHE"].rpartition("/")
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == parent and name]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    temporary = next(one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "tmp")
    written = byte_size(volume["emptyDir"]["sizeLimit"] + "B") + byte_size(temporary + "B")
    assert written < byte_size(resources["limits"]["ephemeral-storage"] + "B")


def test_a_model_of_the_hub_is_downloaded_by_a_job_and_served_without_network() -> None:
    (pod,) = pod_specs(deployment("hub"))
    (serving,), (checking,) = pod["containers"], pod["initContainers"]
    (job,) = pod_specs(of_kind("hub", "Job"))
    (downloading,) = job["containers"]
    # The Job is not selected by the policy, or the Service, of the pods that serve, and only it may reach others.
    labels = of_kind("hub", "Job")["spec"]["template"]["metadata"]["labels"]
    policies = {one["metadata"]["name"]: one["spec"] for one in OVERLAYS["hub"] if one["kind"] == "NetworkPolicy"}
    assert policies["triptych"]["egress"] == []
    assert policies["triptych"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "triptych"
    assert policies["triptych-download"]["podSelector"]["matchLabels"] == labels
    assert labels["app.kubernetes.io/name"] != "triptych"
    # All three name the same models and the same volume, which one of them writes.
    models = downloading["args"][1:]
    assert downloading["args"][0] == "download" and all(name.startswith("hf:") for name in models)
    assert checking["args"] == downloading["args"] and serving["args"][3:] == models
    for container, offline in ((serving, True), (checking, True), (downloading, False)):
        variables = {one["name"]: one.get("value") for one in container["env"]}
        [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == variables["HF_HOME"]]
        assert mount.get("readOnly", False) is offline
        assert (variables.get("HF_HUB_OFFLINE") == "1") is offline
        assert container["image"] == serving["image"]
    claim = of_kind("hub", "PersistentVolumeClaim")["metadata"]["name"]
    for spec in (pod, job):
        [volume] = [one for one in spec["volumes"] if one["name"] == "models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim


def test_control_the_renderer_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: a-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        render(tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [../x.yaml]\n")
    with pytest.raises(ValueError, match="outside"):
        render(tmp_path)
