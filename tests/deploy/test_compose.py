"""compose.yaml as text: what holds for every service in it. `test_compose_up.py` starts it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.docker import ROOT
from triptych.service.settings.option_table import OPTIONS
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.settings.sources import OTHER_VARIABLES

COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVING = ("triptych", "triptych-gpu")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert "privileged" not in service and "network_mode" not in service
    assert "healthcheck" in service or name in SERVING  # theirs is the image's


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned(name: str) -> None:
    default = SERVICES[name]["image"].partition(":-")[2].rstrip("}")
    assert default.startswith("triptych:") or not default.endswith(("latest", ":")), default


def test_dependent_containers_wait_for_a_healthy_service() -> None:
    for name in ("prometheus", "loadtest"):
        assert SERVICES[name]["depends_on"]["triptych"] == {"condition": "service_healthy"}
    assert SERVICES["grafana"]["depends_on"]["prometheus"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", SERVING)
def test_it_has_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    settings = ServiceSettings(drain_timeout_s=float(service["environment"]["TRIPTYCH_DRAIN_TIMEOUT"]))
    grace = float(service["stop_grace_period"].rstrip("s"))
    assert grace > settings.drain_timeout_s + settings.limits.stream_stall_s + 15


def test_profiles_are_what_the_readme_says() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles["triptych"] == []
    assert {p for found in profiles.values() for p in found} == {"gpu", "monitoring", "loadtest", "download"}
    assert (ROOT / "deploy/.env").read_text() == "COMPOSE_PROFILES=monitoring\n"


@pytest.mark.parametrize("name", SERVING)
def test_compose_sets_only_known_variables(name: str) -> None:
    known = {option.variable for option in OPTIONS} | OTHER_VARIABLES
    assert set(SERVICES[name]["environment"]) - {"HF_HOME", "HF_HUB_OFFLINE"} <= known


@pytest.mark.parametrize("name", SERVING)
def test_one_downloads_models_and_those_that_serve_have_them_to_read(name: str) -> None:
    download, serving = SERVICES["download"], SERVICES[name]
    home = download["environment"]["HF_HOME"]
    assert (
        download["command"] == "download ${MODELS:-}"
        and serving["command"].startswith("serve ")
        and " ${MODELS:-}" in serving["command"]
    )
    assert download["volumes"] == [f"models:{home}"]
    assert serving["volumes"][:2] == [f"models:{home}:ro", "weights:/weights"]
    assert serving["environment"]["HF_HOME"] == home and serving["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in download["environment"]
    weights = serving["environment"]["TRIPTYCH_WEIGHTS_CACHE"]
    for folder in (home, weights):  # whose owner a new volume takes over
        assert f"COPY --from=build --chown=10001:10001 {folder} {folder}\n" in (ROOT / "Dockerfile").read_text()


def test_a_gpu_s_service_has_a_gpu_and_keeps_compiled_kernels_in_a_volume_of_its_own() -> None:
    service = SERVICES["triptych-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    folder = service["environment"]["TRIPTYCH_KERNEL_CACHE"]
    assert service["volumes"][2:] == [f"kernels:{folder}"] and "kernels" in COMPOSE["volumes"]
    assert f"COPY --from=build --chown=10001:10001 {folder} {folder}\n" in (ROOT / "Dockerfile").read_text()
    others = [name for name, one in SERVICES.items() if any("kernels:" in volume for volume in one.get("volumes", []))]
    assert others == ["triptych-gpu"]  # what lies there is run: no other service writes it


def test_keys_are_secrets_and_in_no_variable() -> None:
    assert all(SERVICES[name]["secrets"] == ["api_keys"] for name in SERVING)
    assert SERVICES["prometheus"]["secrets"] == ["metrics_key"]
    assert set(COMPOSE["secrets"]) == {"api_keys", "metrics_key"}
    assert not any("TRIPTYCH_API_KEYS" in service.get("environment", {}) for service in SERVICES.values())
