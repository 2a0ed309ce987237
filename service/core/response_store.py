"""A store of recent responses with their conversations by id. Each replica keeps those that it has made.

A request can read a response or continue it. The oldest are dropped. Only requests of the same API key see a response.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from triptych.service.core.json_bounds import json_size

Messages = Sequence[Mapping[str, Any]]

_ENTRY_BYTES = 1_024  # of an entry in addition to its JSON: keys, objects, links


class _Reply(msgspec.Struct):
    output: list[msgspec.Raw]


class _Item(msgspec.Struct):
    id: str


_reply = msgspec.json.Decoder(_Reply)


class StoredResponse(NamedTuple):
    """The JSON of one response, and of all messages up to and including its own."""

    conversation: bytes
    reply: bytes

    @property
    def size(self) -> int:
        return len(self.conversation) + len(self.reply) + _ENTRY_BYTES

    def messages(self) -> Messages:
        return msgspec.json.decode(self.conversation, type=list[dict[str, Any]])

    def items(self) -> dict[str, bytes]:
        """Return the JSON of each item of the output, by its id."""
        return {msgspec.json.decode(one, type=_Item).id: bytes(one) for one in _reply.decode(self.reply).output}


class ResponseStore:
    """Responses by id, as at most `max_bytes` of JSON; 0: none are kept.

    A conversation of more than `max_values` values is not kept: reading it again would block the event loop.
    """

    def __init__(self, max_bytes: int, max_values: int) -> None:
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """Return a response; None if it is not kept."""
        return self._kept.get((tenant, id))

    def put(self, tenant: str, id: str, messages: Messages, reply: Mapping[str, Any]) -> None:
        """Keep a response unless it is larger than the whole store."""
        kept = StoredResponse(_json(messages), _json(reply))
        values = json_size(kept.conversation, self._max_values, len(kept.conversation)).values
        if kept.size > self._max_bytes or values > self._max_values:
            return
        self.drop(tenant, id)
        self._kept[tenant, id] = kept
        self._bytes += kept.size
        while self._bytes > self._max_bytes:
            self.drop(*next(iter(self._kept)))

    def drop(self, tenant: str, id: str) -> bool:
        """Drop a response, and return whether it was kept."""
        found = self._kept.pop((tenant, id), None)
        self._bytes -= 0 if found is None else found.size
        return found is not None


def _json(value: object) -> bytes:
    """Return a value as JSON, copied to its exact size: the encoder's buffer is larger."""
    return bytes(memoryview(msgspec.json.encode(value)))
