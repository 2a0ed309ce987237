"""Builds the tokenizer that a GGUF file has in its metadata.

There are four kinds (`tokenizer.ggml.model`): gpt2, byte-level BPE whose texts are first cut by the rule that
`tokenizer.ggml.pre` names; llama, SentencePiece's BPE; t5, SentencePiece's unigram model; bert, WordPiece. Which
special tokens stand around a text the metadata says, else llama.cpp's defaults hold (`llama-vocab.cpp`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel, read_gguf, shown
from triptych.model.text.fill_marks import GGUF_KEYS
from triptych.model.text.gguf_pretokenizers import PRE_TOKENIZERS
from triptych.model.text.sentencepiece_bpe import sentencepiece_bpe, set_llama_steps
from triptych.model.text.sentencepiece_classes import scored
from triptych.model.text.sentencepiece_model import SPACE, Algorithm, Piece, PieceKind, SentencePieceModel
from triptych.model.text.sentencepiece_steps import precompiled, set_normalizers, set_words
from triptych.model.text.tokenizer_class import put_cls_and_sep, set_template
from triptych.model.text.tokenizer_files import Files, library_errors
from triptych.model.text.tokenizer_limits import check_cost

_log = logging.getLogger(__name__)
_PREFIX = "tokenizer.ggml"
_SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as GGUF spells it
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "cls_token": "cls_token_id",
}
_WITHOUT = ("none", "no_vocab")
# Tokens that take the spaces next to them. No metadata says so: published tokenizers do, and llama.cpp goes by names.
_TAKING_SPACES_BEFORE = {
    **dict.fromkeys(("jina-v2-de", "jina-v2-es", "jina-v2-code"), "<mask>"),
    "modern-bert": "[MASK]",
}
_PHI3 = ("phi3", "phi-3")
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # all others of Phi-3 take those after them
_USUAL = {  # what a kind has where the metadata names none, as in llama.cpp
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
    "bert": {"bos_token": 101, "sep_token": 102, "unk_token": 100, "pad_token": 0, "mask_token": 103},
    "gpt2": {},
    "gemma4": {},
}


@dataclass(frozen=True)
class GGUFFiles(Files):
    """What a folder's tokenizer files would say, from metadata. `folder` is the file, for messages."""

    model: GGUFModel

    @cached_property
    def kind(self) -> str:
        return self.model.text(f"{_PREFIX}.model", "none")

    @cached_property
    def tokens(self) -> list[str]:
        found = self.model.array(f"{_PREFIX}.tokens")
        if not found or not all(isinstance(text, str) for text in found):
            raise ConfigError(f"{self.model.name}: {_PREFIX}.tokens must be a list of texts")
        found = [text or f"[EMPTY_{token}]" for token, text in enumerate(found)]  # as in llama.cpp
        if len(set(found)) < len(found):
            twice = next(text for text, count in Counter(found).items() if count > 1)
            raise ConfigError(f"{self.model.name}: {_PREFIX}.tokens has the same text twice: {shown(twice)}")
        return found

    @cached_property
    def kinds(self) -> list[PieceKind]:
        """What each token is; without a list of it all are normal."""
        found = self.model.array(f"{_PREFIX}.token_type") or [int(PieceKind.NORMAL)] * len(self.tokens)
        if len(found) != len(self.tokens):
            raise ConfigError(f"{self.model.name}: {_PREFIX}.token_type has {len(found)} of {len(self.tokens)} entries")
        known = {int(kind) for kind in PieceKind}
        return [PieceKind(kind) if kind in known else PieceKind.UNUSED for kind in found]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of a tokenizer_config.json."""
        found: dict[str, Any] = {}
        for name, key in _SPECIALS.items():
            token = self.model.integer(f"{_PREFIX}.{key}", _USUAL.get(self.kind, {}).get(name))
            if token is not None and 0 <= token < len(self.tokens):
                found[name] = self.tokens[token]
        if templates := self._chat_templates():
            found["chat_template"] = templates
        return found

    @property
    def fill_names(self) -> dict[str, str]:
        """The marks of a text whose middle is missing, by the keys of `GGUF_KEYS`."""
        found = {}
        for name, keys in GGUF_KEYS.items():
            tokens = (self.model.integer(f"{_PREFIX}.{key}", None) for key in keys)
            token = next((token for token in tokens if token is not None and 0 <= token < len(self.tokens)), None)
            if token is not None:
                found[name] = self.tokens[token]
        return found

    @property
    def loaded(self) -> None:
        return None

    def _chat_templates(self) -> str | dict[str, str]:
        """Return the chat template, or all templates by name where there are others; "" where there is none."""
        key = "tokenizer.chat_template"
        default = self.model.text(key, "")
        named = [name for name in self.model if name.startswith(f"{key}.")]
        others = {name.removeprefix(f"{key}."): self.model.text(name) for name in named}
        if not others:
            return default
        return {**others, "default": default} if default else others

    def added(self, text: str, *, special: bool) -> AddedToken:
        """Return a token that is found in a text before it is split, with the spaces that it takes."""
        before = _TAKING_SPACES_BEFORE.get(self.model.text(f"{_PREFIX}.pre", ""))
        return AddedToken(
            text,
            special=special,
            normalized=False,
            lstrip=text == before,
            rstrip=self._is_phi3 and text not in _PHI3_PLAIN,
        )

    @cached_property
    def _is_phi3(self) -> bool:
        """Whether it has Phi-3's vocabulary, which is Llama's with more tokens."""
        names = (self.model.architecture, str(self.model.get("general.name")).lower())
        return self.kind == "llama" and any(name in one for one in names for name in _PHI3)

    def flag(self, name: str, default: bool) -> bool:
        return self.model.flag(f"{_PREFIX}.{name}", default)

    def has(self, *names: str) -> bool:
        return False

    def object(self, name: str, *, required: bool = False) -> dict[str, Any]:
        return {}

    @cached_property
    def sentencepiece(self) -> SentencePieceModel:
        """The pieces as a model file of SentencePiece has them."""
        scores = self.model.array(f"{_PREFIX}.scores")
        if len(scores) != len(self.tokens):
            raise ConfigError(f"{self.model.name}: {_PREFIX}.scores has {len(scores)} of {len(self.tokens)} entries")
        pieces = [Piece(*piece) for piece in zip(self.tokens, map(float, scores), self.kinds, strict=True)]
        unknown = [token for token, kind in enumerate(self.kinds) if kind is PieceKind.UNKNOWN]
        charsmap = self.model.array(f"{_PREFIX}.precompiled_charsmap")
        return SentencePieceModel(
            pieces,
            Algorithm.BPE if self.kind == "llama" else Algorithm.UNIGRAM,
            self.tokens.index(self.config["unk_token"]) if "unk_token" in self.config else (unknown or [0])[0],
            byte_fallback=PieceKind.BYTE in self.kinds,
            charsmap=bytes(byte & 255 for byte in charsmap),
        )


def gguf_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return the special tokens' texts and the chat template of a GGUF file, as a tokenizer_config.json has them."""
    files = GGUFFiles(path, read_gguf(path))
    return {} if files.kind in _WITHOUT else files.config


