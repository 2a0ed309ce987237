"""Incremental detokenisation. No torch, no network.

`Detokenizer` turns a growing list of ids into text deltas that join to exactly the text of the whole list: it holds
back incomplete UTF-8 characters and text that may begin a stop string.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.api.sampling_params import LineStop, SamplingParams
from triptych.model.text.decoders import StreamCleaner
from triptych.model.text.tokenizer import REPLACEMENT, Tokenizer

LINE_STOP = ""  # the stop reason of an output that a `LineStop` ended
_MAX_HELD = 16  # tokens that are held back without emitting part of their text
_CHARACTER_BYTES = 4  # of the longest UTF-8 character


class Detokenizer:
    """Decodes a growing sequence incrementally and cuts its text at the first stop string.

    `push` returns the text that later tokens cannot change. The text ends before the stop string, or after it with
    `include_stop`; once `stopped` is set, `push` returns nothing more.

    The text does not depend on how many ids a call gets. The cost of a token does not grow with the sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_ids: Sequence[int] = (),
        min_tokens: int = 0,
        line_stop: LineStop | None = None,
    ) -> None:
        """`shown_special_ids`: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._lines = None if line_stop is None else _LineWatch(line_stop)
        self._stops = bool(stop) or line_stop is not None
        self._include_stop = include_stop
        self._skipped = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens and not shown_special_ids  # when decoding; `_skipped` are gone
        self._min_tokens = min_tokens  # stop strings within the first ones are ignored
        self._fixed_texts = tokenizer.fixed_texts(skip_special_tokens=self._skip_special_tokens)
        self._num_tokens = 0
        # The last tokens with emitted text. New ones are decoded after them: some decoders strip or join at the start.
        self._context: list[int] = []
        self._held: list[int] = []  # tokens since then
        self._emitted = ""  # the part of context's and held tokens' text that was emitted
        self._cleaner = StreamCleaner() if tokenizer.cleans_up else None
        self._possible_stop = ""  # text that may begin a stop string
        self._ignored = 0  # of its characters, those of the first tokens: no stop string ends there
        self.stopped: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
        return cls(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_ids=params.shown_special_ids,
            min_tokens=params.min_tokens,
            line_stop=params.line_stop,
        )

    def fill(self, output: TokenOutput) -> bool:
        """Set the output's text; True if a stop string ended the sequence and the engine must be told.

        The output is then the sequence's last. A stop token's text is omitted unless `include_stop`.
        """
        ids = output.token_ids
        if isinstance(output.stop_reason, int) and not self._include_stop:
            ids = ids[:-1]
        output.text = self.push(ids, final=output.finish_reason is not None)
        if self.stopped is None:
            return False
        running = output.finish_reason is None
        output.finish_reason, output.stop_reason = FinishReason.STOP, self.stopped
        return running

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Add `ids` and return the text that is final by now; with `final` nothing is held back."""
        if not final and not self._stops:
            return self._new_text(ids)
        if self.stopped is not None:
            return ""
        ignored = self._min_tokens - self._num_tokens  # the first ids, which cannot stop the sequence
        if self._stops and 0 < ignored < len(ids):
            return self.push(ids[:ignored]) + self.push(ids[ignored:], final=final)
        self._num_tokens += len(ids)
        text = self._possible_stop + self._new_text(ids, final=final)
        self._possible_stop = ""
        if not self._stops:
            return text
        if self._num_tokens > self._min_tokens:
            return self._cut_at_stop(text, final)
        shown = self._without_end(text, 0 if final else self._begun(text))  # a stop may go on after the first tokens
        self._ignored = len(self._possible_stop)
        return shown

    def _new_text(self, ids: Sequence[int], *, final: bool = False) -> str:
        text = self._decoded(ids) + (self._held_text() if final else "")
        return text if self._cleaner is None else self._cleaner.push(text, final=final)

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._skipped:
            ids = [token for token in ids if token not in self._skipped]
        fixed = None if self._held or not self._emitted or REPLACEMENT in self._emitted else self._fixed_text(ids)
        if fixed is not None:
            return fixed
        decoded, text = self._batch_text(ids) if len(ids) > 1 else (0, "")
        for token in ids[decoded:]:
            text += self._next_text(token)
        return text

    def _fixed_text(self, ids: Sequence[int]) -> str | None:
        """Return the text of `ids` after the context from a table; None if some of them have no fixed text."""
        text, found = "", None
        for token in ids:
            found = self._fixed_texts[token]
            if found is None:
                return None
            text += found.later
        if found is not None:
            self._context, self._emitted = [ids[-1]], found.first
        return text

    def _batch_text(self, ids: Sequence[int]) -> tuple[int, str]:
        """Decode the longest prefix of the ids that can be decoded at once; return its length and its text.

        Its last two tokens have a text of their own, so decoding one by one would leave the same state: the last token
        as context.
        """
        plain = (end for end in range(len(ids), 1, -1) if self._is_plain(ids[end - 1]) and self._is_plain(ids[end - 2]))
        end = next(plain, 0)
        whole = self._decode([*self._context, *self._held, *ids[:end]]) if end else REPLACEMENT
        if REPLACEMENT in whole:
            return 0, ""
        text = whole[len(self._emitted) :]
        self._set_context([ids[end - 1]])
        return end, text

    def _is_plain(self, token: int) -> bool:
        text = self._decode([token])
        return bool(text) and REPLACEMENT not in text

    def _next_text(self, token: int) -> str:
        self._held.append(token)
        emitted, whole = self._decode_held()
        if len(whole) <= len(emitted) or whole.endswith(REPLACEMENT):
            return self._stable_text(emitted, whole) if len(self._held) > _MAX_HELD else ""
        self._set_context(self._held)
        return whole[len(emitted) :]

    def _held_text(self) -> str:
        """Return the text of the held tokens, which become the context."""
        emitted, whole = self._decode_held()
        self._set_context(self._held)
        return whole[len(emitted) :]

    def _decode_held(self) -> tuple[str, str]:
        """Decode the context and the held tokens; return the part that was emitted before, and the whole text."""
        whole = self._decode([*self._context, *self._held])
        if REPLACEMENT in whole and not whole.startswith(self._emitted):
            # An invalid byte makes byte fallback replace a whole run of bytes, also those emitted already.
            return "", self._decode(self._held)
        return self._emitted, whole

    def _stable_text(self, emitted: str, whole: str) -> str:
        """Return the held text that later tokens cannot change: an unfinished character has at most four bytes."""
        held, context = self._held, self._context if emitted else []
        for end in range(len(held) - _CHARACTER_BYTES + 1, 0, -1):
            text = self._decode([*context, *held[:end]])
            if len(text) >= len(emitted) and whole.startswith(text):
                if len(text) > len(emitted):
                    self._set_context(held[:end])
                self._held = held[end:]
                return text[len(emitted) :]
        last = self._decode(held[-_CHARACTER_BYTES:])
        if not (last.endswith(REPLACEMENT) and whole.endswith(REPLACEMENT)):
            self._set_context(held)
            return whole[len(emitted) :]
        # Each token ends within a character.
        self._context, self._held, self._emitted = [], held[-_CHARACTER_BYTES:], last[:-1]
        return whole[len(emitted) : -1]

    def _set_context(self, ids: list[int]) -> None:
        """Make `ids`, whose text is emitted, the context; no token is held any more."""
        emitted = self._decode(ids)
        if emitted:
            self._context, self._emitted = ids, emitted
        else:  # a space that the decoder strips at the beginning
            self._context = [*self._context, *ids][-_MAX_HELD:]
            self._emitted = self._decode(self._context)
        self._held = []

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_part(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _cut_at_stop(self, text: str, final: bool) -> str:
        places = ((text.find(stop, max(0, self._ignored - len(stop) + 1)), stop) for stop in self._stop)
        matches = [(start, stop) for start, stop in places if start >= 0]
        if matches:  # the first one to be complete, so that the size of the deltas does not matter
            start, self.stopped = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[: start + len(self.stopped) * self._include_stop]
        if self._lines is not None and (end := self._lines.end(text)) is not None:
            self.stopped = LINE_STOP
            return text[:end]
        held = 0 if final else self._begun(text)
        if self._lines is not None and not final:
            held = max(held, self._lines.held(text))
        return self._without_end(text, held)

    def _begun(self, text: str) -> int:
        """Return how many last characters may begin a stop string."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)

    def _without_end(self, text: str, held: int) -> str:
        """Hold back the last characters, and return the others."""
        self._possible_stop = text[len(text) - held :]
        self._ignored = max(0, self._ignored - len(text) + held)
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class _LineWatch:
    """Finds the line break where a growing text ends: before a line with too little indent, or once it is late."""

    def __init__(self, stop: LineStop) -> None:
        self._seconds = stop.seconds
        self._began: float | None = None
        spaces = f"\n[ \t]{{0,{stop.indent - 1}}}" if stop.indent else "(?!)"
        self._short_line = re.compile(rf"({spaces})[^ \t]")
        self._possible = re.compile(rf"(?:{spaces})\Z")

    def end(self, text: str) -> int | None:
        """Return where the text ends; None if it goes on. `text` begins with what was held back before."""
        now = time.monotonic()
        began = self._began = now if self._began is None else self._began
        short = self._short_line.search(text)
        if short is not None:
            return short.end(1)
        late = self._seconds and now - began > self._seconds
        return text.find("\n") + 1 or None if late else None

    def held(self, text: str) -> int:
        """Return how many last characters may belong to a line that is indented too little."""
        found = self._possible.search(text)
        return 0 if found is None else len(found[0])
