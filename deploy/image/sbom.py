"""A script that writes the software bill of materials of its root file system, as CycloneDX 1.6 JSON.

It lists Python, all installed distributions with what their wheels say is compiled into them (PEP 770), and Debian's
packages, each with its licences. The format is a list of names and versions, so a generator with a dozen dependencies
of its own would be the larger risk.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path("/")
Component = dict[str, Any]

_KEPT = ("type", "name", "version", "purl", "cpe", "licenses", "hashes")  # of a component of a wheel's own bill
_CLASSIFIER = "License :: "
_SPDX_SIMPLE = {"MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "PSF-2.0"}


def python_components() -> Iterator[Component]:
    for one in metadata.distributions():
        name, version = one.metadata["Name"], one.version
        # Names are normalised as https://packaging.python.org/en/latest/specifications/name-normalization/ says.
        purl = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{quote(version)}"
        component: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        if licences := python_licences(one.metadata):
            component["licenses"] = licences
        if inside := list(compiled_in(one)):
            component["components"] = inside
        yield component


def python_licences(fields: Any) -> list[dict[str, Any]]:
    """Return a distribution's licences: its SPDX expression, else what its older fields say."""
    if "License-Expression" in fields:
        return [{"expression": fields["License-Expression"]}]
    named = (fields.get("License") or "").strip().partition("\n")[0].strip()
    classes = [one for one in fields.get_all("Classifier") or [] if one.startswith(_CLASSIFIER)]
    names = [named] if named else [one.rpartition(" :: ")[2] for one in classes]
    return [licence(one) for one in names]


def licence(name: str) -> dict[str, Any]:
    return {"license": {"id" if name in _SPDX_SIMPLE else "name": name}}


def compiled_in(distribution: metadata.Distribution) -> Iterator[Component]:
    """Return what the bills in a wheel list, such as Rust's crates and libraries that auditwheel copied."""
    seen = {(distribution.metadata["Name"], distribution.version)}
    for file in distribution.files or ():
        if file.parent.name == "sboms" and file.name.endswith(".json"):
            for one in json.loads(file.read_text(encoding="utf-8")).get("components", ()):
                if (key := (one["name"], one.get("version"))) not in seen:
                    seen.add(key)
                    yield {field: one[field] for field in _KEPT if field in one}


def python_itself() -> Component:
    """Return the interpreter, which comes from the base image and is no distribution."""
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    cpe = f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
    licences = [licence("PSF-2.0")]
    return {
        **{"type": "platform", "bom-ref": purl, "name": "python", "version": version},
        **{"licenses": licences, "purl": purl, "cpe": cpe},
    }


def debian_components(root: Path = ROOT) -> Iterator[Component]:
    """Return the packages of a root's dpkg; none where there is no dpkg."""
    status = root / "var/lib/dpkg/status"
    if not status.exists():
        return
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            yield component | {"licenses": [licence(one) for one in debian_licences(root / "usr/share/doc" / name)]}


def debian_licences(folder: Path) -> list[str]:
    """Return the short names of a package's copyright file, or the common licences that an older one points to."""
    file = folder / "copyright"
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    named = re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)
    pointed = re.findall(r"/usr/share/common-licenses/([A-Za-z]+-?[\d.]*\d)", text)
    return sorted({one.strip() for one in named} or set(pointed)) or [f"see /usr/share/doc/{folder.name}/copyright"]


def bill(root: Path = ROOT) -> dict[str, Any]:
    """Return the document, which depends only on the root file system."""
    components = {one["bom-ref"]: one for one in (python_itself(), *python_components(), *debian_components(root))}
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
