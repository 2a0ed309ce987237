"""The Helm chart: what its values make of pods, and that the service reads the file that it writes.

`test_kubernetes.py` holds each rendered example to the schemas of Kubernetes and to the rules of all manifests.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy import helm
from tests.deploy.docker import ROOT
from tests.deploy.kustomize import Manifest, pod_specs
from triptych.model.api.engine_config import EngineConfig
from triptych.service.app import TABLE
from triptych.service.settings import sources
from triptych.service.settings.option_table import OPTIONS
from triptych.service.settings.parsers import byte_size
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.serve_config import Scaling, ServeConfig
from triptych.service.settings.sources import OTHER_VARIABLES

EXAMPLES = helm.examples()
CHARTS = helm.charts()


def of_kind(found: list[Manifest], kind: str, name: str = "triptych") -> Manifest:
    (one,) = (one for one in found if one["kind"] == kind and one["metadata"]["name"].startswith(name))
    return one


def pod(found: list[Manifest]) -> Manifest:
    (spec,) = pod_specs(of_kind(found, "Deployment"))
    return spec


def variables(container: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


def config(found: list[Manifest]) -> ServeConfig:
    """Return what the service reads from the file that the chart writes; the keys' files are elsewhere here."""
    (text,) = (one["data"]["triptych.yaml"] for one in found if "triptych.yaml" in one.get("data", {}))
    file = sources.from_mapping(yaml.safe_load(text), "triptych.yaml")
    settings = {name: value for name, value in file.settings.items() if not name.endswith("key_file")}
    return resolve_config(file.models or {"code": {"path": "code"}}, settings, file.groups)


def test_helm_finds_nothing_to_complain_about() -> None:
    report = helm.helm_python().lint(helm.CHART, strict=True)
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"] and not report["errors"]


@pytest.mark.parametrize("name", CHARTS)
def test_the_service_reads_the_file_that_the_chart_writes(name: str) -> None:
    assert config(CHARTS[name]).settings.drain_timeout_s == 30
    (container,) = pod(CHARTS[name])["containers"]
    assert container["args"] == ["serve", "--runtime", "local", "--config", "/etc/triptych/triptych.yaml"]
    assert {"name": "config", "mountPath": "/etc/triptych", "readOnly": True} in container["volumeMounts"]
    ours = {one for one in variables(container) if one.startswith("TRIPTYCH_")}
    assert ours <= {option.variable for option in OPTIONS} | OTHER_VARIABLES


def test_values_become_settings_of_the_service() -> None:
    values = {"models": {"a": {"path": "/models/a", "max_model_len": 512}, "b": "/models/b"}, "drainSeconds": 45}
    values |= {"config": {"max-num-seqs": 7, "log-format": "plain"}, "volume": {"enabled": True}, "gpu": {"count": 2}}
    found = config(helm.render(values))
    assert [(spec.name, spec.path, spec.engine.max_num_seqs) for spec in found.models] == [
        ("a", "/models/a", 7),
        ("b", "/models/b", 7),
    ]
    assert found.models[0].engine.max_model_len == 512
    assert {(spec.engine.device, spec.engine.tensor_parallel_size) for spec in found.models} == {("cuda", 2)}
    assert found.settings.drain_timeout_s == 45
    assert found.settings.log_format == "plain"  # which the chart sets too
    for nothing in (None, {"drain-timeout": None, "stream_stall_s": None}):  # Helm takes null for no value
        assert config(helm.render(values | {"config": nothing})).settings.drain_timeout_s == 45


def test_a_variable_of_the_image_does_not_win_over_the_chart() -> None:
    """The environment wins over the file, so what the image sets must be set again where a value differs."""
    (environment,) = re.findall(r"^ENV ((?:.*TRIPTYCH.*|.*\\\n)+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[
        -1:
    ]
    names = set(re.findall(r"TRIPTYCH_\w+(?==)", environment))
    assert names == {"TRIPTYCH_HOST", "TRIPTYCH_PORT", "TRIPTYCH_WEIGHTS_CACHE"}  # the schema refuses the first two
    (container,) = pod(CHARTS["models-dir"])["containers"]
    assert variables(container)["TRIPTYCH_WEIGHTS_CACHE"] == "/weights/cache"
    for name in ("weights_cache", "weights-cache"):
        (container,) = pod(helm.render({"config": {name: "/a"}}))["containers"]
        assert variables(container)["TRIPTYCH_WEIGHTS_CACHE"] == "/a"
    assert "TRIPTYCH_WEIGHTS_CACHE" not in variables(pod(CHARTS["defaults"])["containers"][0])


