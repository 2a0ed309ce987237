"""Checks of every request before its route is called: headers, key, site, and the declared size of its body.

The checked path is the routed one (`scope["path"]`), never one built from headers.
"""

from __future__ import annotations

import base64
import math

from starlette.types import Scope

from triptych.service.core.errors import (
    ApiError,
    expired_key,
    forbidden,
    headers_too_large,
    no_room,
    too_large,
    too_many_wrong_keys,
    unauthorized,
    unsupported_coding,
)
from triptych.service.core.request_context import current
from triptych.service.http.message_head import Headers, all_of, header_of
from triptych.service.http.route_table import MAX_BODY, RouteTable
from triptych.service.http.sites import Sites
from triptych.service.settings.api_keys import KeyRing, TooManyWrongKeys
from triptych.service.settings.key_lines import KeyLine
from triptych.service.settings.service_settings import Limits

TENANT = "triptych.tenant"  # in the scope of a request that the service makes itself: for whom
_FILE_RATE = 100_000.0  # bytes a second
_BROWSER = 'Basic realm="triptych", charset="UTF-8"'  # a browser asks for a password: the key


class Guard:
    """The checks for large headers (431), keys (401, 403), pages of other sites (403), large declared bodies (413)."""

    def __init__(
        self,
        table: RouteTable,
        limits: Limits,
        keys: KeyRing | None,
        admins: KeyRing | None,
        sites: Sites,
    ) -> None:
        """Read from `table` which routes need no key, and which need a key of `admins`."""
        self._body_limits = table.body_limits
        self._open_paths, self._admin_paths = table.open_paths, table.admin_paths
        self._sites = sites
        self._limits = limits
        self._keys = keys
        self._admins = admins

    async def prove_key(self, scope: Scope) -> None:
        """Compare a key with its hash, if that was not done before; raises a 429 while wrong keys come too fast."""
        rings = (self._keys, self._admins)
        if scope["path"] in self._open_paths or not any(ring is not None and ring.has_hashes for ring in rings):
            return
        self._check_headers(scope)
        key = _key_in(scope["headers"])
        for ring in rings:
            if ring is not None and ring.is_unproved(key):
                try:
                    await ring.prove(key)
                except TooManyWrongKeys:
                    raise too_many_wrong_keys() from None

    def check(self, scope: Scope) -> None:
        """Raise `ApiError` for a request that is refused; the key's holder becomes the tenant of the context."""
        self._check_headers(scope)
        self._check_key(scope)
        if scope["path"] not in self._open_paths and TENANT not in scope:
            self._sites.check(scope, is_own_key=self._has_own_key(scope))
        self._check_declared_body(scope)

    def knows(self, scope: Scope) -> bool:
        """Return whether a checked request proves that its client may send requests; one to an open path does not."""
        return self._keys is None or scope["path"] not in self._open_paths

    def max_body_bytes(self, scope: Scope) -> int:
        """Return the limit of a body's bytes on this path."""
        return int(getattr(self._limits, self._body_limits.get(scope["path"], MAX_BODY)))

    def least_rate(self, scope: Scope) -> float:
        """Return how many bytes a second a body may be slow after `receive_s`; only large files have more time."""
        is_file = self._body_limits.get(scope["path"]) == "max_file_bytes"
        return _FILE_RATE if is_file else math.inf

    def counts_body(self, scope: Scope) -> bool:
        """Return whether a body counts in `BodyRoom`; those of other paths and of batches have limits of their own."""
        return scope["path"] not in self._body_limits and TENANT not in scope

    def body_too_large(self, scope: Scope) -> ApiError:
        """Return the 413 for a body above the limit."""
        name = self._body_limits.get(scope["path"], MAX_BODY)
        return too_large(f"the body has more than {self.max_body_bytes(scope)} bytes ({name})")

    def _has_own_key(self, scope: Scope) -> bool:
        """Return whether the sender itself added the checked key: a browser adds a saved password by itself."""
        needs_key = self._admins if scope["path"] in self._admin_paths else self._keys
        scheme = (header_of(scope["headers"], b"authorization") or "").partition(" ")[0]
        return needs_key is not None and scheme.lower() != "basic"

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        limits = self._limits
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.max_header_fields or size > limits.max_header_bytes:
            message = f"headers exceed {limits.max_header_fields} fields or {limits.max_header_bytes} bytes"
            raise headers_too_large(message)

    def _check_key(self, scope: Scope) -> None:
        headers, context = scope["headers"], current()
        if context is not None and TENANT in scope and scope["path"] not in self._admin_paths:
            context.tenant = scope[TENANT].unlimited
            return
        if scope["path"] in self._admin_paths and self._admins is not None:
            self._check_admin_key(self._admins, headers)
            return
        if self._keys is not None and scope["path"] not in self._open_paths:
            line = self._keys.find(_key_in(headers))
            if line is None:
                page = "text/html" in (header_of(headers, b"accept") or "")
                message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
                raise unauthorized(message, _BROWSER if page else "Bearer")
            if context is not None:
                context.tenant = line.tenant
            _check_time(line)
            if line.only and scope["path"] != line.only:
                raise forbidden(f"this key opens {line.only} alone", "key_not_allowed")

    def _check_admin_key(self, admins: KeyRing, headers: Headers) -> None:
        """Raise a 401 without an admin key, a 403 with a key that is only an API key."""
        key = _key_in(headers)
        line = admins.find(key)
        if line is not None:
            _check_time(line)
            return
        if self._keys is not None and self._keys.find(key) is not None:
            raise forbidden("this route needs an admin key; this key is an API key", "admin_key_required")
        raise unauthorized("an admin key is needed: Authorization: Bearer KEY, or x-api-key: KEY")

    def _check_declared_body(self, scope: Scope) -> None:
        coding = all_of(scope["headers"], b"content-encoding")
        if any(one.strip().lower() not in ("", "identity") for one in coding.split(",")):
            raise unsupported_coding(coding)
        declared = header_of(scope["headers"], b"content-length") or ""
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self.max_body_bytes(scope)):
            raise self.body_too_large(scope)


