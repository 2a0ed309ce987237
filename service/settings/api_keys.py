"""The API keys that clients may present: those of the settings, and those of a file that may change while we serve."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from model.errors import ConfigError
from service.settings.service_settings import ServiceSettings, check_key

_CHECK_SECONDS = 1.0  # how old a look at the file may be
_MOST_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class KeyRing:
    """Which keys are good. A file that cannot be read any more, or holds no key, leaves the last good ones in force."""

    def __init__(self, keys: Iterable[str] = (), file: str = "") -> None:
        """Raises `ConfigError` for a file that is not there or holds anything but keys."""
        self._fixed = frozenset(digest(key.encode()) for key in keys)
        self._file = Path(file) if file else None
        self._from_file: frozenset[bytes] = frozenset()
        self._checked = time.monotonic()
        self._stamp: tuple[int, ...] = ()
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._from_file = _read(self._file)

    @classmethod
    def of(cls, settings: ServiceSettings) -> KeyRing | None:
        """None where no request needs a key. Raises `ConfigError`."""
        return cls(settings.api_keys, settings.api_key_file) if settings.asks_for_key else None

    def find(self, key: bytes) -> bytes | None:
        """The digest of a good key, else None. Compares with every key, in constant time for each."""
        self._look()
        presented = digest(key)
        known = [hmac.compare_digest(presented, one) for one in (*self._fixed, *self._from_file)]
        return presented if any(known) else None

    def _look(self) -> None:
        """Read the file again if it has changed, at most once a second."""
        if self._file is None or time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read(self._file)
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d keys were read again", len(self._from_file))


def digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing of theirs."""
    return hashlib.sha256(key).digest()


def _read(file: Path) -> frozenset[bytes]:
    """One key a line; empty lines and those that begin with `#` are skipped."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        text = content.decode("ascii")
    except OSError as error:
        raise ConfigError(f"api_key_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {file} is not ASCII text") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"api_key_file {file} has more than {_MOST_BYTES} bytes")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {file} holds no key; expected one a line")
    for number, key in keys:
        check_key(key, f"line {number} of api_key_file {file}")
    return frozenset(digest(key.encode()) for _, key in keys)


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with the file's content, place or rights; empty if it is not there."""
    try:
        found = os.stat(file)  # follows links: a mounted Kubernetes secret changes by a link being swapped
    except OSError:
        return ()
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