def build_gguf_tokenizer(files: GGUFFiles) -> Tokenizer | None:
    """Build the tokenizer; None if the file has none. Raises `ConfigError`."""
    whole = files.model.get("tokenizer.huggingface.json")
    with library_errors(f"{files.model.name}: its tokenizer cannot be built"):
        if isinstance(whole, str):
            found = Tokenizer.from_str(whole)
            check_cost(found, f"{files.model.name}: tokenizer.huggingface.json")
            return found
        if files.kind in _WITHOUT:
            return None
        if files.kind not in _KINDS:
            kinds = ", ".join(_KINDS)
            raise ConfigError(f"{files.model.name}: {_PREFIX}.model {files.kind!r} is not served; served are {kinds}")
        return _KINDS[files.kind](files)


def _add_tokens(tokenizer: Tokenizer, files: GGUFFiles, *names: str) -> None:
    """Let control tokens, those that the user defined, and those of these names be found before a text is split."""
    control, user = PieceKind.CONTROL, PieceKind.USER_DEFINED
    kinds = dict.fromkeys((files.config[name] for name in names if name in files.config), control)
    kinds |= {text: kind for text, kind in zip(files.tokens, files.kinds, strict=True) if kind in (control, user)}
    tokenizer.add_tokens([files.added(text, special=kind is control) for text, kind in kinds.items()])


def _put_around(tokenizer: Tokenizer, files: GGUFFiles, *, begin: bool, end: bool, always: bool = False) -> Tokenizer:
    """Put the begin and end tokens around texts, as the metadata says or else by the kind's defaults.

    `always`: texts begin with the token whatever the metadata says.
    """
    begins = always or files.flag("add_bos_token", begin)
    around = [(begins, "bos_token"), (files.flag("add_eos_token", end), "eos_token")]
    names = [files.config[name] if wanted and name in files.config else "" for wanted, name in around]
    if not any(names):
        return tokenizer
    before, after = (f"{names[0]}:0 " if names[0] else ""), (f" {names[1]}:0" if names[1] else "")
    single = f"{before}$A:0{after}"
    pair = f"{single} {single.replace('$A', '$B').replace(':0', ':1')}"
    set_template(tokenizer, single, pair, [text for text in names if text])
    return tokenizer


