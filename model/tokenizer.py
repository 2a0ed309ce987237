"""Ids to text and back, incrementally.

`Tokenizer` wraps a checkpoint's tokenizer.json. `Detokenizer` turns a growing list of ids into text deltas that join
to exactly the text of the whole list: it holds back unfinished UTF-8 characters and what may begin a stop string.
No torch, no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from model.config import ConfigError
from model.request import FinishReason, SamplingParams, TokenOutput

_REPLACEMENT = "\ufffd"  # what a byte-level decoder shows for an incomplete character


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text (or a pair), with the segment of each token."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class Tokenizer:
    """A checkpoint's own tokenizer, without truncation or padding. Safe to share between threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._alone: dict[tuple[int, bool], str] = {}  # texts of single tokens, which streams ask for all the time

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The folder's tokenizer.json, or None where there is none: such a model speaks token ids only.

        Raises `ConfigError` for a file that is no tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{folder.name}: tokenizer.json cannot be read: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def special_token_id(self, text: str) -> int | None:
        """The id of an added token such as a language code."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((token for token, known in added.items() if known.content == text), None)

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoded:
        encoding = self._tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
        return Encoded(tuple(encoding.ids), tuple(encoding.type_ids))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [Encoded(tuple(e.ids), tuple(e.type_ids)) for e in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) != 1:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        key = (ids[0], skip_special_tokens)
        text = self._alone.get(key)
        if text is None:
            text = self._alone[key] = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, outputs: Sequence[Sequence[int]]) -> list[str]:
        """Each decoded without its special tokens."""
        return self._tokenizer.decode_batch([list(ids) for ids in outputs])

    @property
    def decoder(self) -> Any:
        """The decoder as tokenizer.json describes it; None where tokens are only joined by spaces."""
        return json.loads(self._tokenizer.to_str())["decoder"]

    def token_names(self, count: int) -> list[str | None]:
        """The tokens 0 to `count - 1` as the vocabulary spells them; None for a special one and for none at all."""
        special = {token for token, known in self._tokenizer.get_added_tokens_decoder().items() if known.special}
        return [None if token in special else self._tokenizer.id_to_token(token) for token in range(count)]

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes of a split character appear as replacement characters."""
        return self.decode([token_id], skip_special_tokens=False)


class Detokenizer:
    """The text of one sequence as it grows, cut at its first stop string.

    `push` returns the text that is certain by now; after `stopped` is set nothing more comes. The text ends before the
    stop string, or after it with `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip = skip_special_tokens
        self._min_tokens = min_tokens  # before so many tokens no stop string counts
        self._ids: list[int] = []
        self._prefix = 0  # ids[prefix:read] give the decoder context: some strip or join at the beginning of a text
        self._read = 0  # ids[:read] have become text
        self._pending = ""  # text that may be the beginning of a stop string
        self.stopped: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
        return cls(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def fill(self, output: TokenOutput) -> bool:
        """Set the output's text; True if a stop string ended the sequence, which the engine then has to be told.

        The output is then the sequence's last. A stop token's text is left out unless `include_stop`.
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
        """Text that `ids` make certain; with `final` nothing is held back."""
        if self.stopped is not None:
            return ""
        ignored = self._min_tokens - len(self._ids)  # of the ids, so many cannot stop it
        if self._stop and 0 < ignored < len(ids):
            return self.push(ids[:ignored]) + self.push(ids[ignored:], final=final)
        self._ids.extend(ids)
        text = self._pending + self._new_text(final)
        self._pending = ""
        if not self._stop or len(self._ids) <= self._min_tokens:
            return text
        return self._cut(text, final)

    def _new_text(self, final: bool) -> str:
        known = self._decode(self._ids[self._prefix : self._read])
        whole = self._decode(self._ids[self._prefix :])
        if whole.endswith(_REPLACEMENT) and not final:
            return ""
        if len(whole) <= len(known) and not final:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def _cut(self, text: str, final: bool) -> str:
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:  # the first to be complete, so that it does not matter how the text came in
            at, self.stopped = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            return text[: at + len(self.stopped) * self._include_stop]
        held = 0 if final else max(_overlap(text, stop) for stop in self._stop)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
