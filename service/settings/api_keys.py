"""API and admin keys, from the settings and from a file that may change while the service runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from triptych.model.errors import ConfigError
from triptych.service.settings.service_settings import ServiceSettings, check_key

_CHECK_SECONDS = 1.0  # minimum time between two checks of the file
_MAX_BYTES = 1 << 20
_MAX_NAMED = 4_096  # keys whose tenants are remembered

logger = logging.getLogger(__name__)


class KeyRing:
    """Checks keys. If the file becomes unreadable or holds no key, the last valid keys stay in force."""

    def __init__(self, keys: Iterable[str] = (), file: str = "", setting: str = "api_key_file") -> None:
        """`setting` names the file in errors. Raises `ConfigError` for a missing file or an invalid key in it."""
        self._fixed = frozenset(digest(key.encode()) for key in keys)
        self._file = Path(file) if file else None
        self._setting = setting
        self._from_file: frozenset[bytes] = frozenset()
        self._checked = time.monotonic()
        self._stamp: tuple[int, ...] = ()
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._from_file = _read(self._file, setting)

    @classmethod
    def of(cls, settings: ServiceSettings) -> KeyRing | None:
        """Return the keys of the settings, None if requests need none. Raises `ConfigError`."""
        return cls(settings.api_keys, settings.api_key_file) if settings.asks_for_key else None

    @classmethod
    def of_admins(cls, settings: ServiceSettings) -> KeyRing | None:
        """Return the admin keys of the settings, None if there are none. Raises `ConfigError`."""
        if not settings.has_admin:
            return None
        return cls(settings.admin_keys, settings.admin_key_file, "admin_key_file")

    def find(self, key: bytes) -> bytes | None:
        """Return the digest of a valid key, else None. Compares it with every key, in constant time for each."""
        self._refresh()
        presented = digest(key)
        known = [hmac.compare_digest(presented, one) for one in (*self._fixed, *self._from_file)]
        return presented if any(known) else None

    def _refresh(self) -> None:
        """Read the file again if it has changed, at most once a second."""
        if self._file is None or time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read(self._file, self._setting)
        except ConfigError as error:
            logger.error("the keys are unchanged: %s", error)
        else:
            logger.info("%s has changed: read %d keys", self._setting, len(self._from_file))


class Tenants:
    """Names of the holders of keys: hashes with a secret, which reveal nothing about the keys."""

    def __init__(self, secret: bytes = b"") -> None:
        """Processes with the same `secret` give the same names; by default the secret is random."""
        self._secret = secret or secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}

    def name(self, key_digest: bytes) -> str:
        """Return the name of a valid key's holder, by the key's digest."""
        name = self._names.get(key_digest)
        if name is None:
            if len(self._names) >= _MAX_NAMED:  # the key file has changed often
                self._names.clear()
            name = self._names[key_digest] = hmac.new(self._secret, key_digest, "sha256").hexdigest()
        return name


def digest(key: bytes) -> bytes:
    """Hash a key; all digests have the same length, so that comparing them reveals nothing about the keys' lengths."""
    return hashlib.sha256(key).digest()


def _read(file: Path, setting: str) -> frozenset[bytes]:
    """Return the digests of the keys, one a line; skips empty lines and lines that begin with `#`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        text = content.decode("ascii")
    except OSError as error:
        raise ConfigError(f"{setting} {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {file} is not ASCII text") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{setting} {file} has more than {_MAX_BYTES} bytes")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{setting} {file} contains no key; expected one a line")
    for number, key in keys:
        check_key(key, f"line {number} of {setting} {file}")
    return frozenset(digest(key.encode()) for _, key in keys)


def _stamp(file: Path) -> tuple[int, ...]:
    """Return values that change with the file's content, place or permissions; empty if the file is missing."""
    try:
        found = os.stat(file)  # follows links: Kubernetes updates a mounted secret by replacing a link
    except OSError:
        return ()
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
