"""The supported model families. Each is a table: how to read its config.json, and its tensors' names. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.not_served import NOT_SERVED
from triptych.model.families.table.blamed_keys import MissingKeyError, WrongKindError, blamed_keys, names_a_key
from triptych.model.families.table.known_keys import known_keys
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family
from triptych.model.families.table.text_part import check_architecture, text_part
from triptych.model.families.table.token_rules import generation_rules
from triptych.model.families.wholes import WHOLES


def _found() -> dict[str, Family]:
    """Return the families of this folder's modules by `model_type`; each module that has any declares `FAMILIES`."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__):
        tables: dict[str, Family] = getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", {})
        if twice := found.keys() & tables.keys():
            raise ImportError(f"{module.name}: {', '.join(sorted(twice))} is another module's too")
        found |= tables
    return found


FAMILIES = _found()


def _own_type(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a `model_type` of their own: jina-embeddings-v3 calls itself XLM-RoBERTa."""
    if raw.get("model_type") == "xlm-roberta" and raw.get("position_embedding_type") == "rotary":
        return raw | {"model_type": "jina_embeddings_v3"}
    return raw


@cache
def _family(model_type: str, text_type: str | None) -> Family | None:
    """Return the table of a type; None: there is none. `text_type` is of the language model, where it is a part."""
    if model_type not in WHOLES:
        return FAMILIES.get(model_type)
    kind = text_type or WHOLES[model_type].text
    return text_part(WHOLES[model_type], kind, FAMILIES[kind]) if kind in FAMILIES else None


def family_for(config: ModelConfig) -> Family:
    """Return the table that a configuration was made by."""
    family = _family(config.model_type, config.text_type)
    assert family is not None, config.model_type
    return family


def find_family(raw: dict[str, Any]) -> Family | None:
    """Return the table for a raw config.json; None for a `model_type` that is not served."""
    try:
        return family_of(raw)
    except ConfigError:
        return None


def family_of(raw: dict[str, Any]) -> Family:
    """Return the table for a raw config.json; raises `ConfigError` for a `model_type` that is not served."""
    raw = _own_type(raw)
    model_type, where, text_type = raw.get("model_type"), "model_type", None
    if isinstance(model_type, str) and model_type in WHOLES:
        text_type = WHOLES[model_type].text_type(raw)
    family = _family(model_type, text_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    if text_type is not None:
        model_type, where = text_type, f"text_config.model_type of a {model_type},"
    shown = repr(model_type)[:60]
    if (reason := NOT_SERVED.get(str(model_type))) is not None:
        raise ConfigError(f"config.json: {where} {shown} is not served: {reason}")
    near = ", ".join(get_close_matches(str(model_type), [*FAMILIES, *WHOLES]))
    raise ConfigError(
        f"config.json: {where} {shown} is none of the {len(FAMILIES) + len(WHOLES)} types that are served"
        + (f"; the nearest are {near}" if near else "")
    )


def config_from_raw(raw: dict[str, Any], names: Collection[str] | None = None, *, strict: bool = False) -> ModelConfig:
    """Build the `ModelConfig` of a raw config.json and, if known, the checkpoint's tensor names.

    `strict` settings are not of the reference's making (GGUF): all of them must be read. Raises `ConfigError` for
    missing and invalid settings, and for those that change results and are not served.
    """
    return read_settings(raw, names, strict=strict)[0]


def read_settings(
    raw: dict[str, Any], names: Collection[str] | None = None, *, strict: bool = False
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Build the `ModelConfig` as `config_from_raw`, and name the keys that are ignored, as the reference does."""
    raw = _own_type(raw)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(one, str | None) for one in architectures):
        raise ConfigError(f"config.json: architectures must be a list of names, found {shown(architectures)}")
    try:
        return _read(raw, names, strict=strict)
    except ConfigError as error:
        message, is_vague = str(error), isinstance(error, WrongKindError)
        if strict or (not is_vague and (message.startswith("config.json") or names_a_key(message, raw))):
            raise
        keys = blamed_keys(raw, message, lambda changed: _read(changed, names, strict=strict))
        if not keys:
            raise
        raise ConfigError(
            f"config.json of a {raw['model_type']} has a value of the wrong kind: {keys}"
            if is_vague
            else f"config.json: {keys}: {message}"
        ) from None


def _read(raw: dict[str, Any], names: Collection[str] | None, *, strict: bool) -> tuple[ModelConfig, tuple[str, ...]]:
    family = family_of(raw)
    known = None if strict else known_keys(raw["model_type"])
    settings = Settings(raw, known, strict=bool(raw.get("auto_map")))
    try:
        config = family.config(settings, None if names is None else {*family.by_rule_name(names, tied=True)})
        if names is not None and not config.is_tied:
            config = family.config(settings, {*family.by_rule_name(names, tied=False)})
        config = replace(config, generation=generation_rules(settings))
        if config.classifier is not None and "pad_token_id" not in raw:  # which tells where a text ends
            default = config.pad_token_id
            config = replace(config, pad_token_id=settings.class_defaults().get("pad_token_id", default))
    except KeyError as error:
        raise MissingKeyError(f"config.json of a {raw['model_type']} lacks {error.args[0]!r}", error.args[0]) from None
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError, AssertionError) as error:
        message = f"has a value of the wrong kind, in or near {settings.last_read}: {str(error)[:200]}"
        raise WrongKindError(f"config.json of a {raw['model_type']} {message}") from None
    check_architecture(raw, config, names)
    if config.decoder is None:
        settings.get("is_causal")  # which only decoders read
    settings.refuse_unread()
    return config, tuple(settings.ignored)
