"""Tokenises the texts of requests, long ones in threads, after limits are checked; truncates them where allowed.

Truncation removes tokens of the text, and keeps the special tokens that the tokenizer puts around and between texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from triptych.model.errors import TooManyTokensError
from triptych.model.text.fill_marks import OtherFile
from triptych.model.text.infilling import Infilling, PromptTokens
from triptych.model.text.tokenizer import Encoded, Tokenizer
from triptych.service.core.errors import ApiError, invalid
from triptych.service.core.models import ServedModel
from triptych.service.core.threads import Threads

T = TypeVar("T")
_LONGEST_TOKEN = 16  # characters; a text with longer tokens on average is cut shorter than necessary
Side = Literal["left", "right"]

_INLINE_CHARACTERS = 2_048  # tokenised on the event loop, in about 1 ms: a thread would cost more under load
_INLINE_TOKENS = 2_048  # the same for detokenising


class TokenizerThreads(Threads):
    """Tokenises long texts in threads, and reports the model and the seconds of every run to `observe`."""

    def __init__(self, threads: int, observe: Callable[[str, float], None]) -> None:
        super().__init__(threads, "triptych-tokenizer")
        self._observe = observe

    async def run(self, model: str, characters: int, work: Callable[[], T]) -> T:
        """Run `work`, which tokenises `characters` characters for `model`, and return its result."""
        began = time.perf_counter()
        try:
            return work() if characters <= _INLINE_CHARACTERS else await self.run_in_thread(work)
        finally:
            self._observe(model, time.perf_counter() - began)

    async def decode(self, tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""

        def work() -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return work() if len(ids) <= _INLINE_TOKENS else await self.run_in_thread(work)


class Gap(NamedTuple):
    """What is around the output, if a model fills in the middle of a text."""

    infilling: Infilling
    suffix: str
    files: Sequence[OtherFile] = ()
    room: int | None = None  # a longer prompt is cut to this many tokens; None: it is refused

    def prompt(self, prefix: str) -> PromptTokens:
        return self.infilling.prompt(prefix, self.suffix, self.files, most=self.room)


class PromptInput(NamedTuple):
    """A text or token ids as the client sent them, and the name of their field."""

    value: str | list[int]
    param: str
    special: bool = True  # whether special tokens are added
    language: int | None = None  # token of the text's language; None: the checkpoint's default
    most: int | None = None  # maximum tokens of a text; None: any number
    gap: Gap | None = None  # the text is what is before the gap

    @property
    def characters(self) -> int:
        """The number of characters to tokenise."""
        texts = [self.value] if isinstance(self.value, str) else []
        if self.gap is not None:
            texts += [self.gap.suffix, *(one.text for one in self.gap.files)]
        return sum(map(len, texts))

    def tokens(self, served: ServedModel, refuse: Callable[[PromptInput, int], None]) -> PromptTokens:
        """Return the token ids; raises a 400 if there are none, or for an id outside the vocabulary.

        If there are more tokens than `most`, `refuse` is called with their number before ids are made.
        """
        if isinstance(self.value, str) and self.gap is not None:
            found = self.gap.prompt(self.value)
            if self.most is not None and len(found.ids) > self.most:
                refuse(self, len(found.ids))
            return found
        if isinstance(self.value, str):
            tokenizer = served.require_tokenizer(self.param)
            try:
                ids = tokenizer.encode(self.value, add_special_tokens=self.special, most=self.most).ids
            except TooManyTokensError as error:
                refuse(self, error.count)
                raise
            languages = tokenizer.source_languages
            ids = ids if self.language is None or languages is None else languages.mark(ids, self.language)
        else:
            ids = tuple(self.value)
        if not ids:
            raise invalid(f"{self.param} is empty: it has no tokens", self.param, "empty_prompt")
        check_vocabulary(ids, served.source_vocab_size, self.param)
        return PromptTokens(ids, 0, len(ids))


async def tokenise(
    threads: TokenizerThreads,
    served: ServedModel,
    inputs: Sequence[PromptInput],
    refuse: Callable[[PromptInput, int], None],
) -> list[PromptTokens]:
    """Return the tokens of each input, as `PromptInput.tokens` does."""

    def work() -> list[PromptTokens]:
        return [one.tokens(served, refuse) for one in inputs]

    characters = sum(one.characters for one in inputs)
    return await threads.run(served.name, characters, work) if characters else work()


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise an `ApiError` that names the first id outside `[0, vocab_size)`."""
    if max(ids, default=0) >= vocab_size:
        at = next(position for position, token in enumerate(ids) if token >= vocab_size)
        raise outside_vocabulary(f"{param}[{at}]", vocab_size)


def outside_vocabulary(param: str, vocab_size: int) -> ApiError:
    """Return the error for a token id that the model does not have."""
    return invalid(f"{param} must be a token id below {vocab_size}", param, "token_id_out_of_range")


def beginning(tokenizer: Tokenizer, prefix: str, text: str, limit: int) -> str:
    """Return about the longest beginning of `text` that has at most `limit` tokens together with `prefix`.

    It is found by bisection, because some tokenizers do not return the positions of their tokens.
    """
    text = text[: limit * _LONGEST_TOKEN]

    def fits(end: int) -> bool:
        return len(tokenizer.encode(prefix + text[:end]).ids) <= limit

    if fits(len(text)):
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return text[:low]


def truncate_ids(ids: tuple[int, ...], limit: int, side: Side) -> tuple[int, ...]:
    """Return at most `limit` ids; the others are removed at `side`."""
    return ids[:limit] if side == "right" else ids[max(0, len(ids) - limit) :]


def truncate_text(
    tokenizer: Tokenizer, text: str, pair: str | None, encoded: Encoded, limit: int, side: Side
) -> Encoded:
    """Truncate `encoded` (the tokens of `text` and `pair`) to `limit` tokens; the longer text is shortened first."""
    texts = [text] if pair is None else [text, pair]
    plain = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
    sizes = _kept_sizes([len(ids) for ids in plain], len(encoded.ids) - limit)
    kept: list[int] = []
    at = 0
    for ids, size in zip(plain, sizes, strict=True):
        start = _find(encoded.ids, ids, at)
        if start is None:  # special tokens cannot be distinguished from text
            return Encoded(truncate_ids(encoded.ids, limit, side), truncate_ids(encoded.type_ids, limit, side))
        kept += range(at, start)
        at = start + len(ids)
        kept += range(start, start + size) if side == "right" else range(at - size, at)
    kept = [*kept, *range(at, len(encoded.ids))][:limit]  # truncates special tokens if the limit is below their number
    type_ids = encoded.type_ids
    return Encoded(tuple(encoded.ids[i] for i in kept), tuple(type_ids[i] for i in kept) if type_ids else ())


def _find(ids: tuple[int, ...], part: tuple[int, ...], start: int) -> int | None:
    """Return the index of `part` in `ids` at or after `start`; None if it is not there."""
    last = len(ids) - len(part)
    return next((i for i in range(start, last + 1) if ids[i : i + len(part)] == part), None)


def _kept_sizes(sizes: list[int], excess: int) -> list[int]:
    """Reduce one or two sizes by `excess` in total, the larger one first until they are equal.

    An odd rest goes to the larger one, or to the second of equal ones, as in `tokenizers`.
    """
    if len(sizes) == 1:
        return [max(0, sizes[0] - excess)]
    left = max(0, sum(sizes) - excess)
    short = min(*sizes, left // 2)
    return [short, left - short] if sizes[0] <= sizes[1] else [left - short, short]
