"""A small renderer for the kustomizations of deploy/, for where there is no `kubectl kustomize`.

It knows `resources`, `images`, `labels` (on the object alone), `patches` (JSON patches by kind and name) and
`configMapGenerator` (files, no suffix), and refuses every key it does not know. A file above the folder of its
kustomization is refused as kustomize refuses it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KEYS = {"apiVersion", "kind", "resources", "images", "labels", "patches", "configMapGenerator"}


def render(folder: Path) -> list[Manifest]:
    """Every object of the kustomization in `folder`; raises `ValueError` for what this renderer does not know."""
    config = _read(folder / "kustomization.yaml")[0]
    _only(config, _KEYS, folder)
    found = [one for name in config.get("resources", []) for one in _resource(folder, name)]
    found += [_config_map(folder, one) for one in config.get("configMapGenerator", [])]
    for patch in config.get("patches", []):
        _patch(found, patch, folder)
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
        return render(path)
    _inside(folder, path)
    return _read(path)


def _read(path: Path) -> list[Manifest]:
    # Anchors may be shared: each object is to be a tree of its own.
    return [copy.deepcopy(one) for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def _config_map(folder: Path, config: Mapping[str, Any]) -> Manifest:
    _only(config, {"name", "files", "options"}, folder)
    _only(config["options"], {"disableNameSuffixHash", "labels"}, folder)
    if not config["options"].get("disableNameSuffixHash"):
        raise ValueError(f"{folder}: a generated name with a suffix is not known here")
    files = [folder / name for name in config["files"]]
    for file in files:
        _inside(folder, file)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config["name"], "labels": dict(config["options"].get("labels", {}))},
        "data": {file.name: file.read_text(encoding="utf-8") for file in files},
    }


def _patch(found: list[Manifest], config: Mapping[str, Any], folder: Path) -> None:
    _only(config, {"target", "patch"}, folder)
    _only(config["target"], {"kind", "name"}, folder)
    kind, name = config["target"]["kind"], config["target"]["name"]
    (target,) = (one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name))
    for operation in yaml.safe_load(config["patch"]):
        _operate(target, operation["op"], operation["path"], operation.get("value"))


def _operate(target: Any, operation: str, path: str, value: Any) -> None:
    """One operation of RFC 6902."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.lstrip("/").split("/"))
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        if (operation, last) != ("add", "-"):
            raise ValueError(f"{operation} {path}: only appending to a list is known")
        target.append(value)
    elif operation == "add" or (operation == "replace" and last in target):
        target[last] = value
    elif operation == "remove":
        del target[last]
    else:
        raise ValueError(f"{operation} {path} is not known or names nothing")


def _only(mapping: Mapping[str, Any], known: set[str], folder: Path) -> None:
    if unknown := set(mapping) - known:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))} is not known to this renderer")


def _inside(folder: Path, path: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} lies outside {folder}, where kustomize reads no file")
