"""Tokenizer classes of words (WordPiece) and of byte-level BPE."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from triptych.model.api.languages import NAMES, language_code
from triptych.model.errors import ConfigError
from triptych.model.text.gguf_pretokenizers import QWEN2_PATTERN, QWEN35_PATTERN
from triptych.model.text.special_tokens import Token, token_text
from triptych.model.text.tokenizer_class import (
    Texts,
    TokenizerClass,
    around_cls_and_sep,
    bpe,
    known,
    mask,
    put_begin_and_end,
    put_cls_and_sep,
    set_bpe,
    set_template,
)
from triptych.model.text.tokenizer_files import Files

_CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
Dress = Callable[[Tokenizer, Files, bytes], None]


def _read_words(unknown: str) -> Callable[[Files], models.WordPiece]:
    """Words of vocab.txt split into the longest pieces from the left (Schuster and Nakajima 2012)."""

    def read(files: Files) -> models.WordPiece:
        lines = files.lines("vocab.txt")
        vocabulary = {line.rstrip("\r"): token for token, line in enumerate(lines if lines[-1] else lines[:-1])}
        return models.WordPiece(vocabulary, unk_token=files.special("unk_token", unknown))

    return read


def _dress_words(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=files.flag("clean_text", True) if files.tokenizer_class == "Funnel" else True,
        handle_chinese_chars=files.flag("tokenize_chinese_chars", True),
        strip_accents=files.optional_flag("strip_accents"),
        lowercase=files.flag("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")


def _read_acids(files: Files) -> models.WordLevel:
    """Amino acids of vocab.txt."""
    names = [line.strip() for line in files.lines("vocab.txt") if line.strip()]
    vocabulary = {name: token for token, name in enumerate(names)}
    return models.WordLevel(vocabulary, unk_token=files.special("unk_token", "<unk>"))


def _dress_acids(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    """Find entries wherever they are in a text; what is between them is unknown."""
    longest = sorted(tokenizer.get_vocab(), key=len, reverse=True)
    each = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest))), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])


def _around_acids(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if "cls_token" in texts and "eos_token" in texts:
        put_cls_and_sep(tokenizer, texts["cls_token"], texts["eos_token"])


def read_byte_level(files: Files) -> models.BPE:
    """Byte-level BPE of vocab.json and merges.txt (Radford et al. 2019)."""
    lines = [line for line in files.lines("merges.txt") if line and not line.startswith("#version")]
    if not all(line.count(" ") == 1 for line in lines):
        raise ConfigError(f"{files.folder.name}: merges.txt must have two tokens in a line")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    try:
        return bpe(files.json_vocabulary(), merges, continuing_subword_prefix="", end_of_word_suffix="")
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{files.folder.name}: vocab.json and merges.txt do not fit: {error}") from None


def _read_clip(files: Files) -> models.BPE:
    model = read_byte_level(files)
    model.end_of_word_suffix, model.unk_token = "</w>", files.special("unk_token", "<|endoftext|>")
    return model


def _dress_bytes(*, prefix: bool = False, nfc: bool = False, digits: bool = False, pattern: str = "") -> Dress:
    """Bytes of words, cut by GPT-2's pattern or by `pattern`; `prefix` is the default of `add_prefix_space`."""

    def dress(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
        set_bpe(tokenizer)
        space = files.flag("add_prefix_space", prefix)
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not pattern)]
        if digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        if pattern:
            steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        tokenizer.normalizer = normalizers.NFC() if nfc else None
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        tokenizer.decoder = decoders.ByteLevel()

    return dress


