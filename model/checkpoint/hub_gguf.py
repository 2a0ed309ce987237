"""Chooses the GGUF file that a name of the Hub means, among those of its repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import SHARD

DEFAULT_FORMAT = "Q4_K_M"  # what llama.cpp and Ollama take where a name says nothing
_MOST_SHOWN = 8
_FORMAT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*)", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # files for another purpose have these words in their names


def choose(name: str, files: Iterable[str], selector: str) -> str:
    """Return the path of the file that `selector` means, of a model in parts the first; raises `ConfigError`.

    A selector is a path, or a number format. "": the only file, else that of `DEFAULT_FORMAT`.
    """
    models = sorted(file for file in files if _is_model(file))
    if not models:
        raise ConfigError(f"{name}: the repository has no GGUF model")
    if selector in models:
        return selector
    if not selector and len(models) == 1:
        return models[0]
    wanted = (selector or DEFAULT_FORMAT).lower()
    at_end = [file for file in models if re.search(rf"(^|[-._/]){re.escape(wanted)}$", _stem(file))]
    anywhere = [file for file in models if re.search(rf"(^|[-._/]){re.escape(wanted)}([-._]|$)", _stem(file))]
    found = at_end or anywhere
    if len(found) == 1:
        return found[0]
    if not selector:
        what = "the repository has several GGUF models"
    elif found:
        what = f"{len(found)} GGUF models are {selector}"
    else:
        what = f"the repository has no GGUF model {selector}"
    raise ConfigError(f"{name}: {what}; give one after a colon: {_shown(found or models)}")


def all_parts(file: str) -> list[str]:
    """Return the paths of all parts of a model, given its first; a model in one file is its only part."""
    path = PurePosixPath(file)
    shard = SHARD.fullmatch(path.name)
    if shard is None:
        return [file]
    ending = path.name[shard.end("number") :]
    names = [f"{shard['stem']}-{number:05}{ending}" for number in range(1, int(shard["count"]) + 1)]
    return [str(path.with_name(name)) for name in names]


def _is_model(file: str) -> bool:
    path = PurePosixPath(file)
    shard = SHARD.fullmatch(path.name)
    first = shard is None or int(shard["number"]) == 1
    return path.suffix.lower() == ".gguf" and first and not any(word in path.name.lower() for word in _NO_MODELS)


def _stem(file: str) -> str:
    """Return a path in lower case, without its ending and the number of its part."""
    path = PurePosixPath(file)
    shard = SHARD.fullmatch(path.name)
    return str(path.with_name(shard["stem"] if shard else path.stem)).lower()


def _shown(files: list[str]) -> str:
    """List files by their formats where these tell them apart, else by their paths."""
    formats = [found[-1] if (found := _FORMAT.findall(PurePosixPath(file).name)) else "" for file in files]
    names = formats if all(formats) and len(set(formats)) == len(formats) else files
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(name[:80] for name in names[:_MOST_SHOWN]) + more
