"""A checkpoint's tokenizer: texts to ids with their places, and ids to texts. No torch, no network."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, ParamSpec, TypeVar

import tokenizers

from triptych.model.errors import ConfigError, TokenizerError, TooManyTokensError
from triptych.model.gguf.container import read_gguf
from triptych.model.gguf.paths import gguf_path
from triptych.model.text.decoders import clean_up, has_fixed_texts
from triptych.model.text.fill_marks import find_marks, find_sentinels
from triptych.model.text.gguf_tokenizer import GGUFFiles, build_gguf_tokenizer
from triptych.model.text.infilling import Infilling
from triptych.model.text.piece_tokenizers import PieceTokenizer
from triptych.model.text.sentencepiece_model import SPACE
from triptych.model.text.source_languages import SourceLanguages, source_languages
from triptych.model.text.spelled_marks import SpelledMarks
from triptych.model.text.tokenizer_builder import build_tokenizer, cleans_up
from triptych.model.text.tokenizer_class import class_over_json, put_end_after_texts
from triptych.model.text.tokenizer_files import Files, is_panic, library_errors
from triptych.model.text.word_cache import WordCache

P = ParamSpec("P")
T = TypeVar("T")
_LARGE_VOCABULARY = 50_000  # tokens; the library frees fewer within some 10 ms
_MAX_LOCKED = 256  # tokens that are decoded under the interpreter's lock, which takes about 0.1 ms
_LONG_TEXT = 65_536  # characters; the places of more are found only if they are wanted
REPLACEMENT = "\ufffd"  # a byte-level decoder's output for an incomplete character
_ANCHOR = "\n"  # what a part is put after, where the tokenizer puts a space in front of every text
_PARTS = 1024  # parts that are encoded before their tokens are counted
_MASKS = ("[MASK]", "<mask>")  # where no file other than tokenizer.json names the mask token
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
    """The text of a token that does not depend on its neighbours: as the first of a text, and after others."""

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

    Encoding, and decoding of many ids, use the library's batch calls: only those release the interpreter's lock. The
    fast call leaves the texts of tokens out, which take long to free under that lock.
    """

    def __init__(
        self,
        built: tokenizers.Tokenizer | PieceTokenizer,
        languages: SourceLanguages | None = None,
        names: Mapping[str, str] | None = None,
        *,
        cleans_up: bool = False,
        pair_of_languages: tuple[str, str] | None = None,
        padding: tuple[str, bool] = ("", False),
    ) -> None:
        """`names` are special tokens by what they are for: "mask_token"; `cleans_up`: texts are shown cleaned up.

        `pair_of_languages`: those of a translator that knows one source and one target. `padding`: the token that
        fills texts up, and whether it stands before them.
        """
        self.cleans_up = cleans_up
        self.pair_of_languages = pair_of_languages
        self.source_languages = languages
        self._pieces = built if isinstance(built, PieceTokenizer) else None
        tokenizer = built.tokenizer if isinstance(built, PieceTokenizer) else built
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        if tokenizer.get_vocab_size() > _LARGE_VOCABULARY:
            weakref.finalize(self, _free_elsewhere, tokenizer).atexit = False
        self._words = None if self._pieces is not None else WordCache.of(tokenizer)
        self._types_pairs = tokenizer.post_processor is not None  # without one the fast call types them all as 0
        added = tokenizer.get_added_tokens_decoder()  # of Gemma's 6,400 tokens the call takes 10 ms
        self._added = {known.content: token for token, known in added.items()}
        self.special_ids = frozenset(token for token, known in added.items() if known.special)
        self._built, self._names = built, names or {}
        names = self._names
        self._infilling: dict[bool, Infilling | None] = {}
        self.mask_token = self._first("mask_token", names, _MASKS)
        self.unknown_id = self._id_of(self._first("unk_token", names, _UNKNOWNS))
        self.pad_id, self.pads_left = self._id_of(padding[0] or None), padding[1]
        self._token_texts: dict[tuple[int, bool], str] = {}  # cached, since streams decode single tokens constantly
        self._has_fixed_texts = has_fixed_texts(tokenizer.decoder)
        self._fixed_texts = {skip: FixedTexts(self, skip_special_tokens=skip) for skip in (False, True)}

    @classmethod
    def from_folder(cls, folder: Path, *, special_tokens: bool = True) -> Tokenizer | None:
        """Read tokenizer.json, else the files that were published before it; None if the folder has no tokenizer.

        Such a model takes token ids only. A GGUF file, or a folder that holds one and no tokenizer.json, has it in its
        metadata. Without `special_tokens` none are put around texts. Raises `ConfigError` for invalid files.
        """
        files = Files(folder)
        if not files.has_json and (file := gguf_path(folder)) is not None:
            metadata = GGUFFiles(file, read_gguf(file))
            found = build_gguf_tokenizer(metadata)
            return None if found is None else cls(found, None, _special_names(metadata) | metadata.fill_names)
        built = build_tokenizer(files)
        if built is None:
            return None
        if not special_tokens and isinstance(built, tokenizers.Tokenizer):
            built.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B")
        ends = files.has_json and files.has("modules.json") and files.flag("add_eos_token", False)
        with library_errors(f"{folder.name}: its tokenizer cannot be used"):
            if ends and isinstance(built, tokenizers.Tokenizer):
                put_end_after_texts(built, files.special("eos_token", "</s>"))
            languages = source_languages(built, files)
            pair = _pair_of_languages(files)
            names = _special_names(files)
            return cls(
                *(built, languages, names),
                cleans_up=cleans_up(built, files),
                pair_of_languages=pair,
                padding=_padding(files),
            )

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

    def locate(self, text: str, pair: str | None = None, *, most: int | None = None) -> Located:
        """Encode with special tokens and with the place of each token; needs `has_offsets`.

        Raises `TooManyTokensError` for more than `most` tokens.
        """
        if most is not None and len(text) + len(pair or "") > _LONG_TEXT:
            self.count(text, pair, most=most)  # places take long to free
        [found] = _asked(self._tokenizer.encode_batch, [_item(text, pair)])
        _check_number(len(found), most)
        offsets, texts, words = found.offsets, found.sequence_ids, found.word_ids
        return Located(tuple(found.ids), tuple(found.type_ids), tuple(offsets), tuple(texts), tuple(words))

    def first_tokens(self, text: str, count: int) -> str:
        """Return the text up to the end of its first `count` tokens, special ones not counted; needs `has_offsets`."""
        [found] = _asked(self._tokenizer.encode_batch, [text])
        first = next((at for at in range(len(found)) if found.token_to_sequence(at) is not None), 0)
        last = first + count - 1
        if last >= len(found) or found.token_to_sequence(last) is None:
            return text
        place = found.token_to_chars(last)
        return text if place is None else text[: place[1]]

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def special_token_id(self, text: str) -> int | None:
        """Return the id of an added token, such as a language code; None if there is none of this text."""
        return self._added.get(text)

    def language_token(self, code: str) -> int | None:
        """Return the token of a language, whose text is its code, in M2M-100 between underscores; None without one."""
        found = (self.special_token_id(text) for text in (code, f"__{code}__"))
        return next((token for token in found if token is not None), None)

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, most: int | None = None
    ) -> Encoded:
        """Return the tokens of a text or a pair; raises `TooManyTokensError` for more than `most`."""
        if add_special_tokens and self._words is not None:
            found = _asked(self._words.encode, text, pair)
            if found is not None:
                _check_number(len(found[0]), most)
                return Encoded(*found)
        if self._pieces is not None:
            pieced = self._pieced(_item(text, pair), add_special_tokens)
            _check_number(len(pieced.ids), most)
            return pieced
        [encoding] = self._encodings([_item(text, pair)], add_special_tokens)
        _check_number(len(encoding), most)
        return Encoded(tuple(encoding.ids), tuple(encoding.type_ids))

    def encode_parts(self, parts: Sequence[str], *, most: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a text that is cut: no token spans two parts, and none are put around the text.

        Raises `TooManyTokensError` for more than `most` tokens.
        """
        ids = self.encode(parts[0], add_special_tokens=False, most=most).ids
        if len(parts) == 1:
            return ids
        anchor = self.encode(_ANCHOR, add_special_tokens=False).ids
        if not (anchor and self.token_name(anchor[0]).startswith(SPACE)):
            anchor = ()
        found = list(ids)
        for at in range(1, len(parts), _PARTS):
            texts = [f"{_ANCHOR}{part}" if anchor else part for part in parts[at : at + _PARTS]]
            for one in self.encode_batch(texts, add_special_tokens=False):
                found += one.ids[len(anchor) :]
            _check_number(len(found), most)
        return tuple(found)

    @property
    def special_texts(self) -> list[str]:
        """The texts of the special tokens."""
        return [text for text, token in self._added.items() if token in self.special_ids]

    @cached_property
    def spelled_marks(self) -> SpelledMarks:
        """The special tokens, as what is searched for in texts."""
        return SpelledMarks(self.special_texts)

    def infilling(self, *, sentinels: bool) -> Infilling | None:
        """Return what makes prompts for the middle of a text; None without marks or, for `sentinels`, without those."""
        if sentinels not in self._infilling:
            find = find_sentinels(self.token_id) if sentinels else find_marks(self.token_id, self._names)
            self._infilling[sentinels] = None if find is None else Infilling(self._built, find, self._ends())
        return self._infilling[sentinels]

    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that are put before and after a text."""
        whole, plain = self.encode("a").ids, self.encode("a", add_special_tokens=False).ids
        starts = range(len(whole) - len(plain) + 1)
        at = next((at for at in starts if whole[at : at + len(plain)] == plain), len(whole))
        return whole[:at], whole[at + len(plain) :]

    def count(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, most: int | None = None
    ) -> int:
        """Return the number of tokens that `encode` finds, without making them."""
        if self._pieces is not None:
            return len(self.encode(text, pair, add_special_tokens=add_special_tokens, most=most).ids)
        [encoding] = self._encodings([_item(text, pair)], add_special_tokens)
        _check_number(len(encoding), most)
        return len(encoding)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        if self._pieces is not None:
            return [self._pieced(text, add_special_tokens) for text in texts]
        return [Encoded(tuple(e.ids), tuple(e.type_ids)) for e in self._encodings(list(texts), add_special_tokens)]

    def _encodings(self, items: list[Any], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        is_fast = self._types_pairs or all(isinstance(item, str) for item in items)
        call = self._tokenizer.encode_batch_fast if is_fast else self._tokenizer.encode_batch
        return _asked(call, items, add_special_tokens=add_special_tokens)

    def _pieced(self, item: Any, add_special_tokens: bool) -> Encoded:
        assert self._pieces is not None
        if not isinstance(item, str):
            raise ConfigError("the tokenizers of Marian and M2M-100 do not encode pairs of texts")
        ids = self._pieces.encode(item, add_special_tokens=add_special_tokens)
        return Encoded(tuple(ids), (0,) * len(ids))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of an output, as it is shown."""
        text = self.decode_part(ids, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up else text

    def decode_part(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a part of an output, which is not cleaned up yet."""
        if len(ids) > _MAX_LOCKED:
            [whole] = _asked(self._tokenizer.decode_batch, [list(ids)], skip_special_tokens=skip_special_tokens)
            return whole
        if len(ids) != 1:
            return _asked(self._tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens)
        key = (ids[0], skip_special_tokens)
        text = self._token_texts.get(key)
        if text is None:
            text = _asked(self._tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens)
            self._token_texts[key] = text
        return text

    def fixed_texts(self, *, skip_special_tokens: bool) -> Mapping[int, FixedText | None]:
        """Return the text of each token, None if it depends on the token's neighbours."""
        return self._fixed_texts[skip_special_tokens]

    def find_fixed_text(self, token_id: int, *, skip_special_tokens: bool) -> FixedText | None:
        """Find an entry of `fixed_texts`."""
        if not self._has_fixed_texts:
            return None
        alone = self.decode_part([token_id], skip_special_tokens=skip_special_tokens)
        if not alone or REPLACEMENT in alone:
            return None  # no text, only a space that is stripped at the beginning, or a part of a character
        twice = self.decode_part([token_id, token_id], skip_special_tokens=skip_special_tokens)
        return FixedText(alone, twice[len(alone) :]) if twice.startswith(alone) else None

    def decode_batch(self, outputs: Sequence[Sequence[int]]) -> list[str]:
        """Decode each output without its special tokens; nothing is cleaned up."""
        return _asked(self._tokenizer.decode_batch, [list(ids) for ids in outputs])

    @property
    def decoder(self) -> Any:
        """The decoder section of tokenizer.json; None if tokens are joined by spaces."""
        decoder = self._tokenizer.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def token_names(self, count: int) -> list[str | None]:
        """Return the vocabulary entries of tokens 0 to `count - 1`; None for special and unknown tokens."""
        return [None if token in self.special_ids else self._tokenizer.id_to_token(token) for token in range(count)]

    def token_text(self, token_id: int) -> str:
        """Decode one token alone; bytes of a split character become replacement characters."""
        return self.decode_part([token_id], skip_special_tokens=False)


def _item(text: str, pair: str | None) -> Any:
    return text if pair is None else (text, pair)


def _check_number(count: int, most: int | None) -> None:
    if most is not None and count > most:
        raise TooManyTokensError(count)


def _free_elsewhere(tokenizer: tokenizers.Tokenizer) -> None:
    """Free a vocabulary in a thread of its own, unless the process ends, where it could no longer run."""
    if main_thread().is_alive():
        Thread(target=free_vocabulary, args=(tokenizer,)).start()


def free_vocabulary(tokenizer: tokenizers.Tokenizer) -> None:
    """Free the vocabulary of a BPE model that is no longer needed, which leaves it empty.

    The library frees a model under the interpreter's lock, 0.1 s for 128,000 tokens. It trains without the lock, and
    training on no texts replaces the vocabulary.
    """
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=0, show_progress=False)
        tokenizer.train_from_iterator([], trainer=trainer)


def _asked(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call the tokenizers' library; where it gives up, raise a `TokenizerError`. Its panics are no `Exception`."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):  # it raises nothing narrower
            raise
        raise TokenizerError(f"the model's tokenizer gave up: {error!s:.300}") from None


def _pair_of_languages(files: Files) -> tuple[str, str] | None:
    """Return what Marian's settings of the tokenizer say of its languages."""
    pair = files.text("source_lang", ""), files.text("target_lang", "")
    return pair if all(pair) else None


def _padding(files: Files) -> tuple[str, bool]:
    """Return the token that fills texts up, and whether it stands before them."""
    side = files.text("padding_side", "left" if class_over_json(files) in ("Gemma", "Siglip2") else "right")
    return files.special("pad_token", ""), side == "left"


def _special_names(files: Files) -> dict[str, str]:
    """Return the special tokens that the folder's other files name, by their purpose."""
    found = {name: files.special(name, "") for name in ("mask_token", "unk_token")}
    return {name: text for name, text in found.items() if text}
