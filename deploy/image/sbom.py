"""A script that writes the software bill of materials of its environment, as CycloneDX 1.6 JSON.

It lists Python, all installed distributions and Debian packages. The format is a list of names and versions, so a
generator with a dozen dependencies of its own would be the larger risk.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")
Component = dict[str, Any]


def python_components() -> Iterator[Component]:
    for one in metadata.distributions():
        name, version = one.metadata["Name"], one.version
        # Names are normalised as https://packaging.python.org/en/latest/specifications/name-normalization/ says.
        purl = f"pkg:pypi/{name.lower().replace('_', '-').replace('.', '-')}@{quote(version)}"
        component: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        if "License-Expression" in one.metadata:
            component["licenses"] = [{"expression": one.metadata["License-Expression"]}]
        yield component


def python_itself() -> Component:
    """Return the interpreter, which comes from the base image and is no distribution."""
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    cpe = f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
    return {"type": "platform", "bom-ref": purl, "name": "python", "version": version, "purl": purl, "cpe": cpe}


def debian_components(status: Path = DPKG_STATUS) -> Iterator[Component]:
    """Return the packages of a dpkg status file; none without such a file."""
    if not status.exists():
        return
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def bill() -> dict[str, Any]:
    """Return the document, which depends only on the environment."""
    components = {one["bom-ref"]: one for one in (python_itself(), *python_components(), *debian_components())}
    application = next(one for one in components.values() if one["name"] == "triptych")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": application | {"type": "application"}},
        "components": sorted(
            (one for one in components.values() if one is not application), key=lambda one: str(one["bom-ref"])
        ),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
