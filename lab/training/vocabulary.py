"""Trains the embedded models' tokenizers: byte-level BPE, so every text round-trips exactly.

Training is deterministic for the same texts in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

END_OF_TEXT = "<|endoftext|>"
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
TURN, TURN_END, CALL, CALL_END = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"

# A piece of line breaks includes the next line's indentation, so a prompt that ends in indentation is split as in
# training. Other pieces: a name with its space, a digit, punctuation with its space, other white space.
_CODE_PIECES = r"[\r\n]+[ \t]*| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


_ASSISTANT_PIECES = r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]+"


def code_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Train the tokenizer of `code`: `<|endoftext|>` (id 0) begins every text and ends every document."""
    split = pre_tokenizers.Split(Regex(_CODE_PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _train(texts, pre_tokenizers.Sequence([split, to_bytes]), vocab_size, [END_OF_TEXT])
    return _with_template(tokenizer, f"{END_OF_TEXT} $A", f"{END_OF_TEXT} $A $B:1", END_OF_TEXT)


def normalize_tokenizer(pairs: Iterable[tuple[str, str]], vocab_size: int = 1200) -> Tokenizer:
    """Train the tokenizer of `normalize`: one vocabulary for both sides, a token for each digit, `</s>` at the end.

    `<pad>` is id 0 and starts the decoder (Marian's convention), `</s>` is 1. `<unk>` is 2 and never occurs.
    """
    pieces = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = (text for pair in pairs for text in pair)
    tokenizer = _train(texts, pieces, vocab_size, [PAD, END, UNKNOWN])
    return _with_template(tokenizer, f"$A {END}", f"$A $B:1 {END}:1", END)


def assistant_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the tokenizer of `assistant`: the marks of turns and calls are tokens, and so is each digit.

    A space is a token of its own, so that a word has the same tokens in a sentence as between the quotes of a JSON
    string: the model copies tokens instead of spelling. `<|im_end|>`, which ends a reply, is id 0. The chat template
    writes every mark, so nothing is added to a text.
    """
    split = pre_tokenizers.Split(Regex(_ASSISTANT_PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _train(texts, pre_tokenizers.Sequence([split, to_bytes]), vocab_size, [TURN_END, TURN, CALL, CALL_END])


def _train(
    texts: Iterable[str], pieces: pre_tokenizers.PreTokenizer, vocab_size: int, special_tokens: list[str]
) -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN if UNKNOWN in special_tokens else None))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _with_template(tokenizer: Tokenizer, single: str, pair: str, special: str) -> Tokenizer:
    ids = [(special, tokenizer.token_to_id(special))]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return tokenizer
