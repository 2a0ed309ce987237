"""The tokenizer of `speech`: byte-level BPE over its utterances, then Whisper's special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

END, START, LANGUAGE = "<|endoftext|>", "<|startoftranscript|>", "<|en|>"
TRANSLATE, TRANSCRIBE, PREVIOUS = "<|translate|>", "<|transcribe|>", "<|startofprev|>"
NO_SPEECH, NO_TIMESTAMPS = "<|nospeech|>", "<|notimestamps|>"
SPECIAL = (END, START, LANGUAGE, TRANSLATE, TRANSCRIBE, "<|startoflm|>", PREVIOUS, NO_SPEECH, NO_TIMESTAMPS)
TIMESTAMP = 0.02  # seconds from one timestamp to the next


def speech_tokenizer(texts: Iterable[str], text_tokens: int, seconds: int) -> Tokenizer:
    """Train the tokenizer: `text_tokens` tokens of texts, then `SPECIAL`, then timestamps from 0 to `seconds`.

    A text begins with a space, as Whisper's do. As in Whisper's files, timestamps are no special tokens.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=text_tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((f" {text}" for text in texts), trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    times = (f"<|{step * TIMESTAMP:.2f}|>" for step in range(round(seconds / TIMESTAMP) + 1))
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    ids = [(name, token_id(tokenizer, name)) for name in SPECIAL]
    prefix = f"{START} {LANGUAGE} {TRANSCRIBE} {NO_TIMESTAMPS}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{prefix} $A {END}", pair=f"{prefix} $A $B:1 {END}:1", special_tokens=ids
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found
