"""The dashboard and the rules: made from their source, understood by Prometheus, and about metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess

import httpx
import pytest
import yaml

from deploy.monitoring import RULES, rendered
from tests.deploy.docker import ROOT
from tests.deploy.monitoring import dashboard, dashboard_queries, metrics_in, rules, scaling_queries
from tests.service.processes import ServiceProcess
from triptych.service.core.errors import SERVER_FAULTS
from triptych.service.observability.metric_families import FINE_SECONDS

RULE_QUERIES = {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
QUERIES = {**dashboard_queries(), **RULE_QUERIES, **scaling_queries()}
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def scraped(embedded_service: ServiceProcess) -> set[str]:
    """The names in a scrape of a service that has seen each kind of request, and has a model that transcribes; of
    gauges also those that none of its models has, as one without recurrent layers has no slots for states."""
    url = embedded_service.url
    for what in ("unload", "load"):
        headers = {"Authorization": "Bearer key"}
        reply = httpx.post(f"{url}/models/{what}", json={"name": "embed"}, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
    for path, body in (
        ("/generate", {"model": "code", "prompt": "import os", "max_tokens": 4}),
        ("/encode", {"model": "embed", "input": "a cat"}),
        ("/generate", {"model": "code", "prompt": "x", "max_tokens": -1}),
    ):
        httpx.post(url + path, json=body, timeout=60)
    text = httpx.get(f"{url}/metrics").text
    gauges = set(re.findall(r"^# TYPE (\w+) gauge$|^# TYPE (triptych_tenant_\w+) counter$", text, re.MULTILINE))
    gauges = {name for pair in gauges for name in pair if name}  # and counters by name of key: it has no keys
    assert "# TYPE triptych_proxy_seconds histogram" in text.splitlines()
    gauges.add("triptych_proxy_seconds_bucket")  # only Ray's HAProxy fills it
    return gauges | {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("path", list(rendered()), ids=lambda path: path.name)
def test_committed_files_equal_generated_ones(path: object) -> None:
    assert rendered()[path].split() == path.read_text().split(), "run `make monitoring`"  # type: ignore[index,attr-defined]


def test_prometheus_reads_the_rules() -> None:
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    assert config["rule_files"] == [RULES.name]


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", "rules.yaml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def test_the_error_budget_is_spent_by_what_is_our_fault() -> None:
    counted = [
        re.findall(r'reason=~"([^"]+)"', rule["expr"]) for rule in rules() if ":errors:" in rule.get("record", "")
    ]
    assert len(counted) == 4 and all(one == ["|".join(SERVER_FAULTS)] * 2 for one in counted)


def test_a_bound_of_an_objective_is_that_of_a_bucket() -> None:
    bounds = {f"{bound}" for bound in FINE_SECONDS}
    asked = {le for query in RULE_QUERIES.values() for le in re.findall(r'le="([^"]+)"', query)}
    assert asked and asked <= bounds


def test_every_refusal_by_load_counts_as_one() -> None:
    """Each reason of a 429 that asks to try again, but for those of /v1/files and /v1/batches, which run no model."""
    call = re.compile(r'(?:no_room|try_again)\((?:f?"[^"]*"|\w+), "(\w+)"')
    reasons = {found for path in (ROOT / "service").rglob("*.py") for found in call.findall(path.read_text())}
    reasons -= {"batches", "uploads"}
    counted = re.search(r'reason=~"([^"]+)"', RULE_QUERIES["TriptychRefusing"])
    assert counted is not None and "image_bytes" in reasons
    assert [one for one in sorted(reasons) if not re.fullmatch(counted[1], one)] == []


def test_each_alert_fires_on_what_it_is_for() -> None:
    promtool("test", "rules", "rules_test.yaml")
    tested = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tested for one in test["alert_rule_test"] if one.get("exp_alerts")}
    quiet = {one["alertname"] for one in tested[0]["alert_rule_test"] if not one.get("exp_alerts")}
    assert quiet == fired == set(ALERTS)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_names_metrics_of_the_service(name: str, scraped: set[str]) -> None:
    assert metrics_in(QUERIES[name]) <= scraped


def test_a_query_names_rules_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {one for query in QUERIES.values() for one in re.findall(r"triptych:\w+:\w+", query)}
    assert named <= recorded


def test_control_a_metric_that_does_not_exist_is_seen(scraped: set[str]) -> None:
    assert metrics_in('rate(triptych_tokens_total{model="a"}[5m])') - scraped == {"triptych_tokens_total"}


def test_each_alert_is_explained() -> None:
    explained = (ROOT / "docs" / "monitoring.md").read_text()
    assert [name for name in ALERTS if f"`{name}`" not in explained] == []


def test_the_dashboard_fits_its_columns_and_its_provisioning() -> None:
    panels = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in panels)
    cells = [(x, y) for p in panels for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    grafana = ROOT / "deploy" / "grafana"
    (source,) = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((grafana / "provisioning/dashboards/triptych.yaml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert source["type"] == dashboard()["panels"][0]["datasource"]["type"]
    assert source["url"] == "http://prometheus:9090"
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["grafana"]["volumes"]
