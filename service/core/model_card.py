"""Reads the example texts of a model card: `widget` in the front matter of README.md, as on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 16  # of README.md that are read
_MOST_CHARACTERS = 400  # of an example
_MOST_EXAMPLES = 4


def card_examples(path: Path) -> tuple[str, ...]:
    """Return the first example texts of a checkpoint's card."""
    try:
        with (path if path.is_dir() else path.parent).joinpath("README.md").open("rb") as file:
            head = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ()
    start, _, rest = head.replace("\r\n", "\n").partition("---\n")
    matter, end, _ = rest.partition("\n---")
    return _texts(matter) if not start and end else ()


def _texts(matter: str) -> tuple[str, ...]:
    import yaml

    try:
        found: Any = yaml.load(matter, yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return ()
    widget = found.get("widget") if isinstance(found, dict) else None
    listed = widget if isinstance(widget, list) else []
    texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    found = [text for text in texts if isinstance(text, str) and 0 < len(text) <= _MOST_CHARACTERS]
    return tuple(found[:_MOST_EXAMPLES])
