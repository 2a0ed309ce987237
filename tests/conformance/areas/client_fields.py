"""Fields of the newest published clients: each is in the table of docs/fields.md, as used, ignored or refused.

Types of openai, anthropic and huggingface_hub are imported in a process of their own; sources of cohere and sglang are
read. vLLM's wheel has 300 MB: its fields are recorded in tests/data/client_fields.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.data.record_client_fields import fields
from tests.service.dialects.test_fields import missing

_PROGRAM = "from tests.conformance.areas.client_fields import print_missing; print_missing()"


def run(report: Report, packages: Packages) -> None:
    for package in ("cohere", "sglang"):
        for route, names in fields(package, packages.wheel(package)).items():
            _record(report, f"{package}: {route}", missing(set(names), route))
    installed = packages.importable("openai", "anthropic", "huggingface_hub")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(installed), os.getcwd()))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        report.fails("types of clients", done.stderr[-300:])
        return
    for case, left in json.loads(done.stdout).items():
        _record(report, case, left)


def print_missing() -> None:
    """Print, as JSON, which fields of the clients' types are in no table, by type."""
    from tests.service.dialects.test_fields import SENT_BACK, TYPES, missing_of

    cases = [(route, "", name) for route, name in TYPES] + SENT_BACK
    print(json.dumps({name: missing_of(route, place, name) for route, place, name in cases}))


def _record(report: Report, case: str, left: list[str]) -> None:
    report.check(case, not left, ", ".join(left))