def _check_time(line: KeyLine) -> None:
    """Raise a 401 for a key that has expired."""
    if line.has_expired:
        raise expired_key(line.tenant.name)


def _key_in(headers: Headers) -> bytes:
    """Return the key of a request; empty if there is none."""
    return _authorized_key(header_of(headers, b"authorization") or "") or (
        header_of(headers, b"x-api-key") or ""
    ).encode("latin-1")


def _authorized_key(authorization: str) -> bytes:
    """Return the key of `Bearer KEY`, or the password of `Basic`, which browsers send; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


# -- The bytes of the bodies of all connections, bounded in total from their arrival until their replies begin. Small
# bodies are always accepted: the number of connections bounds them, and slow senders of large bodies do not block them.

FREE_BYTES = 65_536  # size up to which a body is not counted


class BodyRoom:
    """A counter of the bytes of large bodies, which refuses bodies above its limit with a 429."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    def enter(self) -> HeldBody:
        return HeldBody(self)

    def replace(self, before: int, now: int) -> None:
        """Count `now` bytes of a body instead of `before`; raises a 429 if other bodies leave no room for them."""
        others = self.num_bytes - before
        if others and others + now > self._most_bytes:
            what = f"the bodies that are being read or answered have max_held_body_bytes ({self._most_bytes})"
            raise no_room(what, "body_bytes")
        self.num_bytes = others + now


class HeldBody:
    """The counted bytes of one request's body, none at first."""

    __slots__ = ("_num_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count the body's bytes so far; raises a 429 if there is no room for them."""
        if num_bytes > FREE_BYTES:
            self._room.replace(self._num_bytes, num_bytes)
            self._num_bytes = num_bytes

    def release(self) -> None:
        """Stop counting the body. Idempotent."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0
