"""Renders one reply as a list of blocks (reasoning, content, calls), as in OpenAI's responses and Anthropic's messages.

A stream opens a block, sends its pieces, and closes it before it opens the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import pydantic_core

from triptych.service.chat.parts import Arguments, Call, Part, Reasoning
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.usage import reasoning_tokens
from triptych.service.http.json_replies import Generation, Json, NamedEvents

Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Block:
    """One block of a reply."""

    kind: Kind
    index: int  # place in the reply
    text: str = ""  # of a call: its arguments
    id: str = ""
    name: str = ""
    is_cut: bool = False  # whether the reply was ended inside this block, and not by the model
    logprobs: list[Json] = field(default_factory=list)  # of its tokens, if the subclass keeps them


def arguments_of(call: Block) -> Json:
    """Return the arguments of a call; if the call was cut off, those that are complete."""
    try:
        found = pydantic_core.from_json(call.text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class BlockRendering(NamedEvents):
    """Renders one reply; subclasses render the begin, pieces and end of blocks."""

    def __init__(self, generation: Generation, format: ReplyFormat) -> None:
        self._generation = generation
        self._format = format
        self._parser = ReplyParser(format)
        self._ids: list[int] = []
        self._is_open = False
        self.blocks: list[Block] = []

    def events(self, event: Json) -> Iterable[Json]:
        [delta] = event["choices"]
        self._ids += delta.get("token_ids", ())
        for part in self._parts(delta, end=delta["finish_reason"] is not None):
            yield from self._pieces(part)
        if delta["finish_reason"] is not None:
            yield from self._closing(is_cut=delta["finish_reason"] != "stop")
            yield from self._end(delta, event)

    def reply(self, reply: Json) -> object:
        [choice] = reply["choices"]
        self._ids += choice.get("token_ids", ())
        for part in self._parts(choice, end=True):
            for _ in self._pieces(part):
                pass
        for _ in self._closing(is_cut=choice["finish_reason"] != "stop"):
            pass
        return self._whole(choice, reply)

    def _parts(self, choice: Json, *, end: bool) -> Iterable[Part]:
        """Return the parts that the text of a choice completes."""
        return self._parser.push(choice["text"], end=end)

    def _pieces(self, part: Part) -> Iterator[Json]:
        """Add a part to the last block or to a new one, and yield the events."""
        kind: Kind = (
            "reasoning" if isinstance(part, Reasoning) else "call" if isinstance(part, Call | Arguments) else "content"
        )
        if isinstance(part, Call) or not self._is_open or self.blocks[-1].kind != kind:
            yield from self._closing()
            block = Block(kind, len(self.blocks))
            if isinstance(part, Call):
                block = replace(block, id=part.id, name=part.name)
            self.blocks.append(block)
            self._is_open = True
            yield from self._begin(block)
        if not isinstance(part, Call):
            self.blocks[-1].text += part.text
            yield self._piece(self.blocks[-1], part.text)

    def _closing(self, *, is_cut: bool = False) -> Iterator[Json]:
        if self._is_open:
            self._is_open = False
            self.blocks[-1].is_cut = is_cut
            yield from self._close(self.blocks[-1])

    @property
    def _reasoning_tokens(self) -> int:
        tokenizer = self._generation.plan.served.tokenizer
        if tokenizer is None or not any(block.kind == "reasoning" for block in self.blocks):
            return 0
        return reasoning_tokens(self._format, self._ids, tokenizer, has_calls=self._parser.has_calls)

    @abstractmethod
    def _begin(self, block: Block) -> Iterable[Json]:
        """Return the events that open a block."""

    @abstractmethod
    def _piece(self, block: Block, text: str) -> Json:
        """Return the event with more text of a block."""

    @abstractmethod
    def _close(self, block: Block) -> Iterable[Json]:
        """Return the events that close a block."""

    @abstractmethod
    def _end(self, delta: Json, event: Json) -> Iterable[Json]:
        """Return the last events, after all blocks are closed."""

    @abstractmethod
    def _whole(self, choice: Json, reply: Json) -> object:
        """Return the reply with all blocks, if it is not streamed."""
