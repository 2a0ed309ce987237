"""Tokenizers trained on a little text, without a download."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from model.tokenizer import Tokenizer

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
    """Byte-level BPE with few merges: most characters beyond ASCII are split over tokens."""
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
    """Metaspace pieces, as sentencepiece models have: the first token's space is stripped."""
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    alphabet = sorted({character for text in [*CORPUS, CHARACTERS] for character in text})
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return Tokenizer(raw)
