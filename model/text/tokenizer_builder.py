"""Builds tokenizers from the files that were published before tokenizer.json.

Which files a folder has, and what they mean, depends on its tokenizer class; `_KINDS` has a function for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model.errors import ConfigError
from model.text.byte_alphabet import byte_alphabet
from model.text.languages import M2M100_LANGUAGES
from model.text.sentencepiece_model import read_sentencepiece
from model.text.sentencepiece_tokenizers import (
    SPACE,
    albert,
    camembert,
    deberta_v2,
    gemma,
    llama,
    mbart,
    mbart50,
    nllb,
    pegasus,
    put_cls_and_sep,
    set_template,
    t5,
    with_specials,
    xlm_roberta,
    xlnet,
)
from model.text.tokenizer_files import SENTENCEPIECE_NAMES, Files


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
                names = self.pieces(part)
            else:
                names = [code[0], *self.pieces(part[code.end() :])]
            found += [self.ids.get(name, self.unknown) for name in names]
        return [*self.before, *found, *self.after] if add_special_tokens else found


def build_tokenizer(files: Files) -> Tokenizer | PieceTokenizer | None:
    """Build the tokenizer of a folder without tokenizer.json; return None if it has none of the files of one.

    Raises `ConfigError` for files that are damaged or of a class that is not known.
    """
    folder = files.folder
    marks = ("vocab.txt", "vocab.json", "source.spm", *SENTENCEPIECE_NAMES)
    name = files.tokenizer_class
    if name != "ByT5" and not any(files.has(mark) for mark in marks):
        return None
    build = _KINDS.get(name) or _KINDS.get(_BY_MODEL_TYPE.get(files.model_type, ""))
    if build is None:
        raise ConfigError(
            f"{folder.name}: a tokenizer of class {name or files.model_type!r} needs tokenizer.json; "
            f"built from other files are {', '.join(sorted(_KINDS))}"
        )
    built = build(files)
    tokenizer = built.tokenizer if isinstance(built, PieceTokenizer) else built
    for token, added in files.added():
        if tokenizer.token_to_id(added.content) is None and token != tokenizer.get_vocab_size():
            raise ConfigError(f"{folder.name}: the added token {added.content!r} should have the id {token}")
        tokenizer.add_tokens([added])
    return built


def _words(files: Files, unknown: str) -> Tokenizer:
    """Words of vocab.txt split into the longest pieces from the left (Schuster and Nakajima 2012)."""
    lines = files.lines("vocab.txt")
    vocabulary = {line.rstrip("\r"): token for token, line in enumerate(lines if lines[-1] else lines[:-1])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=files.setting("tokenize_chinese_chars", True),
        strip_accents=files.setting("strip_accents", None),
        lowercase=files.setting("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _bert(files: Files) -> Tokenizer:
    names = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    unk, sep, pad, cls, mask = (files.special(name, f"[{name[:-6].upper()}]") for name in names)
    tokenizer = with_specials(_words(files, unk.content), files, (unk, sep, pad, cls, mask))
    put_cls_and_sep(tokenizer, cls, sep)
    return tokenizer


def _esm(files: Files) -> Tokenizer:
    """ESM: amino acids of vocab.txt, found wherever they are in a text; what is between them is unknown."""
    names = [line.strip() for line in files.lines("vocab.txt") if line.strip()]
    vocabulary = {name: token for token, name in enumerate(names)}
    texts = {"unk": "<unk>", "cls": "<cls>", "pad": "<pad>", "mask": "<mask>", "eos": "<eos>"}
    tokens = {name: files.special(f"{name}_token", text) for name, text in texts.items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens["unk"].content))
    longest = sorted(vocabulary, key=len, reverse=True)
    each = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest))), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])
    with_specials(tokenizer, files, tokens.values())
    put_cls_and_sep(tokenizer, tokens["cls"], tokens["eos"])
    return tokenizer


def _funnel(files: Files) -> Tokenizer:
    """Funnel: as BERT, with a segment of its own for the class token."""
    names = {
        "unk": "<unk>",
        "sep": "<sep>",
        "pad": "<pad>",
        "cls": "<cls>",
        "mask": "<mask>",
        "bos": "<s>",
        "eos": "</s>",
    }
    tokens = {name: files.special(f"{name}_token", text) for name, text in names.items()}
    tokenizer = with_specials(_words(files, tokens["unk"].content), files, tokens.values())
    put_cls_and_sep(tokenizer, tokens["cls"], tokens["sep"], cls_type=2)
    return tokenizer


def _mpnet(files: Files) -> Tokenizer:
    """MPNet: BERT's words between RoBERTa's special tokens."""
    tokens = _roberta_tokens(files, unknown="[UNK]")
    tokenizer = _words(files, tokens["unk"].content)
    with_specials(tokenizer, files, {token.content: token for token in tokens.values()}.values())
    c, s = tokens["cls"].content, tokens["sep"].content
    set_template(tokenizer, f"{c} $A {s}", f"{c} $A {s} {s} $B {s}", (tokens["cls"], tokens["sep"]))
    return tokenizer


def _byt5(files: Files) -> Tokenizer:
    """ByT5: the bytes of UTF-8 behind three special tokens, and sentinels; bytes that are no character are left out."""
    flags = {"special": True, "normalized": False}
    names = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    specials = [files.special(f"{name}_token", text).content for name, text in names.items()]
    alphabet = sorted(byte_alphabet().items(), key=lambda entry: entry[1])
    vocabulary = {text: token for token, text in enumerate((*specials, *(text for text, _ in alphabet)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True, **flags) for text in specials])
    sentinels = [f"<extra_id_{number}>" for number in range(files.setting("extra_ids", 125))]
    with_specials(tokenizer, files, [AddedToken(text, **flags) for text in sentinels])
    e = specials[1]
    set_template(tokenizer, f"$A {e}", f"$A {e} $B {e}", [AddedToken(e)])
    return tokenizer


def _byte_level(files: Files) -> Tokenizer:
    """Byte-level BPE of vocab.json and merges.txt (Radford et al. 2019), without special tokens around a text."""
    lines = [line for line in files.lines("merges.txt") if line and not line.startswith("#version")]
    if not all(line.count(" ") == 1 for line in lines):
        raise ConfigError(f"{files.folder.name}: merges.txt must have two tokens in a line")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    try:
        bpe = models.BPE(files.json_vocabulary(), merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{files.folder.name}: vocab.json and merges.txt do not fit: {error}") from None
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=files.setting("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(files: Files) -> Tokenizer:
    names = ["bos_token", "eos_token", "unk_token"]
    if files.config.get("pad_token") or files.object("special_tokens_map.json").get("pad_token"):
        names.append("pad_token")
    tokenizer = _byte_level(files)
    specials = {token.content: token for name in names if (token := files.special(name, "<|endoftext|>"))}
    tokenizer = with_specials(tokenizer, files, specials.values())
    if files.setting("add_bos_token", False):  # OPT
        begin = files.special("bos_token", "<|endoftext|>")
        b = begin.content
        set_template(tokenizer, f"{b}:0 $A:0", f"{b}:0 $A:0 {b}:1 $B:1", [begin])
    return tokenizer


def _deberta(files: Files) -> Tokenizer:
    """DeBERTa, the first: GPT-2's pieces between BERT's special tokens."""
    names = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    unk, sep, pad, cls, mask = (files.special(name, f"[{name[:-6].upper()}]") for name in names)
    tokenizer = with_specials(_byte_level(files), files, (unk, sep, pad, cls, mask))
    put_cls_and_sep(tokenizer, cls, sep)
    return tokenizer


def _roberta_tokens(files: Files, unknown: str = "<unk>") -> dict[str, AddedToken]:
    names = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": unknown, "pad": "<pad>", "mask": "<mask>"}
    return {name: files.special(f"{name}_token", text) for name, text in names.items()}


def _roberta(files: Files) -> Tokenizer:
    """RoBERTa and BART: `<s> A </s></s> B </s>`."""
    tokenizer, tokens = _byte_level(files), _roberta_tokens(files)
    with_specials(tokenizer, files, {token.content: token for token in tokens.values()}.values())
    sep, cls = tokens["sep"].content, tokens["cls"].content
    tokenizer.post_processor = processors.RobertaProcessing(
        (sep, tokenizer.token_to_id(sep) or 0),
        (cls, tokenizer.token_to_id(cls) or 0),
        True,
        files.setting("add_prefix_space", False),
    )
    return tokenizer


def _piece_tokenizer(
    files: Files, model: str, ids: dict[str, int], specials: Sequence[AddedToken], before: str, after: str
) -> PieceTokenizer:
    """Pieces of the file `model` with their ids in vocab.json; those that it lacks are unknown."""
    import sentencepiece  # few folders need it

    if "<unk>" not in ids:
        raise ConfigError(f"{files.folder.name}: vocab.json has no <unk>")
    if not files.has(model):
        raise ConfigError(f"{files.folder.name}: its tokenizer needs {model}")
    read_sentencepiece(files.folder / model)  # raises what the library would say less clearly
    processor = sentencepiece.SentencePieceProcessor(model_file=str(files.folder / model))
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.add_special_tokens(list(specials))
    names = sorted((token.content for token in specials), key=len, reverse=True)
    return PieceTokenizer(
        tokenizer=tokenizer,
        pieces=lambda text: list(processor.encode(text, out_type=str)),
        ids=ids,
        unknown=ids["<unk>"],
        specials=re.compile(f"({'|'.join(map(re.escape, names))})"),
        before=(ids[before],) if before else (),
        after=(ids[after],),
    )


def _marian(files: Files) -> PieceTokenizer:
    """Marian: a model for each side over one vocabulary; `>>fr<<` in front of a text names the target's language."""
    if files.setting("separate_vocabs", False):
        raise ConfigError(f"{files.folder.name}: separate_vocabs is not served")
    names = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    specials = [files.special(f"{name}_token", text) for name, text in names.items()]
    found = _piece_tokenizer(files, "source.spm", files.json_vocabulary(), specials, "", specials[0].content)
    return replace(found, prefix=re.compile(r">>.*?<<", re.DOTALL))


