"""Says what a user means by a model: an embedded model, a path, or a model of the Hub.

    code                      an embedded model, even if there is a folder `code` here
    ./code  /models/a  ~/a    a path: it begins with `/`, `.` or `~`, or such a folder or file is here
    org/name  hf:org/name     a model of the Hub (`triptych.model.checkpoint.hub_names`), unless the folder is here

Every command, the configuration file and `LLM` read names with `locate`.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from triptych.model.checkpoint import hub_names
from triptych.model.checkpoint.folder_kind import describe_path
from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import is_gguf
from triptych.model.gguf.paths import model_name as gguf_name
from triptych.model.pretrained import named_models

_LONGEST_NAME = 200
_PATH_BEGINNINGS = ("/", "./", "../", "~")


def locate(text: str) -> str:
    """Return the path that a text means, or the canonical name (`hf:...`) of a model of the Hub.

    Raises `ConfigError` for a malformed name. Whether the path exists is not checked.
    """
    if (found := named_models().get(text)) is not None:
        return found
    if hub_names.is_hub_name(text):
        return str(hub_names.parse(text))
    if text.startswith("~"):
        return os.path.expanduser(text)
    if _is_path(text) or not hub_names.may_be_hub_name(text):
        return text
    return str(hub_names.parse(text))


def checked(text: str) -> str:
    """Return what `locate` does; raises `ConfigError` for a path that is no model, too."""
    found = locate(text)
    path = Path(found)
    if hub_names.is_hub_name(found) or path.is_dir() or is_gguf(path):
        return found
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{text}: {describe_path(path)}")
    if "/" not in text and (near := difflib.get_close_matches(text, named_models(), n=1, cutoff=0.7)):
        raise ConfigError(f"{text}: no such folder; did you mean the embedded model {near[0]}?")
    if hub_names.may_be_hub_name(text) and not text.startswith(_PATH_BEGINNINGS):  # a part of it is a folder here
        raise ConfigError(f"{text}: no such folder; for the model of the Hub give hf:{text}")
    raise ConfigError(
        f"{text}: no such folder; expected a Hugging Face checkpoint folder, a GGUF file, ORGANISATION/NAME of the "
        f"Hub, or one of {', '.join(named_models())}"
    )


def checked_adapter(name: str, text: str) -> str:
    """Return what `locate` does of the folder of the LoRA adapter `name`; raises `ConfigError` if there is none."""
    checked_name(name)
    found = locate(text)
    if hub_names.is_hub_name(found) or Path(found).is_dir():
        return found
    what = "a file" if Path(found).exists() else "no such folder"
    raise ConfigError(
        f"the adapter {name}: {text}: {what}; expected the folder of a LoRA adapter, with adapter_config.json, or "
        "hf:ORGANISATION/NAME of the Hub"
    )


def model_name(text: str) -> str:
    """Return the name by which a model is served unless it is given another. Raises `ConfigError`."""
    if text in named_models():
        return text
    found = locate(text)
    if hub_names.is_hub_name(found):
        name = hub_names.parse(found)
        return gguf_name(Path(name.selector)) if name.is_file else name.model_name
    return gguf_name(Path(found)) if is_gguf(Path(found)) else Path(found).resolve().name


def checked_name(name: str) -> str:
    """Return a name by which a model can be served; raises `ConfigError` if it would break log lines or commands."""
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or name.strip() != name or set(name) & set("\"'\\"):
        expected = f"1 to {_LONGEST_NAME} printable characters without quotes and backslashes"
        raise ConfigError(f"model name {name[:_LONGEST_NAME]!r}: expected {expected}; rename the model with NAME=PATH")
    return name


def hides_folder(text: str) -> bool:
    """Return whether a text means an embedded model though a folder or file of this name is here."""
    return text in named_models() and Path(text).exists()


def _is_path(text: str) -> bool:
    """Return whether a text is a path: by its beginning, or because the path or its first folder exists here.

    A missing folder below an existing one is a mistake in a path, so nothing of that name is downloaded.
    """
    if text.startswith(_PATH_BEGINNINGS) or text in (".", ".."):
        return True
    if text.startswith(("https://", "http://")):
        return False
    return Path(text).exists() or ("/" in text and Path(text.partition("/")[0]).exists())
