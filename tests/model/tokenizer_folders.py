"""Folders with tokenizer files older than tokenizer.json, trained on the project's own texts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from triptych.model.text.piece_tokenizers import M2M100_LANGUAGES

ROOT = Path(__file__).parents[2]
_FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SPACES = " \t\n\r\u00a0\u2003\u3000\u200b\u200d\ufeff\u2581"
_LETTERS = "äößéñçøłşğÄÖﬁ①Ⅷ㎏ｆｕｌｌПриветмир你好世界こんにちは안녕مرحباשלוםनमस्तेไทย😀👩‍👩‍👧🇩🇪👍🏽"
_SPECIALS = [
    *("</s>", "<s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "<mask>", "<cls>", "<extra_id_5>", "<eop>"),
    *("fra_Latn", "en_XX", "__de__", ">>fr<<", "<0x41>", "<|endoftext|>", "<unk_7>"),
]


@cache
def texts() -> list[str]:
    """Return lines of texts that hardly change, as random models' outputs depend on them, and some in other scripts."""
    archive, training = ROOT / "docs" / "archive", ROOT / "lab" / "training"
    files = [ROOT / "LICENSE", *sorted(archive.glob("*.md")), *sorted(training.glob("[!_]*.py"))]
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    others = ["Grüße aus Köln, ça va? Привет мир", "你好世界 こんにちは 안녕하세요", "مرحبا بالعالم שלום"]
    return lines[:3000] + others * 20


def strings(count: int) -> Iterator[str]:
    """Yield mixtures of words, letters of all kinds, control characters, spaces and special tokens."""
    chance = random.Random(0)
    words = [word for line in texts() for word in line.split()]
    ascii_letters = "".join(map(chr, range(32, 127)))
    letters = [*ascii_letters, *_SPACES, *_LETTERS, "\x00", "\x07", "\x1b"]
    for _ in range(count):
        kind, size = chance.random(), chance.randrange(1, 20)
        if kind < 0.35:
            yield " ".join(chance.choices(words, k=size))
        elif kind < 0.7:
            yield "".join(chance.choices(letters, k=2 * size - 2))
        elif kind < 0.85:
            yield "".join(chance.choice(words if chance.random() < 0.5 else letters) for _ in range(size))
        else:
            spaced = [chance.choice((" ", "  ", "")) + chance.choice(words) for _ in range(size)]
            yield "".join(chance.choice(_SPECIALS) if chance.random() < 0.3 else word for word in spaced)


def _sentencepiece(path: Path, kind: str, **settings: Any) -> None:
    path.write_bytes(_trained(kind, json.dumps({"vocab_size": 900, "minloglevel": 2, "num_threads": 1, **settings})))


@cache
def _trained(kind: str, settings: str) -> bytes:
    """Return a model that is trained once for all folders with these settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()), model_writer=model, model_type=kind, **json.loads(settings)
    )
    return model.getvalue()


def _t5(folder: Path) -> None:
    _sentencepiece(folder / "spiece.model", "unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def _siglip(folder: Path) -> None:
    _sentencepiece(folder / "spiece.model", "unigram", pad_id=-1, eos_id=1, unk_id=2, bos_id=-1)


def _albert(folder: Path) -> None:
    own = {"control_symbols": ["[CLS]", "[SEP]"], "user_defined_symbols": ["(", ")", '"', "-"]}
    _sentencepiece(folder / "spiece.model", "unigram", pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, **own)


def _xlnet(folder: Path) -> None:
    control = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
    own = ["<eop>", ".", "(", ")", '"', "-"]
    _sentencepiece(folder / "spiece.model", "unigram", control_symbols=control, user_defined_symbols=own)


def _fairseq(folder: Path) -> None:
    _sentencepiece(folder / "sentencepiece.bpe.model", "unigram")


def _fairseq_bpe(folder: Path) -> None:
    _sentencepiece(folder / "sentencepiece.bpe.model", "bpe")


def _llama(folder: Path) -> None:
    """SentencePiece's defaults normalise characters and join spaces."""
    _sentencepiece(folder / "tokenizer.model", "bpe", byte_fallback=True)


def _llama_literal(folder: Path) -> None:
    """As published: spaces are not joined, and characters not changed."""
    plain = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    _sentencepiece(folder / "tokenizer.model", "bpe", byte_fallback=True, **plain)


