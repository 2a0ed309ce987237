"""The chart of deploy/helm, rendered by Helm's own engine without a cluster."""

from __future__ import annotations

import multiprocessing
from functools import cache
from typing import Any

import yaml

from tests.deploy.docker import ROOT
from tests.deploy.kustomize import Manifest

CHART = ROOT / "deploy" / "helm"
NAMESPACE = "ai"


@cache
def helm_python() -> Any:
    """Import Helm: it starts threads, which a process that forks must not have."""
    import helm_python

    helm_python.disable_logging()
    return helm_python


def render(values: dict[str, Any], name: str = "triptych") -> list[Manifest]:
    """Return every object of the chart; raises `helm_python.HelmError` for values that it refuses."""
    with helm_python().Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace=NAMESPACE)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def rendered(*all_values: dict[str, Any]) -> list[list[Manifest]]:
    """Return what `render` returns for each; a fork renders, so that this process gets none of Helm's threads."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork").Process(target=lambda: theirs.send([*map(render, all_values)]))
    fork.start()
    theirs.close()
    found: list[list[Manifest]] = ours.recv()
    fork.join()
    return found


@cache
def charts() -> dict[str, list[Manifest]]:
    """Return the rendered examples."""
    return dict(zip(examples(), rendered(*examples().values()), strict=True))


@cache
def examples() -> dict[str, dict[str, Any]]:
    """Return the values of each example, and the chart's own."""
    found = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
    return {"defaults": {}, **found}
