"""The tokens of words that were seen before, for tokenizers that encode the words of a text one by one.

BERT's tokenizers, and those made like them, divide a text at spaces before anything else can join two parts of it. The
ids of a text are then the ids of what stands between its spaces, one after the other, and the same word always has
the same ids. Looking them up takes a tenth of the time that the library takes for the text, or less.

Every entry comes from the library, from the word alone. `WordCache.of` says for which tokenizers that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import tokenizers

_MAX_WORDS = 32_768  # about 8 MB; then the cache begins anew
_MAX_WORD = 32  # characters; longer ones are hardly seen twice
_ALWAYS_LEARNT = 2  # new words of a text; of a long one, one in eight
_MAX_TEXT = 16_384  # characters; the interpreter's lock is held for 1 ms or so

# Parts of a tokenizer with which no token, and nothing that a token depends on, reaches over a space.
_MODELS = frozenset({"WordPiece", "WordLevel"})
_SPLITTERS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_NORMALIZERS = frozenset({"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"})

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """The special tokens before, between and after one or two texts, and the type ids of each part, in that order."""

    special: tuple[Ids, ...]
    special_types: tuple[Ids, ...]
    text_types: Ids

    def fill(self, texts: Sequence[Ids]) -> tuple[Ids, Ids]:
        """Return the ids and the type ids of the whole."""
        ids, types = self.special[0], self.special_types[0]
        for at, text in enumerate(texts):
            ids += text + self.special[at + 1]
            types += (self.text_types[at],) * len(text) + self.special_types[at + 1]
        return ids, types


class WordCache:
    """Encodes texts by the words that it remembers, with the special tokens of the tokenizer. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, single: _Template, pair: _Template) -> None:
        self._tokenizer = tokenizer
        self._templates = (single, pair)
        self._words: dict[str, Ids] = {}

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> WordCache | None:
        """Return a cache for a tokenizer whose words are independent of each other, else None."""
        if not _divides_at_spaces(tokenizer):
            return None
        word = tokenizer.encode("a", add_special_tokens=False).ids
        single, pair = (_template(tokenizer.encode(*texts), len(texts), word) for texts in (("a",), ("a", "a")))
        return None if single is None or pair is None else cls(tokenizer, single, pair)

    def encode(self, text: str, pair: str | None = None) -> tuple[Ids, Ids] | None:
        """Return the ids and type ids with special tokens; None if too many words are new (some are added then)."""
        texts = (text,) if pair is None else (text, pair)
        found = []
        for one in texts:
            ids = self._ids(one)
            if ids is None:
                return None
            found.append(ids)
        return self._templates[len(texts) - 1].fill(found)

    def _ids(self, text: str) -> Ids | None:
        if len(text) > _MAX_TEXT:
            return None
        words = text.split(" ")
        parts = list(map(self._words.get, words))
        if None in parts:
            new = list({word for word, part in zip(words, parts, strict=True) if part is None})
            # A word alone costs a fifth of a short text: with many new ones the whole text is encoded.
            known = self._learn(new[: _ALWAYS_LEARNT + len(words) // 8])
            if len(known) < len(new):
                return None
            parts = [known[word] if part is None else part for word, part in zip(words, parts, strict=True)]
        return tuple(chain.from_iterable(parts))  # type: ignore[arg-type]  # none is None here

    def _learn(self, words: Sequence[str]) -> dict[str, Ids]:
        """Return the ids of each word, and remember those of the shorter ones."""
        encodings = self._tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
        found = {word: tuple(one.ids) for word, one in zip(words, encodings, strict=True)}
        kept = {word: ids for word, ids in found.items() if len(word) <= _MAX_WORD}
        if len(self._words) + len(kept) > _MAX_WORDS:
            self._words.clear()
        self._words.update(kept)
        return found


def _divides_at_spaces(tokenizer: tokenizers.Tokenizer) -> bool:
    normalizer = tokenizer.normalizer
    if _name(tokenizer.model) not in _MODELS or _name(tokenizer.pre_tokenizer) not in _SPLITTERS:
        return False
    contents = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
    if normalizer is not None:
        steps = list(normalizer) if _name(normalizer) == "Sequence" else [normalizer]
        if not all(_name(step) in _NORMALIZERS for step in steps):
            return False
        # Added tokens are looked for in the text as it is, and some in the normalised text.
        contents += [normalizer.normalize_str(content) for content in contents]
    return not any(" " in content for content in contents)


def _name(part: object) -> str:
    return type(part).__name__


def _template(encoding: tokenizers.Encoding, texts: int, word: Sequence[int]) -> _Template | None:
    """Read the special tokens off an encoding of texts of ids `word`; None unless each is there once, in order."""
    parts = encoding.sequence_ids  # of each token: its text's number, or None
    special: list[Ids] = []
    special_types: list[Ids] = []
    text_types: list[int] = []
    at = 0
    for number in (*range(texts), None):
        end = next((place for place in range(at, len(parts)) if parts[place] is not None), len(parts))
        special.append(tuple(encoding.ids[at:end]))
        special_types.append(tuple(encoding.type_ids[at:end]))
        at = end
        while at < len(parts) and number is not None and parts[at] == number:
            at += 1
        if number is not None:
            if not word or encoding.ids[end:at] != word or len(set(encoding.type_ids[end:at])) != 1:
                return None
            text_types.append(encoding.type_ids[end])
    return _Template(tuple(special), tuple(special_types), tuple(text_types)) if at == len(parts) else None
