"""How byte-level BPE tokenizers cut texts before they merge, by GGUF's names for it (`tokenizer.ggml.pre`).

The rules are those of the published tokenizer.json of the models, after which GGUF's names are given; llama.cpp has
them as regular expressions in `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # in English
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_REST}"
QWEN2_PATTERN = rf"{_SHORT}|{_WORD}|\p{{N}}|{_MARKS}|{_REST}"
QWEN35_PATTERN = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_GPT4O = rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A rule: patterns that cut one after the other, then GPT-2's if `words`; then bytes."""

    patterns: tuple[str, ...] = ()
    words: bool = False  # cut by GPT-2's pattern (Radford et al. 2019)
    digits: bool = False  # first every digit by itself
    ignore_merges: bool = False  # a whole word of the vocabulary is one token
    begins: bool = False  # texts begin with the begin token unless the metadata says otherwise
    nfc: bool = False  # texts are put into Unicode's composed form first, which llama.cpp does not

    def build(self) -> Any:
        return pre_tokenizers.Sequence(list(self._steps()))

    def _steps(self) -> Iterator[Any]:
        if self.digits:
            yield pre_tokenizers.Digits(individual_digits=True)
        for pattern in self.patterns:
            yield pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words)


_WORDS = PreTokenizer(words=True)
_DIGITS = PreTokenizer(words=True, digits=True)
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, begins=True)
_QWEN2_RULE = PreTokenizer((QWEN2_PATTERN,), nfc=True)
_GPT4O_RULE = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jina-v1-en", "jina-v2-code"), _WORDS),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "modern-bert", "exaone4", "gigachat", "mellum", "a.x-4.0"), _WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2_RULE),
    "megrez": PreTokenizer((QWEN2_PATTERN,)),
    "hunyuan": PreTokenizer((QWEN2_PATTERN,)),
    "qwen35": PreTokenizer((QWEN35_PATTERN,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_RULE),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
