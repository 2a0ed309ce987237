"""Tokenizers trained on a short text, without a download."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from triptych.model.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The end\n\n### Next",
    "naïve café, Ελληνικά и русский текст",
    "東京は日本の首都です。漢字と仮名",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🎉🎉 👍🏽 and text",
    "def add(a, b):\n    return a + b\n",
]
CHARACTERS = "ab .é東👍🏽\n#京🇫🇷"


@cache
def bytes_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with few merges: most characters beyond ASCII are split over tokens."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return Tokenizer(raw)


@cache
def words_tokenizer() -> Tokenizer:
    """Return a tokenizer of Metaspace pieces like SentencePiece's: the first token's space is stripped."""
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    alphabet = sorted({character for text in [*CORPUS, CHARACTERS] for character in text})
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return Tokenizer(raw)


@cache
def fallback_tokenizer() -> Tokenizer:
    """Return pieces like Llama's: unknown characters become bytes, and a text's first space is stripped."""
    taught = [text for text in CORPUS if text.isascii()]
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"],
        show_progress=False,
    )
    raw.train_from_iterator([text.replace(" ", "\u2581") for text in taught], trainer)
    spelled = json.loads(raw.to_str())
    spelled["added_tokens"] = [token for token in spelled["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spelled)))


@cache
def literal_tokenizer() -> Tokenizer:
    """Return Metaspace pieces that include U+FFFD; the text of id 5 is empty."""
    words = ["a", "\u2581", "\u2581\u2581", "\u2581\ufffd", "\ufffd", ""]
    raw = tokenizers.Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw)