def _m2m100(files: Files) -> PieceTokenizer:
    """M2M-100: `__LANGUAGE__ A </s>`, the languages behind vocab.json."""
    ids = files.json_vocabulary()
    languages = [f"__{code}__" for code in M2M100_LANGUAGES]
    ids |= {language: len(ids) + place for place, language in enumerate(languages)}
    names = {"eos": "</s>", "bos": "<s>", "unk": "<unk>", "pad": "<pad>"}
    specials = [files.special(f"{name}_token", text) for name, text in names.items()]
    tokens = [*specials, *(AddedToken(text, special=True, normalized=False) for text in languages)]
    source = f"__{files.setting('src_lang', 'en')}__"
    if source not in ids:
        raise ConfigError(f"{files.folder.name}: src_lang {source.strip('_')!r} is no language of its tokenizer")
    return _piece_tokenizer(files, "sentencepiece.bpe.model", ids, tokens, source, specials[0].content)


_KINDS: dict[str, Callable[[Files], Tokenizer | PieceTokenizer]] = {
    "Bert": _bert,
    "DistilBert": _bert,
    "Electra": _bert,
    "Esm": _esm,
    "Funnel": _funnel,
    "MPNet": _mpnet,
    "ByT5": _byt5,
    "GPT2": _gpt2,
    "Roberta": _roberta,
    "Bart": _roberta,
    "Deberta": _deberta,
    "DebertaV2": deberta_v2,
    "Camembert": camembert,
    "T5": t5,
    "Albert": albert,
    "XLNet": xlnet,
    "XLMRoberta": xlm_roberta,
    "MBart": mbart,
    "MBart50": mbart50,
    "Pegasus": pegasus,
    "Llama": llama,
    "Gemma": gemma,
    "Nllb": nllb,
    "Marian": _marian,
    "M2M100": _m2m100,
}


_BY_MODEL_TYPE = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "esm": "Esm",
    "funnel": "Funnel",
    "mpnet": "MPNet",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "camembert": "Camembert",
    "gpt2": "GPT2",
    "roberta": "Roberta",
    "roberta-prelayernorm": "Roberta",
    "data2vec-text": "Roberta",
    "megatron-bert": "Bert",
    "ernie": "Bert",
    "bart": "Bart",
    "t5": "T5",
    "mt5": "T5",
    "umt5": "T5",
    "albert": "Albert",
    "xlnet": "XLNet",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRoberta",
    "mbart": "MBart",
    "pegasus": "Pegasus",
    "marian": "Marian",
    "m2m_100": "M2M100",
    "llama": "Llama",
    "mistral": "Llama",
    "gemma": "Gemma",
    "gemma2": "Gemma",
    "gemma3_text": "Gemma",
}
