"""Models of the Hugging Face Hub by name: `hf:ORGANISATION/NAME`, `hf:ORGANISATION/NAME@REVISION`.

Only the files that a folder is read from are downloaded, weights as safetensors where there are any, into the cache
that all of Hugging Face's tools share. The library's environment variables hold: HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE. A download that was cut is continued, and a commit that is in the cache needs no network.
"""

from __future__ import annotations

import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from model.checkpoint.json_files import MODULE_PICKLES, MODULE_SAFETENSORS, PICKLES, SAFETENSORS, SETTINGS
from model.errors import ConfigError

PREFIX = "hf:"
PROGRESS_SECONDS = 5.0  # between two log lines about a download
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_OTHERS = ("onnx/*", "openvino/*", "coreml/*", "original/*", "*/onnx/*", "*/openvino/*")

logger = logging.getLogger(__name__)


def is_hub_name(path: str) -> bool:
    return path.startswith(PREFIX)


def model_name(path: str) -> str:
    """Return the last part of the repository's name, by which the model is served unless it is given another."""
    return _parts(path)[0].rpartition("/")[2]


def pinned(path: str, *, pickle: bool = True) -> str:
    """Return the name with the present commit of its revision, so that later calls get the same files.

    Downloads what is missing. Raises `ConfigError`.
    """
    return with_commit(path, local_folder(path, pickle=pickle))


def with_commit(path: str, folder: Path) -> str:
    """Return the name with the commit that `folder` of the cache holds."""
    return f"{PREFIX}{_parts(path)[0]}@{folder.name}"


def local_folder(path: str, *, pickle: bool = True, max_bytes: int | None = None) -> Path:
    """Return the folder in the cache, after downloading what is missing; raises `ConfigError`.

    It does so before a download of more than `max_bytes`.
    """
    repository, revision = _parts(path)
    small = (*SETTINGS, *MODULE_SAFETENSORS, *(MODULE_PICKLES if pickle else ()))
    folder = _download(path, repository, revision, (*small, *SAFETENSORS), max_bytes)
    weights = any(folder.glob("model*.safetensors"))
    if not weights and pickle:  # the commit that was found, even if the revision has moved since
        folder = _download(path, repository, folder.name, (*small, *PICKLES), max_bytes)
    return folder


def _parts(path: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(path.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(f"{path}: expected hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION")
    return match["repository"], match["revision"]


def _download(
    path: str, repository: str, revision: str | None, patterns: tuple[str, ...], max_bytes: int | None
) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub  # most services take folders, and it takes a quarter of a second
    from huggingface_hub import errors

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # or each request is a line

    snapshot = partial(
        huggingface_hub.snapshot_download,
        repository,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(_OTHERS),
        tqdm_class=_logged(path),
        library_name="triptych",
    )
    try:
        if max_bytes is not None:
            try:
                planned: Any = snapshot(dry_run=True)
                _check_size(path, planned, max_bytes)
            except errors.DryRunError as error:
                if isinstance(error.__cause__, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
                    raise error.__cause__ from None
                snapshot = partial(snapshot, local_files_only=True)  # the Hub does not answer
        folder: Any = snapshot()
    except ConfigError:
        raise
    except errors.GatedRepoError:
        raise ConfigError(f"{path}: its authors grant access first; set HF_TOKEN to the token of an account") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{path}: no such repository, or a private one and HF_TOKEN gives no access") from None
    except (errors.RevisionNotFoundError, errors.RevisionResolutionError):
        raise ConfigError(f"{path}: the repository has no revision {revision!r}") from None
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        raise ConfigError(f"{path}: the Hub does not answer, and the cache lacks files: {_short(error)}") from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: the download failed: {_short(error)}") from None
    except Exception as error:  # the HTTP library's own, which the Hub's does not export
        raise ConfigError(f"{path}: the download failed: {type(error).__name__}: {_short(error)}") from None
    return Path(folder)


def _check_size(path: str, files: list[Any], max_bytes: int) -> None:
    size = sum(file.file_size or 0 for file in files if file.will_download)
    if size > max_bytes:
        megabytes = f"{size / 1e6:,.1f} MB would be downloaded, more than the {max_bytes / 1e6:,g} MB"
        raise ConfigError(f"{path}: {megabytes} that max_download allows")


def _logged(path: str) -> type[Any]:
    """A progress bar for the library that writes a log line every few seconds instead."""
    from tqdm import tqdm

    class LoggedBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            settings.pop("name", None)  # of the library's own bars
            settings |= {"mininterval": PROGRESS_SECONDS, "miniters": 1, "disable": False}
            super().__init__(*arguments, **settings)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B" and self.n and self.total and self.n < self.total:
                logger.info("%s: %.0f of %.0f MB downloaded", path, self.n / 1e6, self.total / 1e6)

        def clear(self, nolock: bool = False) -> None:
            """Nothing was drawn."""

        def close(self) -> None:
            self.disable = True  # or it would write a line to the terminal

    return LoggedBar


def _short(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
