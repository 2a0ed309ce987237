"""Steps that tokenizers of sentencepiece models have in common."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from triptych.model.text.sentencepiece_model import SPACE
from triptych.model.text.tokenizer_files import Files

SPACES = normalizers.Replace(Regex(" {2,}"), " ")


MAX_PIECE = 512  # characters of a piece that others are merged to; those of published models have less than 130


def metaspace(scheme: str) -> Any:
    """Write spaces as SentencePiece does, with one more in front of a text by `scheme`: always, first or never.

    The library's own step puts none in front of a text that begins with a space; SentencePiece does.
    """
    plain = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
    if scheme == "never":
        return plain
    in_front = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme=scheme, split=False)
    return pre_tokenizers.Sequence([plain, in_front, plain])


def set_words(tokenizer: Tokenizer, *, words: bool = True, scheme: str = "always") -> None:
    """Let spaces begin pieces, and with `words` any white space separate words."""
    step = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), step]) if words else step
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True)


def set_normalizers(tokenizer: Tokenizer, *steps: Any) -> None:
    tokenizer.normalizer = normalizers.Sequence(list(steps)) if steps else None


def precompiled(charsmap: bytes) -> list[Any]:
    return [normalizers.Precompiled(charsmap)] if charsmap else []


def fairseq_first(files: Files) -> list[str]:
    defaults = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    return [files.special(f"{name}_token", text) for name, text in defaults.items()]
