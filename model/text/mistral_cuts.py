"""Mends how a Mistral folder's tokenizer.json cuts texts, as `transformers` does where `fix_mistral_regex` asks for it.

Folders saved before version 5 cut letters, digits and spaces otherwise than the tokenizers that the models were trained
with.
"""

from __future__ import annotations

import logging
import re

from tokenizers import Regex, Tokenizer, pre_tokenizers

from model.text.tokenizer_files import Files

_log = logging.getLogger(__name__)
_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MIN_TOKENS = 100_000
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_PATTERN = "|".join(
    (
        rf"{_WORD}[{_CAPITALS}]*[{_SMALL}]+",
        rf"{_WORD}[{_CAPITALS}]+[{_SMALL}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def mend_mistral_cuts(tokenizer: Tokenizer, files: Files) -> None:
    """Replace the pattern that cuts texts, in a folder that this concerns and whose settings ask for it."""
    cuts, config = tokenizer.pre_tokenizer, files.object("config.json")
    if cuts is None or tokenizer.get_vocab_size() <= _MIN_TOKENS or not config or _is_mended(config):
        return
    if config.get("model_type") is not None and config["model_type"] not in _TYPES:
        return
    wanted = files.optional_flag("fix_mistral_regex")
    if not wanted:
        if wanted is None and "\\p{L}" in str(cuts) and _PATTERN not in str(cuts):
            _log.warning(
                "%s: its tokenizer cuts texts otherwise than Mistral's own; transformers mends that where "
                "tokenizer_config.json has `fix_mistral_regex: true`, and so does this service",
                files.folder.name,
            )
        return
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    if isinstance(cuts, pre_tokenizers.Sequence):
        rest = list(cuts)[1:]  # type: ignore[call-overload]
    else:
        spaces = isinstance(cuts, pre_tokenizers.Metaspace)
        rest = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False) if spaces else cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *rest])


def _is_mended(config: dict[str, object]) -> bool:
    """Whether the folder was saved by a version that has the pattern right."""
    found = re.match(r"\d+", str(config.get("transformers_version") or ""))
    return found is not None and int(found[0]) >= 5
