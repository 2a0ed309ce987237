"""Reading the dashboard, the rules and the autoscaler: their queries, and the metrics those name."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from deploy.monitoring import DASHBOARD, RULES
from tests.deploy import helm


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> dict[str, str]:
    """ "Panel, reference" -> PromQL, with Grafana's variables filled in as Grafana does."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m").replace("$model", ".+")
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    }


def scaling_queries() -> dict[str, str]:
    """ "autoscaling, number" -> PromQL of the ScaledObject's triggers."""
    (rendered,) = helm.rendered({"autoscaling": {"kind": "keda"}})
    (triggers,) = (one["spec"]["triggers"] for one in rendered if one["kind"] == "ScaledObject")
    return {f"autoscaling {number}": trigger["metadata"]["query"] for number, trigger in enumerate(triggers)}


def metrics_in(query: str) -> set[str]:
    """The service's metrics that a query names; not those that rules record, whose names have colons."""
    return set(re.findall(r"(?<![\w:])triptych_\w+", query))
