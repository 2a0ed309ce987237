"""Remembers which checks have passed on a card, in a small file with the compiled kernels.

The file's name is a digest of all that a kernel's result can depend on: the card, its driver, torch, Triton, and the
source of the kernels. Only what has passed is remembered: what failed may work next time, as after a compiler was
installed. A file that is damaged, or that another user could have written, counts as empty.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from triptych.model.kernel_check.check import Check
from triptych.model.system.cache_folders import untrusted
from triptych.model.system.kernel_cache import kernel_cache

_MODEL = Path(__file__).parents[1]
# Folders with kernels, with what launches them, or with checks.
_SOURCES = ("attention", "linear", "sampling", "cache", "kernel_check", "network", "system", "engine/execution")
_DRIVER = Path("/proc/driver/nvidia/version")
_MOST_BYTES = 1 << 20
_MOST_CHECKS = 8192
_DIGEST = 32  # characters
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

logger = logging.getLogger(__name__)


def identity_of(device: torch.device) -> dict[str, str]:
    """Return all that a kernel's result can depend on, apart from its arguments."""
    found = {"device": device.type, "torch": str(torch.__version__), "source": _source()}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found["card"] = f"{card.name}, {card.major}.{card.minor}, {card.multi_processor_count} processors"
        found["cuda"] = str(torch.version.cuda)
        with suppress(OSError):
            found["driver"] = _DRIVER.read_text().splitlines()[0]
    return found


def _source() -> str:
    digest = sha256()
    for file in source_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def source_files() -> list[Path]:
    """Return the modules that a kernel's result can depend on."""
    return [file for folder in _SOURCES for file in sorted((_MODEL / folder).glob("*.py"))]


class Memory:
    """The checks that have passed under one identity."""

    def __init__(self, identity: dict[str, str], folder: Path | None = None) -> None:
        """`folder` is by default within that of compiled kernels."""
        self._identity = identity
        name = _digest(json.dumps(identity, sort_keys=True))
        self._path = (folder or kernel_cache() / "checked") / f"{name}.json"

    def unknown(self, checks: Iterable[Check]) -> list[Check]:
        """Return the checks that have not passed yet."""
        passed = self._passed()
        return [check for check in checks if _digest(repr(check)) not in passed]

    def add(self, checks: Sequence[Check]) -> None:
        """Remember that checks have passed; a folder that cannot be written is left alone."""
        if not checks:
            return
        passed = list(dict.fromkeys([*self._passed(), *(_digest(repr(check)) for check in checks)]))
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(json.dumps({"identity": self._identity, "passed": passed[-_MOST_CHECKS:]}))
            new.replace(self._path)
        except OSError as error:
            logger.info("the checks of kernels are not remembered: %s", error.strerror)

    def _passed(self) -> list[str]:
        """Return the digests in the file; none if it is missing, damaged, or not this user's."""
        try:
            file = os.open(self._path, _READ)
        except OSError:
            return []
        try:
            if untrusted(os.fstat(file), stat.S_ISREG) or untrusted(self._path.parent.stat(), stat.S_ISDIR):
                return []
            found = json.loads(os.read(file, _MOST_BYTES))
            passed = found["passed"] if found["identity"] == self._identity else []
        except (OSError, ValueError, TypeError, KeyError):
            return []
        finally:
            os.close(file)
        return [one for one in passed if isinstance(one, str)] if isinstance(passed, list) else []


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_DIGEST]
