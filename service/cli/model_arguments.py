"""Reads the arguments of commands that name a model: `[NAME=]PATH`, and finds the model's folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from triptych.model import names
from triptych.model.checkpoint import hub, hub_names, progress
from triptych.model.errors import ConfigError

_UNNAMED = ("/", "./", "../", "~", "hf:", "http://", "https://")  # with these a text begins with its path


def named(text: str) -> tuple[str, str]:
    """Split `[NAME=]PATH`, and say what the path means. By default a model has the name of its folder or repository.

    Raises `ConfigError` for a path that is no model.
    """
    name, equals, path = text.partition("=")
    if not equals or text.startswith(_UNNAMED):
        name, path = "", text
    elif not name:
        raise ConfigError(f"expected [NAME=]PATH, found {text!r}")
    if not path:
        raise ConfigError(f"expected [NAME=]PATH, found {text!r}")
    found = names.checked(path)
    if names.hides_folder(path):
        print(f"triptych: {path} is the embedded model; for the folder here give ./{path}", file=sys.stderr)
    return name or names.model_name(path), found


def folder(path: str) -> Path:
    """Return the folder of a path that `named` returned, or of a model of the Hub, which is downloaded."""
    if not hub_names.is_hub_name(path):
        return Path(path)
    show_downloads()
    return hub.local_folder(path)


def show_downloads() -> None:
    """Let downloads write lines to standard error where it is no terminal."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger(progress.__name__).setLevel(logging.INFO)
