"""Tokenizers of the benchmark models, trained when the models are built, with special tokens at their published ids.

The training text is Python's standard library, so a version of Python determines the vocabulary. If it yields fewer
entries than the published vocabulary, entries such as `[unused7]` fill the rest: no text is encoded to them, but a
generated one has a text. T5's last outputs have no entry and no text, as published.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lab.training.corpus import documents, held_out_sample

_SPACE = "\u2581"  # SentencePiece's sign for a space
# Names with preceding spaces, single digits, runs of signs with preceding spaces, spaces alone, other white space.
_PIECES = rf"{_SPACE}*[\p{{L}}_]+|\p{{N}}|{_SPACE}*[^{_SPACE}\p{{L}}\p{{N}}\s]+|{_SPACE}+|\s"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTINELS = 100  # of T5: <extra_id_0> is the last entry
_SPARE = 28  # outputs of T5 beyond its entries, up to a multiple of 128
_SEEDS, _SHRINKING = 100_000, 0.5  # of Unigram's trainer, whose defaults take minutes
_KEPT = 0.1  # above the least score of a Unigram: 0.0001 for each of a few hundred kept characters
_SIGNS = [chr(code) for code in range(33, 127) if not chr(code).isupper()]  # ASCII in lower case


def training_texts() -> list[str]:
    """Yield the standard library's texts, or this project's sample of them if Python has no sources."""
    return [document.text for document in documents(held_out=False)] or [held_out_sample()]


def trained(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer of a raw config.json, with its `vocab_size` and ids of special tokens.

    Raises `KeyError` for a `model_type` that no benchmark model has.
    """
    return _TRAINED[raw["model_type"]](raw, texts)