def test_a_changed_setting_starts_new_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = of_kind(helm.render(values), "Deployment")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/config"]
        return found

    assert checksum({}) != checksum({"config": {"max_num_seqs": 7}})
    assert checksum({}) == checksum({"replicas": 3})


def test_the_number_of_pods_is_left_to_the_scaler() -> None:
    assert all("replicas" not in of_kind(found, "Deployment")["spec"] for found in CHARTS.values())
    assert of_kind(helm.render({"replicas": 3}), "Deployment")["spec"]["replicas"] == 3
    scaled = helm.render({"replicas": 3, "autoscaling": {"kind": "hpa"}})
    assert "replicas" not in of_kind(scaled, "Deployment")["spec"]


@pytest.mark.parametrize("name", CHARTS)
def test_probes_ask_what_they_mean(name: str) -> None:
    (container,) = pod(CHARTS[name])["containers"]
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert set(paths.values()) <= TABLE.open_paths  # probes have no key


@pytest.mark.parametrize(
    "values",
    [
        *({"drainSeconds": drain} for drain in (0, 30, 600)),
        *({"config": {name: 300.5}} for name in ("drain_timeout", "drain-timeout", "stream-stall-s")),
    ],
)
def test_the_grace_is_longer_than_the_drain(values: dict[str, Any]) -> None:
    rendered = helm.render(values)
    found, settings = pod(rendered), config(rendered).settings
    (container,) = found["containers"]
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest = stop + settings.drain_timeout_s + settings.limits.stream_stall_s + 15
    assert found["terminationGracePeriodSeconds"] > longest
    readiness = container["readinessProbe"]
    assert stop >= readiness["periodSeconds"] * readiness["failureThreshold"]


