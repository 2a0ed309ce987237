"""Templates of events: what is the same in all events of a sequence that goes on, as bytes around text and token ids.

A template is made of an event that was rendered with marks for both, so that it has the shape of any other event.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from model.api.request import TokenOutput

_TEXT = "\ue000text\ue000"  # private characters, which no name of ours has
_ID = 987_654_321_012_345
_encode = msgspec.json.Encoder().encode


def is_plain(output: TokenOutput) -> bool:
    """Return whether an output has nothing but text and token ids, and does not end its sequence."""
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.score is None
        and output.stop_reason is None
        and output.error is None
        and output.text != ""
    )


def marked(output: TokenOutput) -> TokenOutput:
    """Return an output of the same sequence that has the marks as its text and token ids."""
    return TokenOutput(output.request_id, output.index, [_ID], text=_TEXT)


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """The bytes before, between and after text and token ids; `between` is None for events without ids."""

    before: bytes
    between: bytes | None
    after: bytes

    @classmethod
    def of(cls, shown: bytes) -> EventTemplate | None:
        """Return the template of an event that shows `marked` output; None if the marks are not found in it."""
        before, *rest = shown.split(_encode(_TEXT))
        if len(rest) != 1 or _encode(_ID) in before:
            return None
        parts = rest[0].split(_encode([_ID]))
        if len(parts) == 1:
            return cls(before, None, parts[0])
        return cls(before, parts[0], parts[1]) if len(parts) == 2 else None

    def fill(self, output: TokenOutput) -> bytes:
        """Return the bytes of the event of a plain output."""
        if self.between is None:
            return b"%b%b%b" % (self.before, _encode(output.text), self.after)
        return b"%b%b%b%b%b" % (
            self.before,
            _encode(output.text),
            self.between,
            _encode(output.token_ids),
            self.after,
        )