def _gpt2(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    return _byte_level(raw, texts, {raw["eos_token_id"]: "<|endoftext|>"})


def _two_towers(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    text = raw["text_config"]
    return _byte_level(text, texts, {text["bos_token_id"]: "<|startoftext|>", text["eos_token_id"]: "<|endoftext|>"})


def _whisper(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    special = {raw["eos_token_id"]: "<|endoftext|>", raw["decoder_start_token_id"]: "<|startoftranscript|>"}
    return _byte_level(raw, texts, special)


def _bart(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    size = raw["vocab_size"]
    start, end = raw["bos_token_id"], raw["eos_token_id"]
    special = {start: "<s>", raw["pad_token_id"]: "<pad>", end: "</s>", 3: "<unk>", size - 1: "<mask>"}
    tokenizer = _byte_level(raw, texts, special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    return tokenizer


def _byte_level(raw: Mapping[str, Any], texts: Iterable[str], special: dict[int, str]) -> Tokenizer:
    """Train a byte-level BPE, as GPT-2's: any text is bytes, so decoding restores it."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=raw["vocab_size"] - len(special),
        initial_alphabet=sorted(pieces.alphabet()),
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    tokenizer = _with_special(models.BPE(*_entries(learnt, special, raw["vocab_size"])), special)
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Train a SentencePiece BPE: spaces are signs, and rare characters are bytes."""
    start = raw["bos_token_id"]
    special = {0: "<unk>", start: "<s>", raw["eos_token_id"]: "</s>"}
    fixed = special | {len(special) + at: name for at, name in enumerate(_BYTES)}
    learnt = Tokenizer(models.BPE())
    spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    learnt.normalizer, learnt.pre_tokenizer = spaces, pieces
    trainer = trainers.BpeTrainer(
        vocab_size=raw["vocab_size"] - len(fixed), limit_alphabet=len(_BYTES), show_progress=False
    )
    learnt.train_from_iterator(texts, trainer)
    vocabulary, merges = _entries(learnt, fixed, raw["vocab_size"])
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = _with_special(model, special)
    tokenizer.normalizer, tokenizer.pre_tokenizer = spaces, pieces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", start)]
    )
    return tokenizer


def _t5(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Train a SentencePiece Unigram: any white space is one sign, and unseen characters are unknown."""
    size, end = raw["vocab_size"] - _SPARE, raw["eos_token_id"]
    special = {raw["pad_token_id"]: "<pad>", end: "</s>", 2: "<unk>"}
    special |= {size - 1 - at: f"<extra_id_{at}>" for at in range(_SENTINELS)}
    spaces = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    learnt = Tokenizer(models.Unigram())
    learnt.pre_tokenizer = pre_tokenizers.Sequence([*spaces, pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")])
    trainer = trainers.UnigramTrainer(  # type: ignore[call-arg]  # its stub knows no seed_size
        vocab_size=size - len(special) + 1,  # it counts the unknown one
        special_tokens=["<unk>"],
        unk_token="<unk>",
        seed_size=_SEEDS,
        shrinking_factor=_SHRINKING,
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    found = _scores(learnt)
    names = _placed(sorted(found, key=lambda name: (-found[name], name)), special, size)
    scores = found | dict.fromkeys(special.values(), 0.0)
    unused = 2 * min(found.values())
    model = models.Unigram([(name, scores.get(name, unused)) for name in names], unk_id=2, byte_fallback=False)
    tokenizer = _with_special(model, special)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(spaces)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
    )
    return tokenizer


def _bert(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Train a WordPiece without capitals and accents; characters beyond ASCII are unknown."""
    special = {raw["pad_token_id"]: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    fixed = {**{number: f"[unused{number}]" for number in range(100)}, **special}
    tokenizer = _word_pieces(raw, texts, fixed, special, "[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 101), ("[SEP]", 102)],
    )
    return tokenizer


def _mpnet(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Train BERT's pieces, with RoBERTa's special tokens."""
    start, end, size = raw["bos_token_id"], raw["eos_token_id"], raw["vocab_size"]
    special = {start: "<s>", raw["pad_token_id"]: "<pad>", end: "</s>", 3: "[UNK]", size - 1: "<mask>"}
    tokenizer = _word_pieces(raw, texts, special, special, "[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    return tokenizer


def _word_pieces(
    raw: Mapping[str, Any], texts: Iterable[str], fixed: Mapping[int, str], special: Mapping[int, str], unknown: str
) -> Tokenizer:
    insides = [f"##{sign}" for sign in _SIGNS]
    learnt = Tokenizer(models.WordPiece(unk_token=unknown))
    learnt.normalizer, learnt.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=raw["vocab_size"] - len(fixed),
        initial_alphabet=_SIGNS,
        limit_alphabet=len(_SIGNS),
        special_tokens=insides,  # else in the order of a table that is another one each time
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    names = _placed(_learnt(learnt), fixed, raw["vocab_size"])
    model = models.WordPiece({name: number for number, name in enumerate(names)}, unk_token=unknown)
    tokenizer = _with_special(model, special)
    tokenizer.normalizer, tokenizer.pre_tokenizer = learnt.normalizer, learnt.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _modernbert(raw: Mapping[str, Any], texts: Iterable[str]) -> Tokenizer:
    first, last, pad = raw["cls_token_id"], raw["sep_token_id"], raw["pad_token_id"]
    special = {first - 1: "[UNK]", first: "[CLS]", last: "[SEP]", pad: "[PAD]", pad + 1: "[MASK]"}
    tokenizer = _byte_level(raw, texts, special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", first), ("[SEP]", last)]
    )
    return tokenizer


_TRAINED = {
    **{"gpt2": _gpt2, "qwen3": _gpt2, "qwen3_moe": _gpt2, "llama": _llama, "t5": _t5, "bart": _bart, "bert": _bert},
    **{"modernbert": _modernbert, "mpnet": _mpnet, "whisper": _whisper, "qwen3_5_text": _gpt2},
    **{"clip": _two_towers, "siglip": _two_towers},
}


def _with_special(model: models.Model, special: Mapping[int, str]) -> Tokenizer:
    """Return a tokenizer in which these entries of `model` are special tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special.values()])
    return tokenizer


def _entries(learnt: Tokenizer, fixed: Mapping[int, str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ids by name and merges of a trained BPE, with `fixed` entries at their ids."""
    merges = [(left, right) for left, right in json.loads(learnt.to_str())["model"]["merges"]]
    return {name: number for number, name in enumerate(_placed(_learnt(learnt), fixed, size))}, merges


def _scores(learnt: Tokenizer) -> dict[str, float]:
    """Return the log-probabilities of a trained Unigram's entries, without the unknown one.

    The order of the trainer's tables varies, and with it the last digits of sums and which of the characters that are
    always kept is slightly above the least score. They all get that score, to make the result deterministic.
    """
    found = dict(json.loads(learnt.to_str())["model"]["vocab"][1:])
    least = min(found.values())
    return {name: round(score if score > least + _KEPT else least, 6) for name, score in found.items()}


def _learnt(tokenizer: Tokenizer) -> list[str]:
    """Return the entries by id."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _placed(learnt: Iterable[str], fixed: Mapping[int, str], size: int) -> list[str]:
    """Return the entry of each id: the `fixed` one, or the next trained one."""
    rest = iter(learnt)
    return [fixed.get(number) or next(rest, f"[unused{number}]") for number in range(size)]
