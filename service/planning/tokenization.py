"""Text to ids for requests, and ids to text: off the event loop when there is much of it, bounded before it starts, cut
where a client allows it.

Cutting removes text tokens and keeps the special tokens that the tokenizer put around and between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from model.text.tokenizer import Encoded, Tokenizer
from service.core.errors import ApiError, invalid

T = TypeVar("T")
Side = Literal["left", "right"]

_INLINE_CHARACTERS = 2_048  # tokenised on the event loop: about 1 ms, less than a hand-over under load costs
_INLINE_TOKENS = 2_048  # likewise, the other way


class TokenizerThreads:
    """A few threads for long texts. `observe` gets the model and the seconds of every run."""

    def __init__(self, threads: int, observe: Callable[[str, float], None]) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._observe = observe

    async def run(self, model: str, characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, which handles so many characters of text for `model`."""
        began = time.perf_counter()
        try:
            return work() if characters <= _INLINE_CHARACTERS else await self.aside(work)
        finally:
            self._observe(model, time.perf_counter() - began)

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of `work`, off the event loop."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="triptych-tokenizer")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def decoded(self, tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`."""

        def work() -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return work() if len(ids) <= _INLINE_TOKENS else await self.aside(work)

    def close(self) -> None:
        """Let go of the threads; a later `run` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def check_characters(text: str, limit: int, param: str) -> None:
    """Refuse a text that is too long to be worth tokenising."""
    if len(text) > limit:
        message = f"{param} has {len(text)} characters, more than the {limit} that can fit the model"
        raise invalid(message, param, "context_length_exceeded")


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside `[0, vocab_size)`, naming the first."""
    if max(ids, default=0) >= vocab_size:
        at = next(position for position, token in enumerate(ids) if token >= vocab_size)
        raise outside_vocabulary(f"{param}[{at}]", vocab_size)


def outside_vocabulary(param: str, vocab_size: int) -> ApiError:
    return invalid(f"{param} must be a token id below {vocab_size}", param, "token_id_out_of_range")


def cut_ids(ids: tuple[int, ...], limit: int, side: Side) -> tuple[int, ...]:
    """At most `limit` ids, taken from the other end than `side`."""
    return ids[:limit] if side == "right" else ids[max(0, len(ids) - limit) :]


def cut_text(tokenizer: Tokenizer, text: str, pair: str | None, encoded: Encoded, limit: int, side: Side) -> Encoded:
    """`encoded` (of `text` and `pair`) in at most `limit` tokens: text tokens go, from the longer text first."""
    texts = [text] if pair is None else [text, pair]
    plain = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
    sizes = _kept_sizes([len(ids) for ids in plain], len(encoded.ids) - limit)
    kept: list[int] = []
    at = 0
    for ids, size in zip(plain, sizes, strict=True):
        start = _find(encoded.ids, ids, at)
        if start is None:  # special tokens cannot be told from text
            return Encoded(cut_ids(encoded.ids, limit, side), cut_ids(encoded.type_ids, limit, side))
        kept += range(at, start)
        at = start + len(ids)
        kept += range(start, start + size) if side == "right" else range(at - size, at)
    kept = [*kept, *range(at, len(encoded.ids))][:limit]  # a limit below the special tokens alone cuts them too
    type_ids = encoded.type_ids
    return Encoded(tuple(encoded.ids[i] for i in kept), tuple(type_ids[i] for i in kept) if type_ids else ())


def _find(ids: tuple[int, ...], part: tuple[int, ...], start: int) -> int | None:
    """Where `part` begins in `ids`, at `start` or after the few special tokens that may precede it."""
    last = len(ids) - len(part)
    return next((i for i in range(start, last + 1) if ids[i : i + len(part)] == part), None)


def _kept_sizes(sizes: list[int], excess: int) -> list[int]:
    """`sizes` less `excess` in all, taken from the longest while it is the longest."""
    if len(sizes) == 1:
        return [max(0, sizes[0] - excess)]
    left = max(0, sum(sizes) - excess)
    first = min(sizes[0], max(left - sizes[1], (left + 1) // 2))
    return [first, min(sizes[1], left - first)]
