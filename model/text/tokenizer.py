"""Tokenisation and incremental detokenisation. No torch, no network.

`Tokenizer` wraps a checkpoint's tokenizer.json. `Detokenizer` turns a growing list of ids into text deltas that join
to exactly the text of the whole list: it holds back incomplete UTF-8 characters and text that may begin a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from model.api.request import FinishReason, SamplingParams, TokenOutput
from model.errors import ConfigError
from model.gguf.container import gguf_path, read_gguf
from model.text.decoders import has_fixed_texts
from model.text.gguf_tokenizer import GGUFFiles, build_gguf_tokenizer
from model.text.sentencepiece_tokenizers import put_end_behind_texts
from model.text.source_languages import SourceLanguages, source_languages
from model.text.tokenizer_builder import PieceTokenizer, build_tokenizer
from model.text.tokenizer_files import Files
from model.text.word_cache import WordCache

_MAX_LOCKED = 256  # tokens that are decoded under the interpreter's lock, which takes about 0.1 ms
_MAX_HELD = 16  # tokens that are held back without emitting part of their text
_CHARACTER_BYTES = 4  # of the longest UTF-8 character
_REPLACEMENT = "\ufffd"  # a byte-level decoder's output for an incomplete character
_MASKS = ("[MASK]", "<mask>")  # where no file beside tokenizer.json names the mask token
_UNKNOWNS = ("[UNK]", "<unk>")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text (or a pair) with their token type ids (segments)."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Located(Encoded):
    """Tokens and where in the texts they come from; every list has an entry for each token."""

    offsets: tuple[tuple[int, int], ...]  # of characters, in the text that the token is of
    texts: tuple[int | None, ...]  # 0: the first text, 1: the second; None: a special token
    words: tuple[int | None, ...]  # which word of its text

    def keep(self, places: Sequence[int]) -> Located:
        """Return the tokens at these places alone."""
        return Located(
            tuple(self.ids[at] for at in places),
            tuple(self.type_ids[at] for at in places),
            tuple(self.offsets[at] for at in places),
            tuple(self.texts[at] for at in places),
            tuple(self.words[at] for at in places),
        )


@dataclass(frozen=True, slots=True)
class FixedText:
    """The text of a token that does not depend on its neighbours: as the first of a text, and behind others."""

    first: str
    later: str


class FixedTexts(dict[int, FixedText | None]):
    """Caches the fixed texts of a tokenizer's tokens, each found when it is first looked up."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> FixedText | None:
        found = self._tokenizer.find_fixed_text(token_id, skip_special_tokens=self._skip_special_tokens)
        self[token_id] = found
        return found


