"""Tokenizers of classes with files of their own: ByT5, Marian and M2M-100."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triptych.model.errors import ConfigError
from triptych.model.text.sentencepiece_model import SPACE, read_sentencepiece
from triptych.model.text.tokenizer_class import set_template
from triptych.model.text.tokenizer_files import Files

# -- The characters that stand for bytes in byte-level vocabularies.


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


# -- The languages of translation models whose published files do not list them, in the order of their token ids.

# `__af__` and so on, after the entries of vocab.json (Fan et al. 2020); by `language_codes`, which of them there are.
_WMT21_LANGUAGES = "en ha is ja cs ru zh de".split()  # noqa: SIM905 (Tran et al. 2021)
M2M100_LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht
    hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps
    pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
""".split()  # noqa: SIM905
_M2M100_CODES = {"m2m100": M2M100_LANGUAGES, "wmt21": _WMT21_LANGUAGES}
# The ids that follow those of the pieces (Liu et al. 2020).
MBART_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP
    nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
""".split()  # noqa: SIM905
# Those and more (Tang et al. 2020).
MBART50_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP
    nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN
    mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
""".split()  # noqa: SIM905


_PART = 16_384  # characters that are split in one call, in about 4 ms
_AROUND = 64  # characters that are looked at on both sides of a cut


