"""The lines of a key file: `NAME KEY_OR_HASH [option=value ...]`, or a key alone.

A hash is of scrypt (RFC 7914). It stands in a line as `scrypt$LN$ID$SALT$HASH`, and `new_key` makes both the key and
the hash. `ID` is the part of the key that is no secret. It says which line a key belongs to, so that a wrong key costs
one computation at most.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from triptych.model.api.request import MAX_PRIORITY, MIN_PRIORITY
from triptych.model.errors import ConfigError
from triptych.service.settings.service_settings import check_key
from triptych.service.settings.tenant import UNNAMED, Tenant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"scrypt\$(\d{1,2})\$([a-z2-7]{12})\$([A-Za-z0-9_-]{22})\$([A-Za-z0-9_-]{43})")
_KEY = re.compile(rb"tk-([a-z2-7]{12})-[A-Za-z0-9_-]{43}")
_LINE_END = re.compile(r"\r\n|[\r\n]")  # not the other ends of lines of Unicode, which a comment may have
_LN = 14  # 2^14 blocks of 1 KiB: 16 MiB and about 40 ms
_MOST_LN = 17
_MOST = 10**12


@dataclass(frozen=True, slots=True)
class Hashed:
    """The hash of a key; the key itself is in no file."""

    ln: int
    id: str
    salt: bytes
    hash: bytes

    def matches(self, key: bytes) -> bool:
        """Compute the key's hash and compare it; takes tens of milliseconds."""
        return hmac.compare_digest(_scrypt(key, self.salt, self.ln), self.hash)

    def __str__(self) -> str:
        return f"scrypt${self.ln}${self.id}${_text(self.salt)}${_text(self.hash)}"


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key and its holder."""

    tenant: Tenant
    key: bytes | Hashed  # the digest of a key that the file has in plain, else its hash
    expires: float = math.inf  # seconds since 1970
    only: str = ""  # the one route that it opens, such as /metrics; empty: all

    @property
    def has_expired(self) -> bool:
        return self.expires <= time.time()

    @property
    def digest(self) -> bytes:
        return self.key if isinstance(self.key, bytes) else self.key.hash


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key, by which keys are looked up and told apart."""
    return hashlib.sha256(key).digest()


def new_key() -> tuple[str, Hashed]:
    """Return a new random key of 256 bits, and what a line has of it."""
    id_, salt = base64.b32encode(secrets.token_bytes(8)).decode().lower()[:12], secrets.token_bytes(16)
    key = f"tk-{id_}-{secrets.token_urlsafe(32)}"
    return key, Hashed(_LN, id_, salt, _scrypt(key.encode(), salt, _LN))


def public_id(key: bytes) -> str:
    """Return the part of a key that names its line; empty if the key is not one that `new_key` made."""
    found = _KEY.fullmatch(key)
    return found[1].decode() if found else ""


def plain_line(key: str) -> KeyLine:
    """Return the line of a key without a name."""
    hashed = digest(key.encode())
    return KeyLine(Tenant(UNNAMED, hashed.hex()), hashed)


def read_lines(text: str, where: str, *, for_admins: bool = False) -> list[KeyLine]:
    """Read the keys of a file; skips empty lines and lines that begin with `#`.

    Admin keys have no other option than `expires`. Raises `ConfigError` that names `where` and the line, and no key.
    """
    lines = [(f"line {number} of {where}", line.split()) for number, line in enumerate(_LINE_END.split(text), 1)]
    found = [(place, read_line(words, place, for_admins)) for place, words in lines if words and words[0][0] != "#"]
    _check_alike(found)
    return [line for _, line in found]


def read_line(words: list[str], place: str, for_admins: bool = False) -> KeyLine:
    """Read one line; raises `ConfigError` that names the `place`."""
    if len(words) == 1:
        check_key(words[0], place)
        return plain_line(words[0])
    name, key, *options = words
    if not _NAME.fullmatch(name) or name == UNNAMED:
        raise ConfigError(
            f"{place}: a name is 1 to 64 letters, digits and ._- and is not {UNNAMED!r}; a line is a key alone, or "
            "NAME KEY_OR_HASH [option=value ...]"
        )
    check_key(key, f"the key in {place}")
    known = {"expires": LINE_OPTIONS["expires"]} if for_admins else LINE_OPTIONS
    given: dict[str, Any] = {}
    for option in options:
        label, _, value = option.partition("=")
        if label not in known:
            what = repr(label) if re.fullmatch(r"[a-z/]{1,20}", label) and "=" in option else "after the key"
            raise ConfigError(
                f"{place}: unknown option {what}; expected some of {', '.join(known)}, each as name=value"
            )
        field, read = known[label]
        if field in given:
            raise ConfigError(f"{place}: {label} is given twice")
        try:
            given[field] = read(value)
        except ValueError as error:
            raise ConfigError(f"{place}: {label}: found {value[:40]!r}, expected {error}") from None
    expires, only = given.pop("expires", math.inf), given.pop("only", "")
    return KeyLine(Tenant(name, f"name:{name}", **given), _key_of(key, place), expires, only)


def _key_of(word: str, place: str) -> bytes | Hashed:
    if not word.startswith("scrypt$"):
        return digest(word.encode())
    found = _HASH.fullmatch(word)
    if found is None or not 10 <= int(found[1]) <= _MOST_LN:
        raise ConfigError(f"{place}: the hash is broken; `triptych key NAME` makes a key and its line")
    return Hashed(int(found[1]), found[2], _bytes(found[3]), _bytes(found[4]))


def _check_alike(found: Iterable[tuple[str, KeyLine]]) -> None:
    """Raise `ConfigError` if two lines of a name differ in what they allow, or a key is there twice."""
    by_name: dict[str, Tenant] = {}
    keys: dict[bytes | str, KeyLine] = {}
    for place, line in found:
        key = line.key.id if isinstance(line.key, Hashed) else line.key
        if keys.setdefault(key, line) != line:
            raise ConfigError(f"{place}: an earlier line has the same key and other options")
        if line.tenant.name != UNNAMED and by_name.setdefault(line.tenant.name, line.tenant) != line.tenant:
            raise ConfigError(
                f"{place}: {line.tenant.name} has other options on an earlier line; keys of one name share its "
                "quotas, so give them the same options (expires may differ)"
            )


def _only(text: str) -> str:
    if text != "metrics":
        raise ValueError("metrics, for a key that reads /metrics alone")
    return f"/{text}"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15 or not 1 <= int(text) <= _MOST:
        raise ValueError(f"a whole number from 1 to {_MOST}")
    return int(text)


def _priority(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,3}", text, re.ASCII) or not MIN_PRIORITY <= int(text) <= MAX_PRIORITY:
        raise ValueError(f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}; lower is served first")
    return int(text)


def _models(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not all(found) or len(found) > 100:
        raise ValueError("1 to 100 names or patterns such as code-*, with commas between them")
    return found


def _expiry(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a date such as 2027-01-31, or a time such as 2027-01-31T12:00:00Z") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


LINE_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {  # name in the file: field of `Tenant`, and its reader
    "requests/min": ("requests_per_minute", _count),
    "tokens/min": ("tokens_per_minute", _count),
    "concurrent": ("concurrent", _count),
    "priority": ("priority", _priority),
    "models": ("models", _models),
    "expires": ("expires", _expiry),
    "only": ("only", _only),
}


def _scrypt(key: bytes, salt: bytes, ln: int) -> bytes:
    return hashlib.scrypt(key, salt=salt, n=1 << ln, r=8, p=1, maxmem=(1 << ln) * 1024 + (1 << 20), dklen=32)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
