"""The chart of deploy/helm, rendered by Helm's own engine without a cluster."""

from __future__ import annotations

from typing import Any

import helm_python
import yaml

from tests.deploy.docker import ROOT
from tests.deploy.kustomize import Manifest

CHART = ROOT / "deploy" / "helm"
NAMESPACE = "ai"
helm_python.disable_logging()


def render(values: dict[str, Any], name: str = "triptych") -> list[Manifest]:
    """Return every object of the chart; raises `helm_python.HelmError` for values that it refuses."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace=NAMESPACE)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def examples() -> dict[str, dict[str, Any]]:
    """Return the values of each example, and the chart's own."""
    found = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
    return {"defaults": {}, **found}
