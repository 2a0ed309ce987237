"""Tokenizer classes of SentencePiece models, computed by the `tokenizers` library."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triptych.model.text.piece_tokenizers import MBART50_LANGUAGES, MBART_LANGUAGES
from triptych.model.text.sentencepiece_bpe import (
    around_code_llama,
    around_llama,
    dress_code_llama,
    dress_gemma,
    dress_llama,
    dress_nllb,
    dress_siglip2,
    read_bpe,
    read_nllb,
)
from triptych.model.text.sentencepiece_model import SPACE, Algorithm, Piece, PieceKind
from triptych.model.text.sentencepiece_steps import (
    SPACES,
    fairseq_first,
    precompiled,
    set_normalizers,
    set_words,
)
from triptych.model.text.special_tokens import Token
from triptych.model.text.tokenizer_class import (
    Texts,
    TokenizerClass,
    around_cls_and_sep,
    mask,
    put_begin_and_end,
    set_template,
)
from triptych.model.text.tokenizer_files import Files

Vocabulary = list[tuple[str, float]]  # pieces by id, with their scores
Dress = Callable[[Tokenizer, Files, bytes], None]


def model_tokens(files: Files) -> list[Token]:
    """Return the pieces that are found in a text before it is split: control pieces, and the user's own.

    As in `transformers`, a list of extra tokens in tokenizer_config.json replaces them; the user's own in a BPE model
    stay, as no merge makes them.
    """
    model, control = files.sentencepiece, PieceKind.CONTROL
    kinds = {control, PieceKind.USER_DEFINED}
    if files.special_tokens.listed:
        kinds = {PieceKind.USER_DEFINED} if model.algorithm is Algorithm.BPE else set()
    found = (piece for piece in model.pieces if piece.kind in kinds)
    return [AddedToken(piece.text, normalized=False, special=piece.kind is control) for piece in found]


def scored(pieces: Sequence[Piece]) -> Vocabulary:
    return [(piece.text, piece.score) for piece in pieces]


def _dress_words(*, words: bool = True, charsmap: bool = True, spaces: bool = False, prefix: bool = False) -> Dress:
    """Words of a unigram model; `spaces` joins repeated ones, `prefix` reads `add_prefix_space`."""

    def dress(tokenizer: Tokenizer, files: Files, rules: bytes) -> None:
        set_normalizers(tokenizer, *(precompiled(rules) if charsmap else ()), *([SPACES] if spaces else ()))
        set_words(tokenizer, words=words, scheme=_scheme(files) if prefix else "always")

    return dress


def _scheme(files: Files) -> str:
    return "always" if files.flag("add_prefix_space", True) else "never"


def _sentinels(files: Files) -> list[Token]:
    return [f"<extra_id_{number}>" for number in range(files.count("extra_ids", 100))]


def _read_t5(files: Files) -> models.Unigram:
    """Read T5's pieces, and the sentinels `<extra_id_99>` to `<extra_id_0>` that follow them."""
    model = files.sentencepiece
    vocabulary = scored(model.pieces)
    known = {text for text, _ in vocabulary}
    vocabulary += [(text, 0.0) for text in map(str, reversed(_sentinels(files))) if text not in known]
    return models.Unigram(vocabulary, unk_id=model.unknown_id, byte_fallback=False)


