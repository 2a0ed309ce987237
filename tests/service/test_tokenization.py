"""Tokenisation on the event loop and in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel

from triptych.model.text.tokenizer import Encoded, Tokenizer
from triptych.service.planning.tokenization import TokenizerThreads


class Noting(Tokenizer):
    """A tokenizer that records the thread in which it runs."""

    asked = ""

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, most: int | None = None
    ) -> Encoded:
        self.asked = threading.current_thread().name
        return Encoded((), ())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.asked = threading.current_thread().name
        return ""


@pytest.mark.parametrize(("size", "aside"), [(2, False), (3_000, True)])
@pytest.mark.parametrize("way", ["text to ids", "ids to text"])
def test_long_texts_are_tokenised_in_threads(way: str, size: int, aside: bool) -> None:
    tokenizer = Noting(RawTokenizer(WordLevel({})))

    async def work() -> None:
        threads = TokenizerThreads(1, lambda model, seconds: None)
        try:
            if way == "text to ids":
                await threads.run("m", size, lambda: tokenizer.encode("a" * size))
            else:
                await threads.decode(tokenizer, [0] * size, skip_special_tokens=True)
        finally:
            threads.close()

    asyncio.run(work())
    assert tokenizer.asked.startswith("triptych-tokenizer") is aside
