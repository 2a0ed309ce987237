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

from model.api.request import FinishReason, SamplingParams, TokenOutput
from model.errors import ConfigError

_SHORT = 256  # tokens that are decoded at once, in some 0.1 ms
_HELD = 16  # tokens whose text is held back whole
_CHARACTER = 4  # bytes of the longest
_REPLACEMENT = "\ufffd"  # what a byte-level decoder shows for an incomplete character


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text (or a pair), with the segment of each token."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class Tokenizer:
    """A checkpoint's own tokenizer, without truncation or padding. Safe to share between threads.

    Other threads run while a text is encoded or many ids are decoded: of the library's calls only those for batches let
    go of the interpreter's lock.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset(token for token, known in added if known.special)
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
        given = text if pair is None else (text, pair)
        [encoding] = self._tokenizer.encode_batch([given], add_special_tokens=add_special_tokens)
        return Encoded(tuple(encoding.ids), tuple(encoding.type_ids))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [Encoded(tuple(e.ids), tuple(e.type_ids)) for e in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) > _SHORT:
            [whole] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return whole
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
        return [None if token in self.special_ids else self._tokenizer.id_to_token(token) for token in range(count)]

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes of a split character appear as replacement characters."""
        return self.decode([token_id], skip_special_tokens=False)


class Detokenizer:
    """The text of one sequence as it grows, cut at its first stop string.

    `push` returns the text that is certain by now; after `stopped` is set nothing more comes. The text ends before the
    stop string, or after it with `include_stop`.

    The text is what ids taken one by one make certain, however many come at once, and taking one costs the same however
    many came before.
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
        self._count = 0  # of the tokens taken
        self._context: list[int] = []  # the last that have become text: some decoders strip or join where one begins
        self._held: list[int] = []  # taken since
        self._known = ""  # of the text of both, what was sent
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
        ignored = self._min_tokens - self._count  # of the ids, so many cannot stop it
        if self._stop and 0 < ignored < len(ids):
            return self.push(ids[:ignored]) + self.push(ids[ignored:], final=final)
        self._count += len(ids)
        text = self._pending + self._new_text(ids) + (self._rest() if final else "")
        self._pending = ""
        if not self._stop or self._count <= self._min_tokens:
            return text
        return self._cut(text, final)

    def _new_text(self, ids: Sequence[int]) -> str:
        if self._skip:
            ids = [token for token in ids if token not in self._tokenizer.special_ids]
        taken, text = self._plain_text(ids) if len(ids) > 1 else (0, "")
        for token in ids[taken:]:
            text += self._next_text(token)
        return text

    def _plain_text(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of the ids can be taken at once, and their text: all of it certain, the last two have some alone.

        Taken one by one they would then leave just the last as context, too.
        """
        plain = (end for end in range(len(ids), 1, -1) if self._is_plain(ids[end - 1]) and self._is_plain(ids[end - 2]))
        end = next(plain, 0)
        whole = self._decode([*self._context, *self._held, *ids[:end]]) if end else _REPLACEMENT
        if _REPLACEMENT in whole:
            return 0, ""
        text = whole[len(self._known) :]
        self._follow([ids[end - 1]])
        return end, text

    def _is_plain(self, token: int) -> bool:
        text = self._decode([token])
        return bool(text) and _REPLACEMENT not in text

    def _next_text(self, token: int) -> str:
        self._held.append(token)
        known, whole = self._looked_at()
        if len(whole) <= len(known) or whole.endswith(_REPLACEMENT):
            return self._old_text(known, whole) if len(self._held) > _HELD else ""
        self._follow(self._held)
        return whole[len(known) :]

    def _rest(self) -> str:
        """What is held back."""
        known, whole = self._looked_at()
        self._follow(self._held)
        return whole[len(known) :]

    def _looked_at(self) -> tuple[str, str]:
        """The text of what is held, and what of its beginning was sent before."""
        whole = self._decode([*self._context, *self._held])
        if _REPLACEMENT in whole and not whole.startswith(self._known):
            # Byte fallback spoils a whole run of bytes for a wrong one, and these were text already.
            return "", self._decode(self._held)
        return self._known, whole

    def _old_text(self, known: str, whole: str) -> str:
        """Of what is held, the text that nothing to come can change: no character is longer than its last tokens."""
        held, context = self._held, self._context if known else []
        for end in range(len(held) - _CHARACTER + 1, 0, -1):
            text = self._decode([*context, *held[:end]])
            if len(text) >= len(known) and whole.startswith(text):
                if len(text) > len(known):
                    self._follow(held[:end])
                self._held = held[end:]
                return text[len(known) :]
        last = self._decode(held[-_CHARACTER:])
        if not (last.endswith(_REPLACEMENT) and whole.endswith(_REPLACEMENT)):
            self._follow(held)
            return whole[len(known) :]
        # Each token ends amid a character.
        self._context, self._held, self._known = [], held[-_CHARACTER:], last[:-1]
        return whole[len(known) : -1]

    def _follow(self, ids: list[int]) -> None:
        """These have become text, and nothing is held back."""
        known = self._decode(ids)
        if known:
            self._context, self._known = ids, known
        else:  # a blank that the decoder strips where a text begins
            self._context = [*self._context, *ids][-_HELD:]
            self._known = self._decode(self._context)
        self._held = []

    def _decode(self, ids: Sequence[int]) -> str:
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