def _around_t5(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if end := texts.get("eos_token"):
        set_template(tokenizer, f"$A {end}", f"$A {end} $B {end}", [end])


def _read_unigram(files: Files) -> models.Unigram:
    model = files.sentencepiece
    return models.Unigram(scored(model.pieces), unk_id=model.unknown_id, byte_fallback=False)


def _dress_cased(name: str, *, lower: bool) -> Dress:
    """ALBERT's and XLNet's own normalisation, before the model's."""

    def dress(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
        steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if name == "XLNet" or not files.flag("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        steps += [normalizers.Lowercase()] if files.flag("do_lower_case", lower) else []
        set_normalizers(tokenizer, *steps, *precompiled(charsmap))
        set_words(tokenizer, scheme=_scheme(files) if name == "Albert" else "always")

    return dress


_PUNCTUATION = Regex(f"[{re.escape(string.punctuation)}]")


def _dress_siglip(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    """SigLIP's own normalisation, before the model's: no case, no ASCII punctuation, single spaces."""
    files.refuse_options("sp_model_kwargs")
    lower = [normalizers.Lowercase()] if files.flag("do_lower_case", True) else []
    steps = [normalizers.Replace(SPACE, " "), *lower, normalizers.Replace(_PUNCTUATION, "")]
    # The reference begins with a space, whatever follows; here also what follows a special token that a text spells.
    steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Prepend(" ")]
    set_normalizers(tokenizer, *steps, *precompiled(charsmap), SPACES, normalizers.Replace(Regex(r" +\z"), ""))
    set_words(tokenizer, words=False, scheme="never")
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")


def _around_albert(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put `[CLS] A [SEP]` around texts; without tokenizer.json one of them alone where the settings ask for one."""
    if files.loaded is None and {"add_bos_token", "add_eos_token"} & files.config.keys():
        put_begin_and_end(tokenizer, files, texts)
    else:
        around_cls_and_sep(tokenizer, files, texts)


def _around_xlnet(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put `A <sep> <cls>` around texts, the class token of a segment of its own."""
    if "cls_token" in texts and "sep_token" in texts:
        s, c = texts["sep_token"], texts["cls_token"]
        set_template(tokenizer, f"$A:0 {s}:0 {c}:2", f"$A:0 {s}:0 $B:1 {s}:1 {c}:2", (s, c))


def _read_fairseq(languages: Sequence[str]) -> Callable[[Files], models.Unigram]:
    """Pieces in fairseq's order: `<s> <pad> </s> <unk>`, the model's after its own first three, languages, mask."""

    def read(files: Files) -> models.Unigram:
        vocabulary: Vocabulary = [(text, 0.0) for text in fairseq_first(files)]
        vocabulary += scored(files.sentencepiece.pieces[3:])
        vocabulary += [(text, 0.0) for text in (*languages, files.special("mask_token", "<mask>"))]
        return models.Unigram(vocabulary, unk_id=3, byte_fallback=False)

    return read


def _around_fairseq(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if "bos_token" in texts and "eos_token" in texts:
        b, e = texts["bos_token"], texts["eos_token"]
        set_template(tokenizer, f"{b} $A {e}", f"{b} $A {e} {e} $B {e}", (b, e))


_UNUSED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")


def _read_camembert(files: Files) -> models.Unigram:
    """Read CamemBERT's pieces: five tokens, the model's without its own unknown one, the mask."""
    pad, unk = files.special("pad_token", "<pad>"), files.special("unk_token", "<unk>")
    vocabulary: Vocabulary = [(text, 0.0) for text in (_UNUSED[0], pad, _UNUSED[1], unk)]
    vocabulary += [(_UNUSED[2], -100.0), *scored(files.sentencepiece.pieces[1:])]
    vocabulary.append((files.special("mask_token", "<mask>"), 0.0))
    return models.Unigram(vocabulary, unk_id=3, byte_fallback=False)


def _dress_deberta_v2(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    """Normalise as the SentencePiece model says; without its rules as today's class does."""
    steps: list[Any] = [normalizers.Lowercase()] if files.flag("do_lower_case", False) else []
    if charsmap:
        steps += [normalizers.Strip(), *precompiled(charsmap), SPACES]
    else:
        space = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
        steps += [space, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    set_normalizers(tokenizer, *steps)
    set_words(tokenizer, words=False, scheme="always" if files.flag("add_prefix_space", True) else "first")
    if files.flag("split_by_punct", False):
        punctuation = pre_tokenizers.Punctuation(behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([punctuation, tokenizer.pre_tokenizer])


def _pegasus_unused(files: Files) -> list[str]:
    return [f"<unk_{number}>" for number in range(2, files.count("offset", 103))]


def _read_pegasus(files: Files) -> models.Unigram:
    """Read Pegasus's pieces: `offset` tokens of its training between the first two and the model's own."""
    model = files.sentencepiece
    defaults = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token_sent": "<mask_1>", "mask_token": "<mask_2>"}
    first = [*(files.special(name, text) for name, text in defaults.items()), *_pegasus_unused(files)]
    vocabulary: Vocabulary = [(text, 0.0 if place < 4 else -100.0) for place, text in enumerate(first)]
    vocabulary += scored(model.pieces[2:])
    return models.Unigram(vocabulary, unk_id=model.unknown_id + files.count("offset", 103), byte_fallback=False)


def _dress_pegasus(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    rules = precompiled(charsmap) or [normalizers.Replace(Regex(r"\n"), " ")]
    set_normalizers(tokenizer, *rules, SPACES)
    set_words(tokenizer, words=False)


def _around_pegasus(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if end := texts.get("eos_token"):
        set_template(tokenizer, f"$A {end}", f"$A $B {end}", [end])


def _around_xglm(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if end := texts.get("eos_token"):
        set_template(tokenizer, f"{end} $A", f"{end} $A {end} {end} $B", [end])


def _special(*texts: str) -> list[Token]:
    return [AddedToken(text, special=True) for text in texts]


_PREFIX = frozenset({"add_prefix_space"})
_FAIRSEQ: dict[str, Token] = {
    **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
    **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_MASKED = _FAIRSEQ | {"mask_token": mask("<mask>")}
_LLAMA = TokenizerClass(
    "BPE",
    read_bpe,
    dress_llama,
    {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    around_llama,
    settings=_PREFIX | {"legacy"},
)
_XLM_ROBERTA = TokenizerClass(
    "Unigram",
    _read_fairseq(()),
    _dress_words(prefix=True),
    _FAIRSEQ | {"mask_token": "<mask>"},
    _around_fairseq,
    settings=_PREFIX,
)
_ALBERT: dict[str, Token] = {
    **dict.fromkeys(("bos_token", "cls_token"), "[CLS]"),
    **dict.fromkeys(("eos_token", "sep_token"), "[SEP]"),
    **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"},
}

_ALL = {
    "T5": TokenizerClass(
        "Unigram",
        _read_t5,
        _dress_words(),
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        _around_t5,
        _sentinels,
        frozenset({"extra_ids"}),
    ),
    "Siglip": TokenizerClass(
        "Unigram",
        _read_unigram,
        _dress_siglip,
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
        _around_t5,
        settings=frozenset({"do_lower_case", "sp_model_kwargs"}),
    ),
    "Albert": TokenizerClass(
        "Unigram",
        _read_unigram,
        _dress_cased("Albert", lower=True),
        _ALBERT,
        _around_albert,
        settings=_PREFIX | {"do_lower_case", "keep_accents"},
    ),
    "XLNet": TokenizerClass(
        "Unigram",
        _read_unigram,
        _dress_cased("XLNet", lower=False),
        _FAIRSEQ | {"sep_token": "<sep>", "cls_token": "<cls>", "mask_token": mask("<mask>")},
        _around_xlnet,
        lambda files: _special("<eop>", "<eod>") if files.loaded is not None else [],
        frozenset({"do_lower_case"}),
    ),
    "XLMRoberta": _XLM_ROBERTA,
    "Camembert": replace(
        _XLM_ROBERTA,
        read=_read_camembert,
        specials=_FAIRSEQ | {"mask_token": mask("<mask>", special=True)},
        extra=lambda files: _special(*_UNUSED),
    ),
    "DebertaV2": TokenizerClass(
        "Unigram",
        _read_unigram,
        _dress_deberta_v2,
        {
            **dict.fromkeys(("bos_token", "cls_token"), "[CLS]"),
            **dict.fromkeys(("eos_token", "sep_token"), "[SEP]"),
            **{"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"},
        },
        around_cls_and_sep,
        settings=_PREFIX | {"do_lower_case", "split_by_punct"},
    ),
    "MBart": TokenizerClass(
        "Unigram",
        _read_fairseq(MBART_LANGUAGES),
        _dress_words(charsmap=False),
        _MASKED,
        extra=lambda files: _special(*MBART_LANGUAGES),
        settings=frozenset({"src_lang"}),
    ),
    "MBart50": TokenizerClass(
        "Unigram",
        _read_fairseq(MBART50_LANGUAGES),
        _dress_words(words=False, spaces=True),
        _MASKED,
        extra=lambda files: _special(*MBART50_LANGUAGES),
        settings=frozenset({"src_lang"}),
    ),
    "Pegasus": TokenizerClass(
        "Unigram",
        _read_pegasus,
        _dress_pegasus,
        {
            **{"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"},
            "mask_token_sent": "<mask_1>",
        },
        _around_pegasus,
        lambda files: ["<mask_1>", *_pegasus_unused(files)],
        frozenset({"offset"}),
    ),
    "XGLM": TokenizerClass(
        "Unigram",
        _read_unigram,
        _dress_words(words=False, spaces=True, prefix=True),
        _FAIRSEQ,
        _around_xglm,
        lambda files: [f"<madeupword{number}>" for number in range(7)],
        _PREFIX,
    ),
    "Llama": _LLAMA,
    "CodeLlama": replace(
        _LLAMA,
        dress=dress_code_llama,
        around=around_code_llama,
        extra=lambda files: [*map("\u2581<{}>".format, ("PRE", "MID", "SUF", "EOT")), "<FILL_ME>"],
        settings=_PREFIX,
    ),
    "Gemma": replace(
        _LLAMA,
        dress=dress_gemma,
        specials={f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
        settings=frozenset(),
    ),
    "Siglip2": replace(
        _LLAMA,
        dress=dress_siglip2,
        specials={f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
        settings=frozenset(),
    ),
    "Nllb": TokenizerClass(
        "BPE",
        read_nllb,
        dress_nllb,
        _FAIRSEQ | {"mask_token": mask("<mask>", normalized=True, special=True)},
        settings=frozenset({"src_lang", "legacy_behaviour"}),
    ),
}
CLASSES = {name: replace(kind, reads_sentencepiece=True) for name, kind in _ALL.items()}