def _gpt2(files: GGUFFiles) -> Tokenizer:
    """Byte-level BPE."""
    name = files.model.text(f"{_PREFIX}.pre", "")
    if not name:
        _log.warning(
            "%s: %s.pre, how texts are cut, is missing; llama.cpp's default is taken, perhaps not what it needs",
            *(files.model.name, _PREFIX),
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{files.model.name}: {_PREFIX}.pre {name!r} is not served; put the model's tokenizer.json in its folder; "
            f"served are {', '.join(PRE_TOKENIZERS)}"[:600]
        )
    rule = PRE_TOKENIZERS[name]
    ids = {text: token for token, text in enumerate(files.tokens)}
    tokenizer = Tokenizer(models.BPE(ids, _merges(files, ids), ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, files)
    return _put_around(tokenizer, files, begin=rule.begins, end=False)


def _gemma4(files: GGUFFiles) -> Tokenizer:
    """BPE of characters, with byte fallback, over whole lines; spaces are marks of pieces."""
    ids = {text: token for token, text in enumerate(files.tokens)}
    tokenizer = Tokenizer(models.BPE(ids, _merges(files, ids), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    _add_tokens(tokenizer, files)
    return _put_around(tokenizer, files, begin=True, end=False, always=True)


def _merges(files: GGUFFiles, ids: dict[str, int]) -> list[tuple[str, str]]:
    if f"{_PREFIX}.merges" not in files.model:
        raise ConfigError(f"{files.model.name}: {_PREFIX}.merges is missing")
    merges = []
    for line in files.model.array(f"{_PREFIX}.merges"):
        cut = str(line).find(" ", 1)  # the first may be a space itself
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not (left in ids and right in ids and left + right in ids):
            raise ConfigError(f"{files.model.name}: {_PREFIX}.merges must join two tokens to another, found {line!r}")
        merges.append((left, right))
    return merges


def _llama(files: GGUFFiles) -> Tokenizer:
    """SentencePiece's BPE, with a space in front of every text between special tokens."""
    for name in ("bos_token", "eos_token", "unk_token"):
        if name not in files.config:
            raise ConfigError(f"{files.model.name}: {_PREFIX}.{_SPECIALS[name]} is missing")
    ids = {text: token for token, text in enumerate(files.tokens)}
    tokenizer = Tokenizer(sentencepiece_bpe(files.sentencepiece, ids, files.config["unk_token"]))
    prefix = files.flag("add_space_prefix", True)
    set_llama_steps(tokenizer, scheme="always" if prefix else "never", strip=prefix)
    _add_tokens(tokenizer, files, "bos_token", "eos_token", "unk_token")
    return _put_around(tokenizer, files, begin=True, end=False)


def _t5(files: GGUFFiles) -> Tokenizer:
    """SentencePiece's unigram model."""
    for name in ("add_space_prefix", "remove_extra_whitespaces"):
        if not files.flag(name, True):
            raise ConfigError(f"{files.model.name}: {_PREFIX}.{name} false is not served")
    model = files.sentencepiece
    tokenizer = Tokenizer(models.Unigram(scored(model.pieces), unk_id=model.unknown_id, byte_fallback=False))
    set_normalizers(tokenizer, *precompiled(model.charsmap))
    set_words(tokenizer)
    _add_tokens(tokenizer, files, "bos_token", "eos_token", "unk_token")
    return _put_around(tokenizer, files, begin=False, end=True)


def _bert(files: GGUFFiles) -> Tokenizer:
    """WordPiece: GGUF marks the beginnings of words instead of what follows them."""
    ids = {}
    for token, (text, kind) in enumerate(zip(files.tokens, files.kinds, strict=True)):
        plain = kind is PieceKind.CONTROL or (text.startswith("[") and text.endswith("]"))
        ids[text if plain else text[1:] if text.startswith(SPACE) else f"##{text}"] = token
    for name in ("unk_token", "sep_token"):
        if name not in files.config:
            raise ConfigError(f"{files.model.name}: {_PREFIX}.{_SPECIALS[name]} is missing")
    lower = files.flag("normalizer.lowercase", True)
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=files.config["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=files.flag("normalizer.strip_accents", lower),
        lowercase=lower,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    named = {
        files.config[name] for name in ("sep_token", "unk_token", "pad_token", "mask_token") if name in files.config
    }
    begin = files.config.get("cls_token") or files.config.get("bos_token")
    if begin is None:
        raise ConfigError(f"{files.model.name}: {_PREFIX}.bos_token_id is missing")
    for text in sorted({*named, begin}, key=files.tokens.index):
        tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False, lstrip=text == files.config.get("mask_token"))]
        )
    put_cls_and_sep(tokenizer, begin, files.config["sep_token"])
    return tokenizer


_KINDS: dict[str, Callable[[GGUFFiles], Tokenizer]] = {
    "gpt2": _gpt2,
    "gemma4": _gemma4,
    "llama": _llama,
    "t5": _t5,
    "bert": _bert,
}