def _dress_clip(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    set_bpe(tokenizer, unk_token=files.special("unk_token", "<|endoftext|>"))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(_CLIP), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    around = decoders.Replace(Regex(r"^(\s|</w>)+|(\s|</w>)+$"), "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), around, decoders.Replace("</w>", " ")])


def _around_roberta(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put `<s> A </s></s> B </s>` around texts."""
    if tokens := known(tokenizer, texts, "sep_token", "cls_token"):
        sep, cls = tokens
        space = files.flag("add_prefix_space", False)
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls, files.flag("trim_offsets", True), space)


def _around_mpnet(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if "cls_token" in texts and "sep_token" in texts:
        c, s = texts["cls_token"], texts["sep_token"]
        set_template(tokenizer, f"{c} $A {s}", f"{c} $A {s} {s} $B {s}", (c, s))


def _around_funnel(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put the class token, of a segment of its own, and the separator around texts."""
    if "cls_token" in texts and "sep_token" in texts:
        put_cls_and_sep(tokenizer, texts["cls_token"], texts["sep_token"], cls_type=2)


def _around_deberta(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Leave what tokenizer.json puts around texts; published ones put one separator between a pair."""
    if files.loaded is None:
        around_cls_and_sep(tokenizer, files, texts)


def _around_clip(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    if tokens := known(tokenizer, texts, "eos_token", "bos_token"):
        end, begin = tokens
        tokenizer.post_processor = processors.RobertaProcessing(end, begin, False, False)


def _around_bytes(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put begin and end around texts if settings ask for it; what tokenizer.json puts there stays."""
    if files.loaded is None:
        put_begin_and_end(tokenizer, files, texts)


def _around_qwen2(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Take the flags of all special tokens away, as the class does: none takes a space, each is found in a word."""
    names = dict.fromkeys((*texts.values(), *map(token_text, files.special_tokens.extra or ())))
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    _around_bytes(tokenizer, files, texts)


def _around_whisper(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put the decoder's prompt in front of texts: the language and the task that the folder names."""
    start = tokenizer.token_to_id("<|startoftranscript|>")
    if start is None or "eos_token" not in texts:
        return
    prompt = ["<|startoftranscript|>"]
    if language := files.text("language", ""):
        code = language_code(language)
        if code not in NAMES:
            raise ConfigError(f"{files.folder.name}: tokenizer_config.json: language {language!r} is not Whisper's")
        prompt.append(f"<|{code}|>")
    if task := files.text("task", ""):
        if task not in ("transcribe", "translate"):
            raise ConfigError(
                f"{files.folder.name}: tokenizer_config.json: task must be transcribe or translate, found {task!r}"
            )
        prompt.append(f"<|{task}|>")
    if not files.flag("predict_timestamps", False):
        prompt.append("<|notimestamps|>")
    there = [token for token in prompt if tokenizer.token_to_id(token) is not None]
    end, before = texts["eos_token"], " ".join(f"{token}:0" for token in there)
    set_template(tokenizer, f"{before} $A:0 {end}:0", f"{before} $A:0 $B:1 {end}:1", (*there, end))


def _all(text: str, *names: str) -> dict[str, Token]:
    return dict.fromkeys((f"{name}_token" for name in names), text)


_BERT: dict[str, Token] = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_ROBERTA: dict[str, Token] = {
    **_all("<s>", "bos", "cls"),
    **_all("</s>", "eos", "sep"),
    **_all("<unk>", "unk"),
    **_all("<pad>", "pad"),
    "mask_token": mask("<mask>", normalized=False),
}
_WORDS = frozenset({"do_lower_case", "strip_accents", "tokenize_chinese_chars"})
_PREFIX = frozenset({"add_prefix_space"})
_END = "<|endoftext|>"
_GPT2 = TokenizerClass(
    "BPE", read_byte_level, _dress_bytes(), _all(_END, "unk", "bos", "eos"), _around_bytes, settings=_PREFIX
)
_QWEN2 = replace(
    _GPT2,
    dress=_dress_bytes(nfc=True, pattern=QWEN2_PATTERN),
    specials=_all(_END, "unk", "eos", "pad"),
    around=_around_qwen2,
)

CLASSES = {
    "Bert": TokenizerClass("WordPiece", _read_words("[UNK]"), _dress_words, _BERT, around_cls_and_sep, settings=_WORDS),
    "Esm": TokenizerClass(
        "WordLevel",
        _read_acids,
        _dress_acids,
        {f"{name}_token": f"<{name}>" for name in ("unk", "cls", "pad", "mask", "eos")},
        _around_acids,
    ),
    "Funnel": TokenizerClass(
        "WordPiece",
        _read_words("<unk>"),
        _dress_words,
        {f"{name}_token": f"<{name}>" for name in ("unk", "sep", "pad", "cls", "mask")}
        | {"bos_token": "<s>", "eos_token": "</s>"},
        _around_funnel,
        settings=_WORDS | {"clean_text"},
    ),
    "MPNet": TokenizerClass(
        "WordPiece",
        _read_words("[UNK]"),
        _dress_words,
        _ROBERTA | {"unk_token": "[UNK]"},
        _around_mpnet,
        settings=_WORDS,
    ),
    "GPT2": _GPT2,
    "GPTNeoX": replace(
        _GPT2, dress=_dress_bytes(nfc=True), specials=_all(_END, "unk", "bos", "eos") | _all("<|padding|>", "pad")
    ),
    "Cohere": replace(
        _GPT2,
        dress=_dress_bytes(nfc=True, digits=True),
        specials={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "Qwen2": _QWEN2,
    "Qwen3_5": replace(_QWEN2, dress=_dress_bytes(nfc=True, pattern=QWEN35_PATTERN), around=_around_bytes),
    "Whisper": replace(_GPT2, around=_around_whisper, settings=_PREFIX | {"language", "task", "predict_timestamps"}),
    "Roberta": TokenizerClass("BPE", read_byte_level, _dress_bytes(), _ROBERTA, _around_roberta, settings=_PREFIX),
    "Blenderbot": TokenizerClass(
        "BPE", read_byte_level, _dress_bytes(prefix=True), _ROBERTA, _around_bytes, settings=_PREFIX
    ),
    "Deberta": TokenizerClass(
        "BPE",
        read_byte_level,
        _dress_bytes(),
        {"bos_token": "[CLS]", "eos_token": "[SEP]"} | _BERT,
        _around_deberta,
        settings=_PREFIX,
    ),
    "CLIP": TokenizerClass(
        "BPE",
        _read_clip,
        _dress_clip,
        _all(_END, "unk", "eos", "pad") | _all("<|startoftext|>", "bos"),
        _around_clip,
    ),
}
