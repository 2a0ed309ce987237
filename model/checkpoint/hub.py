"""Downloads models of the Hugging Face Hub (`triptych.model.checkpoint.hub_names` reads their names).

Only the files that a folder is read from are downloaded, weights as safetensors where there are any, or one GGUF file
of those in a repository, into the cache that all of Hugging Face's tools share. The library's environment variables
hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE. A download that was cut is continued, and a commit that is in the
cache needs no network.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from triptych.model.checkpoint import hub_names
from triptych.model.checkpoint.hub_names import HubName
from triptych.model.checkpoint.json_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    CARD,
    MODULE_PICKLES,
    MODULE_SAFETENSORS,
    PICKLES,
    SAFETENSORS,
    SETTINGS,
    read_json,
)
from triptych.model.checkpoint.progress import Meter, bar_class
from triptych.model.errors import ConfigError, listed
from triptych.model.gguf.paths import SHARD

_OTHERS = ("onnx/*", "openvino/*", "coreml/*", "original/*", "*/onnx/*", "*/openvino/*")
_PATHS = " (the path of a folder here begins with / or ./)"
_COMMIT = re.compile("[0-9a-f]{40}")
_INDEX = ".index.json"


def pinned(path: str, *, pickle: bool = True) -> str:
    """Return the name with the present commit of its revision, so that later calls get the same files.

    Downloads what is missing. Raises `ConfigError`.
    """
    return with_commit(path, local_folder(path, pickle=pickle))


def with_commit(path: str, found: Path) -> str:
    """Return the name with the commit that holds `found`, a folder or GGUF file in the cache."""
    parts = found.parts
    commit = parts[len(parts) - parts[::-1].index("snapshots")]
    return str(replace(hub_names.parse(path), revision=commit))


def local_folder(path: str, *, pickle: bool = True, max_bytes: int | None = None) -> Path:
    """Return the folder in the cache, or the GGUF file, after downloading what is missing; raises `ConfigError`.

    It does so before a download of more than `max_bytes`.
    """
    name = hub_names.parse(path)
    if name.selector:
        return _gguf(name, max_bytes)
    small = (*SETTINGS, *MODULE_SAFETENSORS, *(MODULE_PICKLES if pickle else ()))
    folder = _download(name, (*small, *SAFETENSORS), max_bytes)
    found = replace(name, revision=folder.name)  # the commit that was found, even if the revision has moved since
    if further := _named_weights(folder):
        return _download(found, (*small, *SAFETENSORS, *map(escape, further)), max_bytes)
    if _has_any(folder, SAFETENSORS):
        return folder
    if _has_any(folder, (ADAPTER,)):
        folder = _download(found, (*small, *ADAPTER_WEIGHTS[:1]), max_bytes)
        absent = pickle and not _has_any(folder, ADAPTER_WEIGHTS[:1])
        return _download(found, (*small, *ADAPTER_WEIGHTS), max_bytes) if absent else folder
    if pickle:
        folder = _download(found, (*small, *PICKLES), max_bytes)
        if further := _indexed(folder, PICKLES):  # bloom has pytorch_model_00001-of-00072.bin
            return _download(found, (*small, *PICKLES, *map(escape, further)), max_bytes)
    weights = (*MODULE_SAFETENSORS, *((*PICKLES, *MODULE_PICKLES) if pickle else ()))
    return folder if _has_any(folder, weights) or not _gguf_files(found)[1] else _gguf(found, max_bytes)


def _named_weights(folder: Path) -> list[str]:
    """Return the safetensors files that config.json or an index names, other than those with a usual name."""
    named = read_json(folder / "config.json").get("transformers_weights")
    if named is None:
        return _indexed(folder, SAFETENSORS)
    has_index = _is_name(named) and named.endswith(_INDEX)
    return _unusual(_shards(folder / named) if has_index else [named], SAFETENSORS)


def _indexed(folder: Path, usual: tuple[str, ...]) -> list[str]:
    """Return the files that the usual index names, other than those with a usual name; none if one file is whole."""
    whole = folder / usual[0]
    return [] if whole.exists() else _unusual(_shards(whole.with_name(f"{whole.name}{_INDEX}")), usual)


def _shards(index: Path) -> list[Any]:
    shards = read_json(index).get("weight_map")
    return [*shards.values()] if isinstance(shards, dict) else []


def _unusual(names: Iterable[object], usual: tuple[str, ...]) -> list[str]:
    """Return the names with the ending of the usual ones that these patterns do not take."""
    ending = PurePosixPath(usual[0]).suffix
    found = {one for one in names if _is_name(one) and one.endswith(ending)}
    return sorted(one for one in found if not any(fnmatchcase(one, pattern) for pattern in usual))


def _is_name(value: object) -> TypeGuard[str]:
    """Return whether a value is the name of a file right in a folder."""
    return isinstance(value, str) and "\0" not in value and Path(value).name == value


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _gguf(name: HubName, max_bytes: int | None) -> Path:
    """Return the GGUF file in the cache that a name means, after downloading it; raises `ConfigError`."""
    commit, files = _gguf_files(name)
    file = choose(str(name), files, name.selector)
    folder = _download(replace(name, revision=commit), tuple(map(escape, all_parts(file))), max_bytes)
    return folder / file


def _gguf_files(name: HubName) -> tuple[str, list[str]]:
    """Return the commit of a name, and the GGUF files of the repository, or of the cache where the Hub is silent."""
    with _plain_errors(name):
        import huggingface_hub
        from huggingface_hub import errors

        if name.revision is not None and _COMMIT.fullmatch(name.revision):
            with suppress(errors.LocalEntryNotFoundError):
                cached = _cached_gguf_files(name)
                if name.is_file and set(all_parts(name.selector)) <= set(cached[1]):
                    return cached
        try:
            info = huggingface_hub.HfApi(library_name="triptych").model_info(name.repository, revision=name.revision)
        except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception:  # there is no network, or the Hub has a failure
            return _cached_gguf_files(name)
        names = [file.rfilename for file in info.siblings or ()]
        return str(info.sha), [file for file in names if file.lower().endswith(".gguf")]


def _cached_gguf_files(name: HubName) -> tuple[str, list[str]]:
    """Return the commit and the GGUF files in the cache; raises `LocalEntryNotFoundError`."""
    import huggingface_hub

    nothing = [".nothing"]  # so that no file counts as missing
    found = huggingface_hub.snapshot_download(
        name.repository, revision=name.revision, allow_patterns=nothing, local_files_only=True
    )
    folder = Path(str(found))
    files = (file for file in folder.rglob("*") if file.suffix.lower() == ".gguf" and file.is_file())
    return folder.name, [file.relative_to(folder).as_posix() for file in files]


def _download(name: HubName, patterns: tuple[str, ...], max_bytes: int | None) -> Path:
    """Download the files of a repository that fit the patterns, and return its folder in the cache."""
    meter = Meter(str(name))
    with _plain_errors(name):
        import huggingface_hub
        from huggingface_hub import errors

        snapshot = partial(
            huggingface_hub.snapshot_download,
            name.repository,
            revision=name.revision,
            allow_patterns=[*patterns, CARD],
            ignore_patterns=list(_OTHERS),
            tqdm_class=bar_class(meter),
            library_name="triptych",
        )
        if max_bytes is not None:
            try:
                planned: Any = snapshot(dry_run=True)
                _check_size(name, planned, max_bytes)
            except errors.DryRunError as error:
                if isinstance(error.__cause__, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
                    raise error.__cause__ from None
                snapshot = partial(snapshot, local_files_only=True)  # the Hub does not answer
        try:
            folder: Any = snapshot()
        except errors.IncompleteSnapshotError:  # the Hub does not answer: a model is served without its card too
            folder = snapshot(allow_patterns=list(patterns))
        finally:
            meter.close()
        return Path(folder)


@contextmanager
def _plain_errors(name: HubName) -> Iterator[None]:
    """Raise a `ConfigError` that a user understands for each error of the library, which is imported here."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import errors  # most services take folders, and it takes a quarter of a second

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # or each request is a line
    try:
        yield
    except ConfigError:
        raise
    except errors.GatedRepoError:
        raise ConfigError(f"{name}: its authors grant access first; set HF_TOKEN to the token of an account") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name}: no such repository, or a private one and HF_TOKEN gives no access{_PATHS}"
        ) from None
    except (errors.RevisionNotFoundError, errors.RevisionResolutionError):
        raise ConfigError(f"{name}: the repository has no revision {name.revision!r}") from None
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        raise ConfigError(
            f"{name}: the Hub does not answer, and the cache lacks files{_PATHS}: {_short(error)}"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        raise ConfigError(f"{name}: the download failed: {_short(error)}") from None
    except Exception as error:  # the HTTP library's own, which the Hub's does not export
        raise ConfigError(f"{name}: the download failed: {type(error).__name__}: {_short(error)}") from None


def _check_size(name: HubName, files: list[Any], max_bytes: int) -> None:
    size = sum(file.file_size or 0 for file in files if file.will_download)
    if size > max_bytes:
        megabytes = f"{size / 1e6:,.1f} MB would be downloaded, more than the {max_bytes / 1e6:,g} MB"
        raise ConfigError(f"{name}: {megabytes} that max_download allows")


def _short(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


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
    return listed(names, most=_MOST_SHOWN, longest=80)