@pytest.mark.parametrize("release", ["triptych", "chat"])
def test_everything_selects_the_pods_of_its_release(release: str) -> None:
    found = helm.render(EXAMPLES["production"], name=release)
    name = "triptych" if release == "triptych" else "chat-triptych"
    labels = of_kind(found, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
    selectors = [of_kind(found, "Service", name)["spec"]["selector"]]
    selectors += [
        of_kind(found, kind, name)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodMonitor")
    ]
    selectors += [of_kind(found, "PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]]
    selectors += [of_kind(found, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert all(selector["app.kubernetes.io/instance"] == release for selector in selectors)
    assert labels[of_kind(found, "PodMonitor", name)["spec"]["jobLabel"]] == "triptych"  # the job that the rules name
    job = of_kind(found, "Job", name)["spec"]["template"]["metadata"]["labels"]
    assert not any(selector.items() <= job.items() for selector in selectors)
    assert job["triptych.io/client"] == "true"


def test_scalers_look_at_the_pods_of_their_release() -> None:
    scaled = of_kind(CHARTS["production"], "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == of_kind(CHARTS["production"], "Deployment")["metadata"]["name"]
    saturation, tokens = (trigger["metadata"] for trigger in scaled["triggers"])
    assert float(saturation["threshold"]) == Scaling().target
    assert float(tokens["threshold"]) == EngineConfig().limits().max_num_batched_tokens
    assert all(
        '{job="triptych",namespace="ai",pod=~"triptych-[a-z0-9]+-[a-z0-9]+"}' in one["query"]
        for one in (saturation, tokens)
    )
    scaled = of_kind(CHARTS["gpu"], "HorizontalPodAutoscaler")["spec"]
    named = [one["pods"]["metric"]["name"] for one in scaled["metrics"]]
    assert named == re.findall(r"(triptych_\w+)\{", saturation["query"] + tokens["query"])


@pytest.mark.parametrize("name", ["metrics_port", "metrics-port"])
def test_prometheus_reads_the_port_for_monitoring_if_there_is_one(name: str) -> None:
    def admitted(found: list[Manifest]) -> list[tuple[str, int]]:
        rules = of_kind(found, "NetworkPolicy")["spec"]["ingress"]
        return [
            ("prometheus" if "prometheus" in str(source) else "clients", port["port"])
            for rule in rules
            for source in rule["from"]
            for port in rule["ports"]
        ]

    values = {"config": {name: 9400}, "monitoring": {"podMonitor": True}}
    found = helm.render(values)
    assert config(found).settings.metrics_port == 9400
    assert {"name": "metrics", "containerPort": 9400} in pod(found)["containers"][0]["ports"]
    (endpoint,) = of_kind(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics" and "authorization" not in endpoint
    assert admitted(found) == [("clients", 8000), ("prometheus", 9400)]
    without = helm.render({"monitoring": {"podMonitor": True}})
    (endpoint,) = of_kind(without, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "http" and "authorization" in endpoint
    assert admitted(without) == [("clients", 8000), ("prometheus", 8000)]
    assert admitted(helm.render({"config": {name: 9400}, "networkPolicy": {"clients": []}})) == [("prometheus", 9400)]


def test_an_endpoint_picker_chooses_among_the_pods_of_the_release() -> None:
    chart = CHARTS["inference-pool"]
    pool, (rule,) = of_kind(chart, "InferencePool"), of_kind(chart, "HTTPRoute")["spec"]["rules"]
    name = pool["metadata"]["name"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}]
    selector = pool["spec"]["selector"]["matchLabels"]
    assert selector.items() <= of_kind(chart, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pod(chart)["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    assert config(chart).settings.vllm_metrics and not config(CHARTS["production"]).settings.vllm_metrics
    picker, rules = pool["spec"]["endpointPickerRef"]["name"], of_kind(chart, "NetworkPolicy")["spec"]["ingress"]
    read = [port["port"] for rule in rules if picker in str(rule["from"]) for port in rule["ports"]]
    assert read == [config(chart).settings.metrics_port] != [0]  # it sends no key, which the other port asks for
    with pytest.raises(helm.helm_python().HelmError, match=r"inferencePool needs gateway\.enabled"):
        helm.render({"gateway": {"inferencePool": {"picker": "x"}}})


def test_an_ingress_passes_streams_on_and_waits_as_long_as_the_service() -> None:
    ingress = of_kind(CHARTS["ingress"], "Ingress")
    ((rule,), service) = (ingress["spec"]["rules"], of_kind(CHARTS["ingress"], "Service"))
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    nginx = {name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert nginx["proxy-buffering"] == "off"
    assert int(nginx["proxy-read-timeout"]) == ServeConfig(config(CHARTS["defaults"]).models).proxy_timeout_s


def test_the_route_leads_to_the_service_and_waits_as_long_as_it() -> None:
    route = of_kind(CHARTS["production"], "HTTPRoute")["spec"]
    ((rule,), service) = (route["rules"], of_kind(CHARTS["production"], "Service"))
    port = service["spec"]["ports"][0]["port"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": port}]
    plain = ServeConfig(config(CHARTS["defaults"]).models)
    assert rule["timeouts"]["request"] == f"{plain.proxy_timeout_s:.0f}s"
    (policy,) = (one["spec"] for one in CHARTS["production"] if one["kind"] == "NetworkPolicy")
    assert EXAMPLES["production"]["networkPolicy"]["clients"][0] in policy["ingress"][0]["from"]


def test_the_rules_and_the_dashboard_are_those_of_compose() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    assert of_kind(CHARTS["production"], "PrometheusRule")["spec"] == rules
    dashboard = of_kind(CHARTS["production"], "ConfigMap", "triptych-dashboard")["data"]["triptych.json"]
    committed = ROOT / "deploy" / "grafana" / "dashboards" / "triptych.json"
    assert yaml.safe_load(dashboard) == yaml.safe_load(committed.read_text())


def test_a_volume_of_models_is_served_as_it_is_and_within_the_pod_s_memory() -> None:
    found = pod(CHARTS["models-dir"])
    (container,) = found["containers"]
    settings = config(CHARTS["models-dir"]).settings.models
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == settings.models_dir]
    (volume,) = [one for one in found["volumes"] if one["name"] == mount["name"]]
    claim = of_kind(CHARTS["models-dir"], "PersistentVolumeClaim")["metadata"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["name"] and mount["readOnly"]
    assert claim["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert settings.memory is not None
    assert settings.memory < byte_size(container["resources"]["limits"]["memory"] + "B")


def test_a_gpu_s_pod_asks_for_a_gpu_and_keeps_compiled_kernels_on_a_volume() -> None:
    found = pod(CHARTS["gpu"])
    (container,) = found["containers"]
    resources = container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in found["tolerations"]
    assert container["image"].endswith("-cuda")
    assert {spec.engine.device for spec in config(CHARTS["gpu"]).models} == {"cuda"}
    # Kubernetes opens a volume to the pod's group: the service makes a folder of its own in it.
    parent, _, name = variables(container)["TRIPTYCH_KERNEL_CACHE"].rpartition("/")
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == parent and name]
    (volume,) = [one for one in found["volumes"] if one["name"] == mount["name"]]
    temporary = next(one["emptyDir"]["sizeLimit"] for one in found["volumes"] if one["name"] == "tmp")
    written = byte_size(volume["emptyDir"]["sizeLimit"] + "B") + byte_size(temporary + "B")
    assert written < byte_size(resources["limits"]["ephemeral-storage"] + "B")


def test_a_model_of_the_hub_is_downloaded_by_a_job_and_served_without_network() -> None:
    found = CHARTS["hub"]
    serving_pod, download = pod(found), of_kind(found, "Job", "triptych-download")
    (serving,), (checking,) = serving_pod["containers"], serving_pod["initContainers"]
    (job,) = pod_specs(download)
    (downloading,) = job["containers"]
    # The Job is not selected by the policy, or the Service, of the pods that serve, and only it may reach others.
    labels = download["spec"]["template"]["metadata"]["labels"]
    policies = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "NetworkPolicy"}
    assert policies["triptych"]["egress"] == []
    assert policies["triptych-download"]["podSelector"]["matchLabels"] == labels
    assert not policies["triptych"]["podSelector"]["matchLabels"].items() <= labels.items()
    # All three name the same models and the same volume, which one of them writes.
    models = [spec.path for spec in config(found).models]
    assert downloading["args"] == checking["args"] == ["download", *models]
    for container, offline in ((serving, True), (checking, True), (downloading, False)):
        [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == variables(container)["HF_HOME"]]
        assert mount.get("readOnly", False) is offline
        assert (variables(container).get("HF_HUB_OFFLINE") == "1") is offline
        assert container["image"] == serving["image"]
    claim = of_kind(found, "PersistentVolumeClaim")["metadata"]["name"]
    for spec in (serving_pod, job):
        [volume] = [one for one in spec["volumes"] if one["name"] == "models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim


def test_other_models_have_a_job_of_their_own() -> None:
    """A Job cannot be changed: an upgrade with the name of the last one would fail."""

    def job(values: dict[str, Any]) -> Manifest:
        return of_kind(helm.render({**EXAMPLES["hub"], **values}), "Job", "triptych-download")

    first = job({})
    for values in ({"models": {"b": "hf:google-t5/t5-small"}}, {"image": {"tag": "1"}}, {"keys": {"secret": "a"}}):
        other = job(values)
        assert other["spec"] != first["spec"] and other["metadata"]["name"] != first["metadata"]["name"]
    assert job({"config": {"max_num_seqs": 3}}) == first


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {}}, "additional properties 'model' not allowed"),
        ({"config": {"port": 1}}, "invalid propertyName 'port'"),
        ({"models": {"a b": "x"}}, "invalid propertyName 'a b'"),
        ({"models": {"a": {"max_model_len": 3}}}, "missing property 'path'"),
        ({"resources": {"limits": {"cpu": None}}}, "missing property 'cpu'"),
        ({"volume": {"enabled": True, "download": True}}, "no model of `models` begins with hf:"),
        ({"models": {"a": "hf:x/y"}}, "pods have no network to download hf: models"),
        ({"volume": {"modelsDir": {"enabled": True}}}, "volume.download and volume.modelsDir need volume.enabled"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs: name the Gateway"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.helm_python().HelmError, match=re.escape(message)):
        helm.render(values)
