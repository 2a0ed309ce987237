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

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE = "[0-9][0-9][0-9]"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASED_LETTERS = (  # those that DeepSeek's first models know
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_HAN_UPPER, _HAN_LOWER = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}*{_HAN_LOWER}+{_SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}+{_HAN_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_MARKS}|{_REST}"
)
_THREES_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
)
_CASCADE = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|{_CASCADE}|\s"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SPARK = (*_DEEPSEEK3[:2], _DEEPSEEK3[2].removesuffix(rf"[\r\n]*|{_REST}") + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_MINICPM5 = (r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_MARKS}|{_REST}")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\\t\\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)


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

_DEEPSEEK3_RULE = PreTokenizer(_DEEPSEEK3)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jina-v1-en", "jina-v2-code"), _WORDS),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-es", "jina-de", "modern-bert", "exaone4", "gigachat"), _WORDS),
    **dict.fromkeys(("mellum", "a.x-4.0", "jais", "trillion", "granite-docling"), _WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "mellum2": _DIGITS,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "jina-v5-nano"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "f2llmv2"), _QWEN2_RULE),
    **dict.fromkeys(("megrez", "hunyuan", "kormo", "solar-open", "grok-2"), PreTokenizer((QWEN2_PATTERN,))),
    "qwen35": PreTokenizer((QWEN35_PATTERN,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_RULE),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_RULE),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "default": PreTokenizer(_DEFAULT),
    "falcon": PreTokenizer(_FALCON),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "kimi-k2": PreTokenizer((_KIMI,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "spark2_5": PreTokenizer(_SPARK),
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "ufakzeka": PreTokenizer((QWEN2_PATTERN.removeprefix(f"{_SHORT}|"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2_PATTERN)),
    "minicpm5": PreTokenizer(_MINICPM5, ignore_merges=True),
    "chameleon": PreTokenizer(_CHAMELEON, begins=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((_THREES_FROM_RIGHT, _GPT4O))),
    "afmoe": PreTokenizer((_THREES_FROM_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3[2])),
}
