"""Language tokens of translation models: each source is marked with the token of its language.

mBART, mBART-50, NLLB and M2M-100 have such tokens. A folder names one of them, and a request may name another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers

from triptych.model.errors import ConfigError
from triptych.model.text.piece_tokenizers import MBART50_LANGUAGES, MBART_LANGUAGES, PieceTokenizer, m2m100_languages
from triptych.model.text.tokenizer_class import set_template
from triptych.model.text.tokenizer_files import Files

_NLLB_LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


@dataclass(frozen=True, slots=True)
class SourceLanguages:
    """The languages of a tokenizer, and whether the token stands before or after the text."""

    tokens: dict[str, int]  # their ids, by the tokens' texts
    in_front: bool

    @property
    def codes(self) -> list[str]:
        """The names of the languages: the tokens' texts, without the underscores of M2M-100."""
        return [text.removeprefix("__").removesuffix("__") for text in self.tokens]

    def token(self, code: str) -> int | None:
        """Return the token of a code, which may also be given as the token's text; None if there is none."""
        return self.tokens.get(code, self.tokens.get(f"__{code}__"))

    def mark(self, ids: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Replace the language of an encoded source with special tokens."""
        return (token, *ids[1:]) if self.in_front else (*ids[:-1], token)


def source_languages(tokenizer: tokenizers.Tokenizer | PieceTokenizer, files: Files) -> SourceLanguages | None:
    """Let the tokenizer mark every text with the folder's language; None for a class without languages.

    The tokenizer's class decides, even if tokenizer.json has its own template, as in `transformers`. Raises
    `ConfigError`.
    """
    if isinstance(tokenizer, PieceTokenizer):  # has its own already
        tokens = {text: tokenizer.ids[text] for text in m2m100_languages(files) if text in tokenizer.ids}
        return SourceLanguages(tokens, in_front=True) if tokens else None
    name = files.tokenizer_class or {"mbart": "MBart"}.get(files.model_type, "")
    if name == "Nllb":
        special = sorted(tokenizer.get_added_tokens_decoder().items())
        codes = [token.content for _, token in special if _NLLB_LANGUAGE.fullmatch(token.content)]
        return _put(tokenizer, files, codes, "eng_Latn", in_front=not files.flag("legacy_behaviour", False))
    if name == "MBart50":
        return _put(tokenizer, files, MBART50_LANGUAGES, "en_XX", in_front=True)
    return _put(tokenizer, files, MBART_LANGUAGES, "en_XX", in_front=False) if name == "MBart" else None


def _put(
    tokenizer: tokenizers.Tokenizer, files: Files, codes: Iterable[str], default: str, *, in_front: bool
) -> SourceLanguages | None:
    """Let the tokenizer's template put the folder's language and the end token around a text.

    A tokenizer.json that lacks the language of a folder which names none keeps its own template: its vocabulary is cut.
    """
    tokens = {code: token for code in codes if (token := tokenizer.token_to_id(code)) is not None}
    code, end = files.text("src_lang", default), files.special("eos_token", "</s>")
    if code not in tokens and files.has_json and not files.config.get("src_lang"):
        return None
    if code not in tokens:
        raise ConfigError(f"{files.folder.name}: src_lang {code!r} is no language of its tokenizer")
    before, after = (f"{code} ", end) if in_front else ("", f"{end} {code}")
    set_template(tokenizer, f"{before}$A {after}", f"{before}$A $B {after}", (end, code))
    return SourceLanguages(tokens, in_front)
