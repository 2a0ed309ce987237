"""A small renderer for the kustomizations of deploy/kuberay, for where there is no `kubectl kustomize`.

It knows `resources` (files and folders), `components`, `patches` that add a value, `images` and `labels` (on the object
alone), and refuses every key it does not know. A file above the folder of its kustomization is refused as kustomize
refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KEYS = {"apiVersion", "kind", "resources", "components", "patches", "images", "labels"}


def render(folder: Path) -> list[Manifest]:
    """Every object of the kustomization in `folder`; raises `ValueError` for what this renderer does not know."""
    return _rendered(folder, [])


def _rendered(folder: Path, found: list[Manifest]) -> list[Manifest]:
    """The objects of `folder` after those `found`, which a component changes too."""
    config = _read(folder / "kustomization.yaml")[0]
    _only(config, _KEYS, folder)
    found += [one for name in config.get("resources", []) for one in _resource(folder, name)]
    for name in config.get("components", []):
        _rendered((folder / name).resolve(), found)
    for patch in config.get("patches", []):
        _only(patch, {"path", "target"}, folder)
        target = patch["target"]
        (one,) = (one for one in found if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"]))
        for operation in _read(folder / patch["path"])[0]:
            _add(one, operation)
    for label in config.get("labels", []):
        _only(label, {"pairs"}, folder)
        for one in found:
            one["metadata"].setdefault("labels", {}).update(label["pairs"])
    for image in config.get("images", []):
        _only(image, {"name", "newTag"}, folder)
        for container in (c for one in found for c in containers(one)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    return found


def _add(manifest: Any, operation: Mapping[str, Any]) -> None:
    """Carry out an operation of RFC 6902 that adds."""
    if operation["op"] != "add":
        raise ValueError(f"{operation['op']} is not known to this renderer")
    *path, last = operation["path"].removeprefix("/").split("/")
    for part in path:
        manifest = manifest[int(part)] if isinstance(manifest, list) else manifest[part]
    if isinstance(manifest, list):
        assert last == "-"
        manifest.append(operation["value"])
    else:
        manifest[last] = operation["value"]


def containers(manifest: Any) -> Iterator[Manifest]:
    """Every container in a manifest, wherever its pod template is."""
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from value
            else:
                yield from containers(value)
    elif isinstance(manifest, list):
        for one in manifest:
            yield from containers(one)


def pod_specs(manifest: Any) -> Iterator[Manifest]:
    """Every pod's specification in a manifest."""
    if isinstance(manifest, dict):
        if "containers" in manifest:
            yield manifest
        for value in manifest.values():
            yield from pod_specs(value)
    elif isinstance(manifest, list):
        for one in manifest:
            yield from pod_specs(one)


def _resource(folder: Path, name: str) -> list[Manifest]:
    path = folder / name
    if path.is_dir():
        return _rendered(path.resolve(), [])
    _inside(folder, path)
    return _read(path)


def _read(path: Path) -> list[Any]:
    # Through JSON, so that each object is a tree: what anchors share would be changed in all places.
    return [json.loads(json.dumps(one)) for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def _only(mapping: Mapping[str, Any], known: set[str], folder: Path) -> None:
    if unknown := set(mapping) - known:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))} is not known to this renderer")


def _inside(folder: Path, path: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} lies outside {folder}, where kustomize reads no file")
