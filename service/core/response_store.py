"""Conversations of recent responses, so that a request can go on from one by its id.

They are kept in this process alone, the oldest are dropped, and each is seen only by requests of its own API key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Messages = Sequence[Mapping[str, Any]]

_MESSAGE_BYTES = 512  # of the dictionary that a message is, and its part of the entry


class ResponseStore:
    """Holds messages by the id of the response that they end with, at most `max_bytes`; 0: none.

    A conversation counts as its JSON, and each message as `_MESSAGE_BYTES` more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Messages, int]] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def get(self, tenant: str, id: str) -> Messages | None:
        """Return the messages up to a response, None if they are not, or no longer, there."""
        found = self._kept.get((tenant, id))
        return None if found is None else found[0]

    def put(self, tenant: str, id: str, messages: Messages) -> None:
        """Keep the messages; one that is larger than the whole store is not kept."""
        size = len(msgspec.json.encode(messages)) + _MESSAGE_BYTES * len(messages)
        if size > self._max_bytes:
            return
        _, before = self._kept.pop((tenant, id), (None, 0))
        self._kept[tenant, id] = messages, size
        self._bytes += size - before
        while self._bytes > self._max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped
