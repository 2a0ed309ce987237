"""Tiny random text checkpoints, saved by the reference library, with tokenizers trained on the spot.

They serve tests of the whole service; `tests.model.checkpoints` has one of every kind, without tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.model.checkpoints import randomise

TEXT = (
    "def add(left, right):\n    return left + right\n",
    "import os\n\nclass Café:\n    price = '12 €'\n",
    "for index in range(10):\n    print(index, 'naïve', \"日本\")\n",
)


def llama(folder: Path, *, max_positions: int = 2048) -> Path:
    """Write a decoder with a byte-level BPE and without an end-of-sequence id."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_bpe(vocab_size=320)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=None,
        pad_token_id=None,
    )
    return save(LlamaForCausalLM, config, tokenizer, folder)


def bert(folder: Path, *, max_positions: int = 128, classes: int = 0) -> Path:
    """Write an encoder with a WordPiece tokenizer, [CLS] and [SEP]; with `classes`, a text classifier."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    tokenizer = word_piece()
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        pad_token_id=tokenizer.token_to_id("[PAD]"),
        num_labels=classes or 2,
    )
    return save(BertForSequenceClassification if classes else BertModel, config, tokenizer, folder)


def byte_level_bpe(vocab_size: int) -> Tokenizer:
    """Return a tokenizer that has an id for every byte and puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    special = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[special])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer of the words and characters of `TEXT`; a trained vocabulary would differ each time."""
    split = pre_tokenizers.BertPreTokenizer()
    words = {word for text in TEXT for word, _ in split.pre_tokenize_str(text)}
    characters = sorted(set("".join(words)))
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*specials, *characters, *("##" + one for one in characters), *sorted(words - set(characters))]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def save(model_class: Any, config: Any, tokenizer: Tokenizer, folder: Path) -> Path:
    """Write a random model of `config`, the same every time, and its tokenizer to `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        randomise(model, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