def _gemma(folder: Path) -> None:
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    plain = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    _sentencepiece(folder / "tokenizer.model", "bpe", byte_fallback=True, **ids, **plain)


def _byte_level(folder: Path, specials: Sequence[str] = _FAIRSEQ) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.model.save(str(folder))


def _wordpiece(folder: Path, unknown: str = "[UNK]", specials: Sequence[str] = _BERT) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=list(specials), show_progress=False)
    tokenizer.train_from_iterator([line.lower() for line in texts()], trainer)
    tokenizer.model.save(str(folder))


def _one_end(folder: Path) -> None:
    _byte_level(folder, ("<|endoftext|>",))


def _whisper(folder: Path) -> None:
    """Fine-tunes of 2022 have the special tokens in a file of their own."""
    _one_end(folder)
    names = ["<|startoftranscript|>", "<|en|>", "<|zh|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    names += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({name: size + place for place, name in enumerate(names)}))
    (folder / "normalizer.json").write_text('{"colour": "color"}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": names}))


def _cohere(folder: Path) -> None:
    names = ("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
    _byte_level(folder, names)


def _clip(folder: Path) -> None:
    """Pieces that end a word have a mark."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=[*alphabet],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.lower() for line in texts()], trainer)
    tokenizer.model.save(str(folder))


def _funnel(folder: Path) -> None:
    _wordpiece(folder, "<unk>", ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>"))


def _mpnet(folder: Path) -> None:
    _wordpiece(folder, "[UNK]", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"))


def _deberta(folder: Path) -> None:
    _byte_level(folder, ("[PAD]", "[CLS]", "[SEP]", "[UNK]"))


def _deberta_v2(folder: Path) -> None:
    pieces = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    _sentencepiece(folder / "spm.model", "unigram", pad_id=0, bos_id=1, eos_id=2, unk_id=3, **pieces)


def _no_files(folder: Path) -> None:
    """ByT5 has bytes alone."""


def _marian(folder: Path) -> None:
    """Two models over one vocabulary, which lacks some pieces of the source's."""
    _sentencepiece(folder / "source.spm", "unigram")
    _sentencepiece(folder / "target.spm", "unigram", vocab_size=700, character_coverage=0.99)
    ids = {"</s>": 0, "<unk>": 1}
    for name in ("source.spm", "target.spm"):
        for place, piece in enumerate(_pieces(folder / name)):
            if name == "target.spm" or place % 17:
                ids.setdefault(piece, len(ids))
    ids |= {name: len(ids) + place for place, name in enumerate((">>fr<<", ">>de<<", "<pad>"))}
    (folder / "vocab.json").write_text(json.dumps(ids))


def marian_apart(folder: Path) -> None:
    """Two models, each over a vocabulary of its own, as in OPUS-MT's larger models."""
    _sentencepiece(folder / "source.spm", "unigram")
    _sentencepiece(folder / "target.spm", "unigram", vocab_size=700, character_coverage=0.99)
    for model, name in (("source.spm", "vocab.json"), ("target.spm", "target_vocab.json")):
        found = ["</s>", "<unk>", *sorted(set(_pieces(folder / model))), ">>fr<<", "<pad>"]
        (folder / name).write_text(json.dumps({piece: place for place, piece in enumerate(found)}))


def _m2m100(folder: Path) -> None:
    _fairseq(folder)
    ids = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    for piece in _pieces(folder / "sentencepiece.bpe.model"):
        ids.setdefault(piece, len(ids))
    (folder / "vocab.json").write_text(json.dumps(ids))


def _pieces(path: Path) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(token) for token in range(3, processor.get_piece_size())]


def _amino_acids(folder: Path) -> None:
    names = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(names))


# By name: the function that writes the files, the model's type, the tokenizer's class, and its settings.
FOLDERS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "t5": (_t5, "t5", "T5Tokenizer", {}),
    "mt5": (_t5, "mt5", "T5Tokenizer", {"extra_ids": 0}),
    "siglip": (_siglip, "siglip", "SiglipTokenizer", {}),
    "albert": (_albert, "albert", "AlbertTokenizer", {"do_lower_case": True}),
    "albert-cased": (_albert, "albert", "AlbertTokenizer", {"do_lower_case": False, "keep_accents": True}),
    "xlnet": (_xlnet, "xlnet", "XLNetTokenizer", {}),
    "xlm-roberta": (_fairseq, "xlm-roberta", "XLMRobertaTokenizer", {}),
    "mbart": (_fairseq, "mbart", "MBartTokenizer", {"src_lang": "de_DE"}),
    "mbart-50": (_fairseq, "mbart", "MBart50Tokenizer", {"src_lang": "ro_RO"}),
    "pegasus": (_t5, "pegasus", "PegasusTokenizer", {}),
    "llama": (_llama_literal, "llama", "LlamaTokenizer", {"legacy": False, "add_bos_token": True}),
    "llama-legacy": (
        _llama_literal,
        "llama",
        "LlamaTokenizer",
        {"legacy": True, "add_bos_token": True, "add_eos_token": True},
    ),
    "llama-joined": (_llama, "llama", "LlamaTokenizer", {"add_bos_token": True}),
    "gemma": (_gemma, "gemma", "GemmaTokenizer", {"add_bos_token": True}),
    # As published: its class is named after the vocabulary's model.
    "siglip2": (_gemma, "siglip2", "GemmaTokenizer", {"add_bos_token": False, "add_eos_token": True}),
    "gpt2": (_byte_level, "gpt2", "GPT2Tokenizer", {}),
    "opt": (
        _byte_level,
        "opt",
        "GPT2Tokenizer",
        {"add_bos_token": True, **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"), "pad_token": "<pad>"},
    ),
    "bart": (_byte_level, "bart", "BartTokenizer", {}),
    "roberta": (_byte_level, "roberta", "RobertaTokenizer", {"add_prefix_space": True}),
    "led": (_byte_level, "led", "LEDTokenizer", {}),
    "blenderbot": (_byte_level, "blenderbot", "BlenderbotTokenizer", {}),
    "codegen": (_one_end, "codegen", "CodeGenTokenizer", {"add_prefix_space": True}),
    "starcoder2": (_one_end, "starcoder2", "", {}),
    "gpt-neox": (_one_end, "gpt_neox", "GPTNeoXTokenizer", {}),
    "cohere": (_cohere, "cohere", "CohereTokenizer", {}),
    "qwen2": (_one_end, "qwen2", "Qwen2Tokenizer", {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
    "qwen3": (_one_end, "qwen3", "", {"eos_token": "<|im_end|>"}),
    "whisper": (_whisper, "whisper", "WhisperTokenizer", {"language": "German", "task": "transcribe"}),
    "clip": (_clip, "clip", "CLIPTokenizer", {}),
    "bert": (_wordpiece, "bert", "BertTokenizer", {"do_lower_case": True}),
    "distilbert": (_wordpiece, "distilbert", "", {"do_lower_case": True, "model_max_length": 512}),
    "bert-cased": (_wordpiece, "bert", "BertTokenizer", {"do_lower_case": False, "strip_accents": True}),
    "esm": (_amino_acids, "esm", "EsmTokenizer", {"model_max_length": 1026}),
    "funnel": (_funnel, "funnel", "FunnelTokenizer", {}),
    "mpnet": (_mpnet, "mpnet", "MPNetTokenizer", {}),
    "deberta": (_deberta, "deberta", "DebertaTokenizer", {}),
    "deberta-v2": (_deberta_v2, "deberta-v2", "DebertaV2Tokenizer", {"do_lower_case": False}),
    "camembert": (_fairseq, "camembert", "CamembertTokenizer", {}),
    "byt5": (_no_files, "t5", "ByT5Tokenizer", {}),
    "marian": (_marian, "marian", "MarianTokenizer", {}),
    "m2m-100": (
        _m2m100,
        "m2m_100",
        "M2M100Tokenizer",
        {"src_lang": "fr", "additional_special_tokens": [f"__{code}__" for code in M2M100_LANGUAGES]},
    ),
}


NLLB_LANGUAGES = ["ace_Arab", "eng_Latn", "fra_Latn"]


def write_nllb(folder: Path) -> Path:
    folder.mkdir(parents=True)
    _fairseq_bpe(folder)
    settings = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": NLLB_LANGUAGES, "src_lang": "fra_Latn"}
    (folder / "config.json").write_text('{"model_type": "m2m_100"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_folder(name: str, folder: Path) -> Path:
    """Write the files of `name` to a new folder."""
    make, model_type, tokenizer_class, settings = FOLDERS[name]
    folder.mkdir(parents=True)
    make(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}  # old ones give it by the model's type
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return folder
