"""The Grafana dashboard, read and written again by Grafana's own types of it: a field or value that they lack is lost.

The types are those of `grafana-foundation-sdk`, which Grafana generates from its schemas: of panels with their options,
and of Prometheus' queries. They are imported in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from deploy.monitoring import DASHBOARD
from tests.conformance.packages import Packages
from tests.conformance.report import Report

_SDK = "grafana-foundation-sdk==1769699379!11.6.0"  # the newest Grafana that it is published for
_PROGRAM = """
import json, sys
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()
print(encoder.JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))
"""


def run(report: Report, packages: Packages) -> None:
    environment = os.environ | {"PYTHONPATH": str(packages.importable(_SDK))}

    def lost(dashboard: Any) -> list[str]:
        command = [sys.executable, "-c", _PROGRAM]
        text = json.dumps(dashboard)
        done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=300)
        return [done.stderr[-300:]] if done.returncode else list(differences(dashboard, json.loads(done.stdout)))

    written = json.loads(DASHBOARD.read_text())
    found = lost(written)
    for number, panel in enumerate(written["panels"]):
        here = [one for one in found if one.startswith(f".panels[{number}]")]
        report.check(f"panel {panel['title']}", not here, ", ".join(here))
    elsewhere = [one for one in found if not one.startswith(".panels[")]
    report.check("the dashboard itself", not elsewhere, ", ".join(elsewhere))
    written["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    control = ".panels[0].fieldConfig.defaults.units"
    report.check("control: a field that Grafana lacks is seen", lost(written) == [*found, control])


def differences(sent: Any, back: Any, place: str = "") -> Iterator[str]:
    """Yield the places in `sent` that `back` lacks or has another value of."""
    if isinstance(sent, dict) and isinstance(back, dict):
        for name, value in sent.items():
            if name in back:
                yield from differences(value, back[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}"
    elif isinstance(sent, list) and isinstance(back, list) and len(sent) == len(back):
        for number, (one, other) in enumerate(zip(sent, back, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif sent != back:
        yield place
