"""API and admin keys, from the settings and from a file that may change while the service runs."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from triptych.model.errors import ConfigError
from triptych.service.settings.key_lines import Hashed, KeyLine, digest, plain_line, public_id, read_lines
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.settings.tenant import Tenant

_CHECK_SECONDS = 1.0  # minimum time between two checks of the file
_MAX_BYTES = 1 << 20
_MOST_PROVED = 4_096  # keys whose hashes were computed and are remembered, right and wrong ones
_MOST_PROVING = 64  # lines with a key whose hash is computed or waits for that; others are refused meanwhile
_WRONG_SECONDS = 1.0  # after a wrong key for a line, until another key is compared with its hash

logger = logging.getLogger(__name__)


class TooManyWrongKeys(Exception):
    """Wrong keys come so fast that this one is not compared with a hash now."""


class _Proof(NamedTuple):
    """The comparison of a key with the hash of a line, in a thread."""

    key: bytes  # its digest
    hash: bytes
    is_right: Future[bool]


class KeyRing:
    """Finds the holders of keys. If the file becomes unreadable or holds no key, the last valid keys stay in force.

    Keys are looked up by their SHA-256, so the time of a look-up says nothing about other keys. A key that the file has
    as a hash is proved once, in a thread; then its SHA-256 is known too.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: str = "",
        setting: str = "api_key_file",
        failed: Callable[[str], None] = lambda setting: None,
    ) -> None:
        """`setting` names the file in errors; `failed` is called when it has changed and cannot be read.

        Raises `ConfigError` for a missing file or an invalid key in it.
        """
        self._failed = failed
        self._fixed = {line.digest: line for line in map(plain_line, keys)}
        self._file = Path(file) if file else None
        self._setting = setting
        self._for_admins = setting != "api_key_file"
        self._plain: dict[bytes, KeyLine] = {}
        self._hashed: dict[str, KeyLine] = {}
        self._proved: OrderedDict[tuple[bytes, bytes], bool] = OrderedDict()  # by key digest and hash
        self._proving: dict[str, _Proof] = {}  # by the id of the line: one key at a time
        self._wrong: dict[str, float] = {}  # when a key was last found to be wrong, by the id of its line
        self._checked = time.monotonic()
        self._stamp: tuple[int, ...] = ()
        self._thread = ThreadPoolExecutor(1, "triptych-keys")
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._take(_read(self._file, setting, for_admins=self._for_admins))

    @classmethod
    def of(cls, settings: ServiceSettings, failed: Callable[[str], None] = lambda setting: None) -> KeyRing | None:
        """Return the keys of the settings, None if requests need none. Raises `ConfigError`."""
        return cls(settings.api_keys, settings.api_key_file, failed=failed) if settings.asks_for_key else None

    @classmethod
    def of_admins(
        cls, settings: ServiceSettings, failed: Callable[[str], None] = lambda setting: None
    ) -> KeyRing | None:
        """Return the admin keys of the settings, None if there are none. Raises `ConfigError`."""
        if not settings.has_admin:
            return None
        return cls(settings.admin_keys, settings.admin_key_file, "admin_key_file", failed)

    def find(self, key: bytes) -> KeyLine | None:
        """Return the line of a valid key, else None; the key may have expired. `prove` must have seen a hashed one."""
        self._refresh()
        presented = digest(key)
        found = self._plain.get(presented) or self._fixed.get(presented)
        if found is None and self._hashed:
            line = self._hashed.get(public_id(key))
            if line is not None and self._proved.get((presented, line.digest)):
                return line
        return found

    def holder(self, tenant_id: str) -> Tenant | None:
        """Return the holder with this id; None if no key of the holder is valid any more."""
        self._refresh()
        lines = (*self._fixed.values(), *self._plain.values(), *self._hashed.values())
        return next((line.tenant for line in lines if line.tenant.id == tenant_id and not line.has_expired), None)

    @property
    def has_hashes(self) -> bool:
        """Whether the file has a key as a hash."""
        return bool(self._hashed)

    def is_unproved(self, key: bytes) -> bool:
        """Return whether `prove` has to compute a hash before `find` knows the key."""
        line = self._hashed.get(public_id(key)) if self._hashed else None
        return line is not None and (digest(key), line.digest) not in self._proved

    async def prove(self, key: bytes) -> None:
        """Compare a key with the hash of its line; raises `TooManyWrongKeys` if wrong ones come too fast."""
        line, presented = self._hashed.get(public_id(key)), digest(key)
        if line is None or not isinstance(line.key, Hashed):
            return
        while (presented, line.digest) not in self._proved:
            proof = self._proving.get(line.key.id) or self._begin(line.key, key)
            # Another request with this line's key may wait for the same proof, so a client who leaves does not end it.
            await asyncio.wait([asyncio.wrap_future(proof.is_right)])
            if self._proving.get(line.key.id) is proof:
                del self._proving[line.key.id]
                self._remember(line.key.id, proof)

    def _begin(self, hashed: Hashed, key: bytes) -> _Proof:
        """Begin to compare a key with a hash; raises `TooManyWrongKeys`."""
        since = time.monotonic() - self._wrong.get(hashed.id, -_WRONG_SECONDS)
        proving = sum(not one.is_right.done() for one in self._proving.values())  # clients of the others have gone
        if proving >= _MOST_PROVING or since < _WRONG_SECONDS:
            raise TooManyWrongKeys
        proof = _Proof(digest(key), hashed.hash, self._thread.submit(hashed.matches, key))
        self._proving[hashed.id] = proof
        return proof

    def _remember(self, line_id: str, proof: _Proof) -> None:
        right = proof.is_right.result()
        if not right:
            self._wrong[line_id] = time.monotonic()
        self._proved[proof.key, proof.hash] = right
        if len(self._proved) > _MOST_PROVED:
            self._drop_one()

    def _drop_one(self) -> None:
        """Forget the oldest wrong key, else the oldest key."""
        oldest = next((one for one, right in self._proved.items() if not right), next(iter(self._proved)))
        del self._proved[oldest]

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
            lines = _read(self._file, self._setting, for_admins=self._for_admins, again=True)
        except ConfigError as error:
            self._failed(self._setting)
            logger.error("the keys are unchanged: %s", error)
        else:
            self._take(lines)
            logger.info("%s has changed: read %d keys", self._setting, len(lines))

    def _take(self, lines: list[KeyLine]) -> None:
        self._plain = {line.digest: line for line in lines if isinstance(line.key, bytes)}
        self._hashed = {line.key.id: line for line in lines if isinstance(line.key, Hashed)}
        self._wrong.clear()


def _read(file: Path, setting: str, *, for_admins: bool, again: bool = False) -> list[KeyLine]:
    """Return the lines of a key file; raises `ConfigError`."""
    try:
        if again and file.is_fifo():  # to open one waits for a writer
            raise ConfigError(f"{setting} {file} is a pipe, which is read at the start alone")
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")  # comments may have any letters, keys are checked later
    except OSError as error:
        raise ConfigError(f"{setting} {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {file} is not UTF-8 text") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{setting} {file} has more than {_MAX_BYTES} bytes")
    lines = read_lines(text, f"{setting} {file}", for_admins=for_admins)
    if not lines:
        raise ConfigError(f"{setting} {file} contains no key; expected one a line")
    return lines


def _stamp(file: Path) -> tuple[int, ...]:
    """Return values that change with the file's content, place or permissions; empty if the file is missing."""
    try:
        found = os.stat(file)  # follows links: Kubernetes updates a mounted secret by replacing a link
    except OSError:
        return ()
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