class Tokenizer:
    """A checkpoint's own tokenizer, without truncation or padding. Thread-safe.

    Encoding, and decoding of many ids, use the library's batch calls: only those release the interpreter's lock.
    """

    def __init__(
        self,
        built: tokenizers.Tokenizer | PieceTokenizer,
        languages: SourceLanguages | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names` are special tokens by what they are for: "mask_token"."""
        self.source_languages = languages
        self._pieces = built if isinstance(built, PieceTokenizer) else None
        tokenizer = built.tokenizer if isinstance(built, PieceTokenizer) else built
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._words = None if self._pieces is not None else WordCache.of(tokenizer)
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset(token for token, known in added if known.special)
        names = names or {}
        self.mask_token = self._first("mask_token", names, _MASKS)
        self.unknown_id = self._id_of(self._first("unk_token", names, _UNKNOWNS))
        self._token_texts: dict[tuple[int, bool], str] = {}  # cached, since streams decode single tokens constantly
        self._has_fixed_texts = has_fixed_texts(tokenizer.decoder)
        self._fixed_texts = {skip: FixedTexts(self, skip_special_tokens=skip) for skip in (False, True)}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Read tokenizer.json, else the files that were published before it; None if the folder has no tokenizer.

        Such a model takes token ids only. A GGUF file, or a folder that holds one and no tokenizer.json, has it in its
        metadata. Raises `ConfigError` for invalid files.
        """
        if not (folder / "tokenizer.json").is_file() and (file := gguf_path(folder)) is not None:
            metadata = GGUFFiles(file, read_gguf(file))
            found = build_gguf_tokenizer(metadata)
            return None if found is None else cls(found, None, _special_names(metadata))
        files, path = Files(folder), folder / "tokenizer.json"
        built = _read_whole(path, files) if path.is_file() else build_tokenizer(files)
        return None if built is None else cls(built, source_languages(built, files), _special_names(files))

    def _first(self, name: str, names: Mapping[str, str], usual: Sequence[str]) -> str | None:
        """Return the special token `name`, by the folder's files or else by its usual texts, if it is there."""
        candidates = [names[name]] if name in names else usual
        return next((text for text in candidates if self._tokenizer.token_to_id(text) is not None), None)

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def mask_id(self) -> int | None:
        return self._id_of(self.mask_token)

    @property
    def has_offsets(self) -> bool:
        """Whether it can tell which characters a token comes from."""
        return self._pieces is None

    @property
    def marks_subwords(self) -> bool:
        """Whether the name of a token tells that it continues a word (WordPiece's ##)."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def token_name(self, token_id: int) -> str:
        """Return the vocabulary's entry; empty for an id that has none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_id(self, name: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is none of this name."""
        return self._tokenizer.token_to_id(name)

    def join(self, names: Sequence[str]) -> str:
        """Return the text of vocabulary entries that follow each other."""
        decoder = self._tokenizer.decoder
        return " ".join(names) if decoder is None else str(decoder.decode(list(names)))

    def locate(self, text: str, pair: str | None = None) -> Located:
        """Encode with special tokens and with the place of each token; needs `has_offsets`."""
        item = text if pair is None else (text, pair)
        [found] = self._tokenizer.encode_batch([item])
        offsets, texts, words = found.offsets, found.sequence_ids, found.word_ids
        return Located(tuple(found.ids), tuple(found.type_ids), tuple(offsets), tuple(texts), tuple(words))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def special_token_id(self, text: str) -> int | None:
        """Return the id of an added token, such as a language code; None if there is none of this text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((token for token, known in added.items() if known.content == text), None)

    def language_token(self, code: str) -> int | None:
        """Return the token of a language, whose text is its code, in M2M-100 between underscores; None without one."""
        found = (self.special_token_id(text) for text in (code, f"__{code}__"))
        return next((token for token in found if token is not None), None)

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoded:
        if add_special_tokens and self._words is not None:
            found = self._words.encode(text, pair)
            if found is not None:
                return Encoded(*found)
        item = text if pair is None else (text, pair)
        [encoded] = self._encode_items([item], add_special_tokens)
        return encoded

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        return self._encode_items(list(texts), add_special_tokens)

    def _encode_items(self, items: list[Any], add_special_tokens: bool) -> list[Encoded]:
        if self._pieces is not None:
            return [self._pieced(item, add_special_tokens) for item in items]
        encodings = self._tokenizer.encode_batch(items, add_special_tokens=add_special_tokens)
        return [Encoded(tuple(e.ids), tuple(e.type_ids)) for e in encodings]

    def _pieced(self, item: Any, add_special_tokens: bool) -> Encoded:
        assert self._pieces is not None
        if not isinstance(item, str):
            raise ConfigError("the tokenizers of Marian and M2M-100 do not encode pairs of texts")
        ids = self._pieces.encode(item, add_special_tokens=add_special_tokens)
        return Encoded(tuple(ids), (0,) * len(ids))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) > _MAX_LOCKED:
            [whole] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return whole
        if len(ids) != 1:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        key = (ids[0], skip_special_tokens)
        text = self._token_texts.get(key)
        if text is None:
            text = self._token_texts[key] = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def fixed_texts(self, *, skip_special_tokens: bool) -> Mapping[int, FixedText | None]:
        """Return the texts of the tokens of which it does not depend on their neighbours; of others None."""
        return self._fixed_texts[skip_special_tokens]

    def find_fixed_text(self, token_id: int, *, skip_special_tokens: bool) -> FixedText | None:
        """Find an entry of `fixed_texts`."""
        if not self._has_fixed_texts:
            return None
        alone = self.decode([token_id], skip_special_tokens=skip_special_tokens)
        if not alone or _REPLACEMENT in alone:
            return None  # no text, only a space that is stripped at the beginning, or a part of a character
        twice = self.decode([token_id, token_id], skip_special_tokens=skip_special_tokens)
        return FixedText(alone, twice[len(alone) :]) if twice.startswith(alone) else None

    def decode_batch(self, outputs: Sequence[Sequence[int]]) -> list[str]:
        """Decode each output without its special tokens."""
        return self._tokenizer.decode_batch([list(ids) for ids in outputs])

    @property
    def decoder(self) -> Any:
        """The decoder section of tokenizer.json; None if tokens are joined by spaces."""
        return json.loads(self._tokenizer.to_str())["decoder"]

    def token_names(self, count: int) -> list[str | None]:
        """Return the vocabulary entries of tokens 0 to `count - 1`; None for special and unknown tokens."""
        return [None if token in self.special_ids else self._tokenizer.id_to_token(token) for token in range(count)]

    def token_text(self, token_id: int) -> str:
        """Decode one token alone; bytes of a split character become replacement characters."""
        return self.decode([token_id], skip_special_tokens=False)


def _read_whole(path: Path, files: Files) -> tokenizers.Tokenizer:
    tokenizer = _read(path)
    if files.setting("add_eos_token", False) and (files.folder / "modules.json").is_file():
        put_end_behind_texts(tokenizer, files)
    return tokenizer


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path.parent.name}: tokenizer.json cannot be read: {error}") from None


def _special_names(files: Files) -> dict[str, str]:
    """Return the special tokens that the folder's files beside tokenizer.json name, by what they are for."""
    found = {name: files.special(name, "").content for name in ("mask_token", "unk_token")}
    return {name: text for name, text in found.items() if text}


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
    ) -> None:
        """`shown_special_ids`: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
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
        self._possible_stop = ""  # text that may begin a stop string
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
        if not final and not self._stop:
            return self._new_text(ids)
        if self.stopped is not None:
            return ""
        ignored = self._min_tokens - self._num_tokens  # the first ids, which cannot stop the sequence
        if self._stop and 0 < ignored < len(ids):
            return self.push(ids[:ignored]) + self.push(ids[ignored:], final=final)
        self._num_tokens += len(ids)
        text = self._possible_stop + self._new_text(ids) + (self._held_text() if final else "")
        self._possible_stop = ""
        if not self._stop or self._num_tokens <= self._min_tokens:
            return text
        return self._cut_at_stop(text, final)

    def _new_text(self, ids: Sequence[int]) -> str:
        if self._skipped:
            ids = [token for token in ids if token not in self._skipped]
        fixed = None if self._held or not self._emitted or _REPLACEMENT in self._emitted else self._fixed_text(ids)
        if fixed is not None:
            return fixed
        decoded, text = self._batch_text(ids) if len(ids) > 1 else (0, "")
        for token in ids[decoded:]:
            text += self._next_text(token)
        return text

    def _fixed_text(self, ids: Sequence[int]) -> str | None:
        """Return the text of `ids` behind the context from a table, if they all have such a text; else None."""
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
        whole = self._decode([*self._context, *self._held, *ids[:end]]) if end else _REPLACEMENT
        if _REPLACEMENT in whole:
            return 0, ""
        text = whole[len(self._emitted) :]
        self._set_context([ids[end - 1]])
        return end, text

    def _is_plain(self, token: int) -> bool:
        text = self._decode([token])
        return bool(text) and _REPLACEMENT not in text

    def _next_text(self, token: int) -> str:
        self._held.append(token)
        emitted, whole = self._decode_held()
        if len(whole) <= len(emitted) or whole.endswith(_REPLACEMENT):
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
        if _REPLACEMENT in whole and not whole.startswith(self._emitted):
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
        if not (last.endswith(_REPLACEMENT) and whole.endswith(_REPLACEMENT)):
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
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _cut_at_stop(self, text: str, final: bool) -> str:
        matches = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if matches:  # the first one to be complete, so that the size of the deltas does not matter
            start, self.stopped = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[: start + len(self.stopped) * self._include_stop]
        held = 0 if final else max(_overlap(text, stop) for stop in self._stop)
        self._possible_stop = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