@dataclass(frozen=True, slots=True)
class PieceTokenizer:
    """A SentencePiece model whose pieces have their ids in another file.

    SentencePiece's own library splits texts: it adds scores in float32, so that where two segmentations are equally
    likely the rounding decides, and no other library decides alike.
    """

    tokenizer: Tokenizer  # has the ids, and decodes
    pieces: Callable[[str], list[str]]
    ids: dict[str, int]
    unknown: int
    specials: re.Pattern[str]  # tokens that are found in a text before it is split
    before: tuple[int, ...]  # around every text
    after: tuple[int, ...]
    prefix: re.Pattern[str] | None = None  # a token that is recognised at the beginning of a text alone

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        found: list[int] = []
        for part in filter(None, self.specials.split(text)):
            code = self.prefix.match(part) if self.prefix is not None else None
            if self.specials.fullmatch(part):
                names = [part]
            elif code is None:
                names = self._pieces(part)
            else:
                names = [code[0], *self._pieces(part[code.end() :])]
            found += [self.ids.get(name, self.unknown) for name in names]
        return [*self.before, *found, *self.after] if add_special_tokens else found

    def _pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, split in parts: the library holds the interpreter's lock for each call.

        A text is cut at a space where the pieces of what is around it are those of both sides.
        """
        found: list[str] = []
        while len(text) > _PART and (cut := text.rfind(" ", 0, _PART)) > 0:
            left, right = text[max(0, cut - _AROUND) : cut], text[cut + 1 : cut + 1 + _AROUND]
            if self.pieces(f"{left} {right}") != self.pieces(left) + self.pieces(right):
                break
            found += self.pieces(text[:cut])
            text = text[cut + 1 :]
        return found + self.pieces(text)


def _byt5(files: Files) -> Tokenizer:
    """ByT5: three special tokens, the bytes of UTF-8, and sentinels; invalid bytes are left out of texts."""
    flags = {"special": True, "normalized": False}
    names = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    specials = [files.special(f"{name}_token", text) for name, text in names.items()]
    alphabet = sorted(byte_alphabet().items(), key=lambda entry: entry[1])
    vocabulary = {text: token for token, text in enumerate((*specials, *(text for text, _ in alphabet)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True, **flags) for text in specials])
    tokenizer.encode_special_tokens = files.flag("split_special_tokens", False)
    sentinels = [f"<extra_id_{number}>" for number in range(files.count("extra_ids", 125))]
    tokenizer.add_special_tokens([AddedToken(text, **flags) for text in sentinels])
    e = specials[1]
    set_template(tokenizer, f"$A {e}", f"$A {e} $B {e}", [e])
    return tokenizer


_MARIAN = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def _named(files: Files, name: str, default: str) -> AddedToken:
    return AddedToken(files.special(name, default), special=True, normalized=False)


def _piece_tokenizer(
    files: Files,
    model: str,
    ids: dict[str, int],
    specials: Sequence[AddedToken],
    before: str,
    after: str,
    target_ids: dict[str, int] | None = None,
) -> PieceTokenizer:
    """Pieces of the file `model` with their ids, or that of the unknown one; outputs may have other ids."""
    import sentencepiece  # few folders need it

    files.refuse_options("sp_model_kwargs")
    if "<unk>" not in ids:
        raise ConfigError(f"{files.folder.name}: vocab.json has no <unk>")
    if not files.has(model):
        raise ConfigError(f"{files.folder.name}: its tokenizer needs {model}")
    read_sentencepiece(files.folder / model)  # raises what the library would say less clearly
    if after not in ids:
        raise ConfigError(f"{files.folder.name}: eos_token {after!r:.80} is not in vocab.json")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(files.folder / model))
    tokenizer = Tokenizer(models.WordLevel(target_ids or ids, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.add_special_tokens(list(specials))
    added = {token.content: place for place, token in files.special_tokens.added.items() if token.content}
    ids = added | ids
    names = sorted({token.content for token in specials} | added.keys(), key=len, reverse=True)
    splits = files.flag("split_special_tokens", False)
    return PieceTokenizer(
        tokenizer=tokenizer,
        pieces=lambda text: list(processor.encode(text, out_type=str)),
        ids=ids,
        unknown=ids["<unk>"],
        specials=re.compile("((?!))" if splits else f"({'|'.join(map(re.escape, names))})"),
        before=(ids[before],) if before else (),
        after=(ids[after],),
    )


def _marian(files: Files) -> PieceTokenizer:
    """Marian: a model for each side over one vocabulary, or with `separate_vocabs` over one each.

    `>>fr<<` in front of a text names the target's language.
    """
    specials = [_named(files, f"{name}_token", text) for name, text in _MARIAN.items()]
    target = files.json_vocabulary("target_vocab.json") if files.flag("separate_vocabs", False) else None
    if target is not None and "<unk>" not in target:
        raise ConfigError(f"{files.folder.name}: target_vocab.json has no <unk>")
    end = specials[0].content
    found = _piece_tokenizer(files, "source.spm", files.json_vocabulary(), specials, "", end, target)
    return replace(found, prefix=re.compile(r">>.*?<<", re.DOTALL))


def m2m100_languages(files: Files) -> list[str]:
    """Return the tokens of the languages, in the order of their ids. Raises `ConfigError` for an unknown list."""
    name = files.text("language_codes", "m2m100")
    if name not in _M2M100_CODES:
        served = ", ".join(_M2M100_CODES)
        raise ConfigError(f"{files.folder.name}: language_codes {name!r:.80} is not served; served are {served}")
    return [f"__{code}__" for code in _M2M100_CODES[name]]


def _m2m100(files: Files) -> PieceTokenizer:
    """M2M-100: `__LANGUAGE__ A </s>`; the ids of languages follow those of vocab.json."""
    ids = files.json_vocabulary()
    languages = m2m100_languages(files)
    ids |= {language: len(ids) + place for place, language in enumerate(languages)}
    names = {"eos": "</s>", "bos": "<s>", "unk": "<unk>", "pad": "<pad>"}
    specials = [_named(files, f"{name}_token", text) for name, text in names.items()]
    tokens = [*specials, *(AddedToken(text, special=True, normalized=False) for text in languages)]
    source = f"__{files.text('src_lang', 'en')}__"
    if source not in ids:
        raise ConfigError(f"{files.folder.name}: src_lang {source.strip('_')!r} is no language of its tokenizer")
    return _piece_tokenizer(files, "sentencepiece.bpe.model", ids, tokens, source, specials[0].content)


class PieceClass(NamedTuple):
    """A class with files of its own, and its settings in tokenizer_config.json."""

    read: Callable[[Files], Tokenizer | PieceTokenizer]
    files: tuple[str, ...]
    settings: frozenset[str]


PIECE_CLASSES = {
    "ByT5": PieceClass(_byt5, (), frozenset({"extra_ids"})),
    "Marian": PieceClass(_marian, ("source.spm", "vocab.json"), frozenset({"separate_vocabs", "sp_model_kwargs"})),
    "M2M100": PieceClass(
        _m2m100,
        ("sentencepiece.bpe.model", "vocab.json"),
        frozenset({"src_lang", "language_codes", "sp_model_kwargs"}),
    ),
}
