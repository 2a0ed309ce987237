"""Finds the chat templates of a checkpoint's folder, as the reference library does.

`chat_template.jinja` and `additional_chat_templates/NAME.jinja` take precedence over `chat_template` in
tokenizer_config.json, which is a text, a list of named templates, or an object of templates by name.
`chat_template.json`, of older folders with a processor, comes last. A GGUF file has templates in its metadata; files in
the same folder take precedence over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.folder_kind import lfs_pointer
from triptych.model.checkpoint.json_files import read_json
from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import gguf_path
from triptych.model.system.folder_files import has_file
from triptych.model.text.gguf_tokenizer import gguf_tokenizer_config
from triptych.model.text.special_tokens import NAMES
from triptych.model.text.tokenizer_builder import named_texts
from triptych.model.text.tokenizer_files import Files

TOKENS = NAMES
_MOST_TEMPLATES = 32
_MOST_CHARACTERS = 1_000_000
_MOST_BYTES = 4 * _MOST_CHARACTERS  # of a file: a character takes up to four


class TemplateError(ConfigError):
    """The chat templates of a folder cannot be used; its other files may be valid."""


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """The templates of a folder by name, and the special tokens that they may name (`bos_token` ...)."""

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    def default(self, folder: str) -> str:
        """Return the template for conversations without tools; raises `TemplateError`."""
        found = self.templates.get("default")
        if found is None:
            names = ", ".join(sorted(self.templates))[:200] or "none"
            raise TemplateError(f"{folder}: its named chat templates ({names}) have none called default")
        return found


def template_files(folder: Path, own: Path | None = None) -> TemplateFiles | None:
    """Return the folder's templates, or the one in the file `own`; None if there is none. Raises `TemplateError`."""
    config = read_json(folder / "tokenizer_config.json")
    if (gguf := gguf_path(folder)) is not None:
        config = {**gguf_tokenizer_config(gguf), **config}
    templates = (
        ({} if own is None else {"default": read_template(own)})
        or _jinja_files(folder)
        or _named(folder, "tokenizer_config.json", config.get("chat_template"))
        or _named(folder, "chat_template.json", read_json(folder / "chat_template.json").get("chat_template"))
    )
    if not templates:
        return None
    if len(templates) > _MOST_TEMPLATES or max(map(len, templates.values())) > _MOST_CHARACTERS:
        bounds = f"{_MOST_TEMPLATES} chat templates of {_MOST_CHARACTERS:,} characters"
        raise TemplateError(f"{folder.name}: there are more than {bounds}")
    if gguf is None:
        return TemplateFiles(templates, named_texts(Files(folder)))
    return TemplateFiles(templates, _special_tokens({**read_json(folder / "special_tokens_map.json"), **config}))


def read_template(file: Path) -> str:
    """Return the template in a file, also in one such as tokenizer_config.json; raises `TemplateError`."""
    shown, file = file, file.resolve()  # its folder has a name then
    if file.suffix == ".json" and has_file(file):
        named = _named(file.parent, file.name, read_json(file).get("chat_template"))
        return TemplateFiles(named, {}).default(f"{file.parent.name}: {file.name}")
    if not (text := _text(file.parent, file)):
        raise TemplateError(
            f"{shown}: {'the file is empty' if has_file(file) else 'no such file'}; expected a template"
        )
    return text


def _jinja_files(folder: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if has_file(default := folder / "chat_template.jinja"):
        files["default"] = default
    return {name: _text(folder, file) for name, file in files.items()}


def _text(folder: Path, file: Path) -> str:
    try:
        if not has_file(file):
            return ""
        if file.stat().st_size > _MOST_BYTES:
            raise TemplateError(f"{folder.name}: {file.name} has more than {_MOST_CHARACTERS:,} characters")
        if lfs_pointer(file):
            raise TemplateError(f"{folder.name}: {file.name} is a Git LFS pointer: run `git lfs pull`")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{folder.name}: {file.name} cannot be read as text: {type(error).__name__}") from None


def _named(folder: Path, file: str, value: Any) -> dict[str, str]:
    """Return the templates by name in the value of `chat_template` of a JSON file."""
    kind = type(value).__name__
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        pairs = [(one.get("name"), one.get("template")) for one in value]
        value = dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else None
    if isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return value
    raise TemplateError(
        f"{folder.name}: {file}: chat_template must be a text, a list of objects whose name and template are texts, "
        f"or an object of templates by name; found {kind}"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name: the usual ones, and those that only this tokenizer has (`image_token`)."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {name: text for name, token in named.items() if (text := _token_text(token)) is not None}


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which is stored as text or as an object that describes it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
