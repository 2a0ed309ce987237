"""Writes docs/keys.md: `python -m tests.model.key_table`.

It shows what the code does with each key of each configuration class, and which files and settings each tokenizer
class uses. `test_raw_config.py` compares the lists of keys with the installed classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.models.auto import tokenization_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, family_of, read_settings
from triptych.model.families.table.known_keys import known_keys
from triptych.model.families.table.raw_config import _HARMLESS, _PATTERNS, Settings, _harmless
from triptych.model.text.piece_tokenizers import PIECE_CLASSES
from triptych.model.text.tokenizer_builder import CLASSES
from triptych.model.text.tokenizer_class import _TYPES, SERVED
from triptych.model.text.tokenizer_files import SENTENCEPIECE_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
_HEAD = """# Keys and files by type

`python -m tests.model.key_table` writes this page from the tables that read the files.
[checkpoints.md](checkpoints.md) tells what happens to a key in general.

## Keys of config.json

The keys are those of the configuration class that transformers 5.23 has for the type; a test compares them.

- **Read**: computed with; a value that is not computed is refused by the key's name.
- **Refused**: so is any value but the class's default, null, false and empty ones.
- **Ignored**: the class has the key, and its network does not read it: a warning.
- A key in no row is not known to the class. It is ignored with a warning, and refused in a folder with `auto_map`.

"""
_EVERY = ("is_causal", "per_layer_config", "experts_implementation")  # every class has these, and they have no effect
_ROPE = {"rope_scaling", "rope_theta", "partial_rotary_factor"}  # older spellings of rope_parameters
# Settings that classes have no default for, or whose default no published model uses.
_COMPLETED = {
    "dots1": {"n_routed_experts": 128},
    "glm4_moe": {"head_dim": 128},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
}
_COMPLETED |= {"hunyuan_v1_moe": {"num_experts": 2}}


def page() -> str:
    """Return docs/keys.md."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for model_type in sorted(FAMILIES):
        if model_type in CONFIG_MAPPING:
            rows.setdefault(tuple(map(_names, fates(model_type))), []).append(model_type)
    lines = [f"| {_names(types)} | {' | '.join(cells)} |" for cells, types in rows.items()]
    return "\n".join(
        [_HEAD + _every(), _table("`model_type`", "read", "refused", "ignored"), *lines, "", _tokenizers()]
    )


def fates(model_type: str) -> tuple[list[str], list[str], list[str]]:
    """Return the keys of a type's class that are read, refused and ignored."""
    known = known_keys(model_type)
    assert known is not None
    raw = json.loads(CONFIG_MAPPING[model_type]().to_json_string()) | _COMPLETED.get(model_type, {})
    settings = Settings(raw, known, strict=False)
    family_of(raw).config(settings, None)
    own = [key for key in known.defaults if key not in _EVERY and key not in known.renamed and not _is_common(key)]
    read = {key for key in own if key in settings._read or key in _ROPE}
    rest = {key: _fate(raw, key, known.defaults[key]) for key in own if key not in read}
    found_read = sorted(read | {key for key, fate in rest.items() if fate == "read"})
    return found_read, *(sorted(key for key, found in rest.items() if found == fate) for fate in ("refused", "ignored"))


def _is_common(key: str) -> bool:
    return _harmless(key) or key == "model_type"


def _fate(raw: dict[str, Any], key: str, default: Any) -> str:
    """Return what happens to a key with another value, where the network of the defaults does not read it."""
    other = (not default) if isinstance(default, bool) else "other"
    try:
        return "ignored" if key in read_settings({**raw, key: other})[1] else "read"
    except ConfigError as error:
        return "refused" if f"settings that are not served: {key}" in str(error) else "read"


def _every() -> str:
    common = sorted(key for key in _HARMLESS if not key.endswith("_"))
    return (
        f"In all types `is_causal` is read of decoders (false makes an encoder of one) and refused elsewhere, "
        f"`per_layer_config` and `experts_implementation` are refused, and these are ignored without a word, as they "
        f"are of training, bookkeeping or generation: {_names([*_PATTERNS, *common])}.\n"
    )


def _tokenizers() -> str:
    rows = [
        f"| {name} | {_names(_TYPES[name].split())} | {_files(name)} | {_names(sorted(_settings(name))) or '-'} |"
        for name in sorted({*CLASSES, *PIECE_CLASSES})
    ]
    head = (
        "## Tokenizer classes\n\n"
        "The class is the folder's `tokenizer_class`, else that of its `model_type`. It is read from these files where "
        "there is no `tokenizer.json` (ByT5, Marian and M2M100 always). "
        f"A SentencePiece model may have any of these names: {_names(SENTENCEPIECE_NAMES)}.\n"
        f"In every class these settings of `tokenizer_config.json` are read: {_names(sorted(SERVED))}.\n"
    )
    return "\n".join([head, _table("class", "usual types", "files", "further settings"), *rows, ""])


def _settings(name: str) -> Iterable[str]:
    return (CLASSES[name] if name in CLASSES else PIECE_CLASSES[name]).settings


def _files(name: str) -> str:
    if name in PIECE_CLASSES:
        needed = PIECE_CLASSES[name].files
        more = [file for file in library_files(name) if file not in needed]
        return (_names(needed) or "none") + (f"; {_names(more)} where they are there" if more else "")
    files = CLASSES[name].files
    if files != SENTENCEPIECE_NAMES:
        return _names(files)
    return _names(library_files(name)) or "a SentencePiece model"


def library_files(name: str) -> list[str]:
    """Return the files that the library's class names, without those that all classes have."""
    one = tokenization_auto.tokenizer_class_from_name(f"{name}Tokenizer")
    common = ("tokenizer.json", "tokenizer_config.json", "normalizer.json")
    return [file for file in one.vocab_files_names.values() if file not in common]


def _table(*titles: str) -> str:
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
