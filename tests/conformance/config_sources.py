"""Model settings in files and code of packages, and the defaults of transformers' configuration classes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_FEWEST = 5  # keys of a literal that is taken for a config.json


def class_defaults() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the library saves for each of its classes without arguments."""
    for model_type in CONFIG_MAPPING:
        try:
            yield f"class {model_type}", _saved(CONFIG_MAPPING[model_type]())
        except Exception:
            continue  # a class that needs its parts


def package_configs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings in a package's config.json files and in literals of its Python files, each once."""
    seen = set[str]()
    for path in sorted(folder.rglob("*")):
        found: Iterator[dict[str, Any]] = iter(())
        if path.name == "config.json":
            found = _of_file(path)
        elif path.suffix == ".py" and path.is_file():
            found = _of_code(path.read_text(encoding="utf-8", errors="replace"))
        for number, raw in enumerate(found):
            text = json.dumps(raw, sort_keys=True, default=repr)
            if text not in seen:
                seen.add(text)
                yield f"{'/'.join(path.parts[-2:])} {number} {raw['model_type']}", raw


def _of_file(path: Path) -> Iterator[dict[str, Any]]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return
    if isinstance(raw, dict) and isinstance(raw.get("model_type"), str):
        yield raw


def _of_code(text: str) -> Iterator[dict[str, Any]]:
    """Yield dictionaries that name a `model_type`, and calls of the library's classes, whose values are literals."""
    if "model_type" not in text and "Config(" not in text:
        return
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        try:
            raw = (
                _of_call(node) if isinstance(node, ast.Call) else _of_dict(node) if isinstance(node, ast.Dict) else None
            )
        except Exception:
            continue  # no literal, or values that the class refuses
        if raw is not None:
            yield raw


def _of_dict(node: ast.Dict) -> dict[str, Any] | None:
    names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
    if "model_type" not in names or len(names) < _FEWEST:
        return None
    raw = ast.literal_eval(node)
    return raw if isinstance(raw["model_type"], str) and json.dumps(raw) else None


def _of_call(node: ast.Call) -> dict[str, Any] | None:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name not in _classes() or not node.keywords:
        return None
    values = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    return _saved(getattr(transformers, name)(**values))


@cache
def _classes() -> frozenset[str]:
    return frozenset(name for name in CONFIG_MAPPING._mapping.values() if hasattr(transformers, name))


def _saved(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found
