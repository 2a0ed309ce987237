"""Tells a model which languages to translate between. How depends on the model.

| models | languages are given by |
|---|---|
| NLLB, mBART-50, M2M-100, mBART | the tokens of both languages, which their tokenizers list |
| T5 | a task `translation_SOURCE_to_TARGET` of config.json, whose prefix is put before the text |
| MADLAD-400 | `<2TARGET>` before the text |
| Marian with several targets | `>>TARGET<<` before the text |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.service.core.errors import ApiError, invalid, listed, shorten
from triptych.service.core.models import ServedModel

_MARKS = ("<2{}>", ">>{}<<")  # marks of a target language: MADLAD's, Marian's
_THREE = {"en": "eng_", "fr": "fra_"}
_PAIR = ("translation_", "_to_")


class Translation(NamedTuple):
    """The fields of a body of /generate that choose the languages, and the prefix of each text."""

    source_language: str | None = None
    target_language: str | None = None
    task: str | None = None
    prefix: str = ""


def translation(served: ServedModel, source: str | None, target: str | None) -> Translation:
    """Return the fields that make a model translate from `source` to `target`; None stands for its default.

    Raises a 400 that names `source_language` or `target_language` for a language that the model does not have.
    """
    languages = served.require_tokenizer("prompt").source_languages
    if languages is not None:
        return Translation(source, target)  # the planner checks them
    if source is None and target is None:
        return Translation(task="translation" if "translation" in served.checkpoint.tasks else None)
    pairs = _pairs(served)
    if pairs:
        return Translation(task=pairs[_known_pair(served, pairs, source, target)])
    return _marked(served, source, target)


def languages_to_try(served: ServedModel) -> dict[str, str] | None:
    """Return fields of /generate that choose languages which a translator has; None for a model that does not tell.

    A model with one pair of languages needs no fields.
    """
    tokenizer = served.tokenizer
    if tokenizer is not None and tokenizer.source_languages is not None:
        codes = tokenizer.source_languages.codes
        source, target = (_code_of(codes, language) for language in ("en", "fr"))
        return {"source_language": source or codes[0], "target_language": target or codes[-1]}
    if pairs := _pairs(served):
        return {"task": pairs.get(("en", "fr")) or next(iter(pairs.values()))}
    one_pair = tokenizer is not None and tokenizer.pair_of_languages is not None
    return {} if one_pair or "translation" in served.checkpoint.tasks else None


def _code_of(codes: Sequence[str], language: str) -> str | None:
    """Return the code of a language: `fr`, `fr_XX`, `fra_Latn`."""
    begins = (f"{language}_", _THREE[language])
    return next((code for code in codes if code == language or code.startswith(begins)), None)


def _pairs(served: ServedModel) -> dict[tuple[str, str], str]:
    """Return the translation tasks of config.json (T5) by their languages."""
    found = {}
    start, middle = _PAIR
    for name in served.checkpoint.tasks:
        if name.startswith(start) and name.count(middle) == 1:
            source, target = name.removeprefix(start).split(middle)
            found[source, target] = name
    return found


def _known_pair(
    served: ServedModel, pairs: dict[tuple[str, str], str], source: str | None, target: str | None
) -> tuple[str, str]:
    known = listed(f"{one} to {other}" for one, other in pairs)
    sources = {one for one, _ in pairs}
    if source is None and len(sources) == 1:
        [source] = sources
    if source is None or source not in sources:
        raise _unknown("source_language", served, source, known)
    if target is None or (source, target) not in pairs:
        raise _unknown("target_language", served, target, known)
    return source, target


def _marked(served: ServedModel, source: str | None, target: str | None) -> Translation:
    """Return the prefix that marks the target, or none for a model of a single pair of languages."""
    tokenizer = served.require_tokenizer("prompt")
    own = tokenizer.pair_of_languages
    for form in _MARKS:
        if target is not None and tokenizer.token_id(form.format(target)) is not None:
            if source is not None and own is not None and source != own[0]:
                raise _unknown("source_language", served, source, own[0])
            if source is not None and form == _MARKS[0] and tokenizer.token_id(form.format(source)) is None:
                raise _unknown("source_language", served, source, "those that it writes, as <2de>")
            return Translation(prefix=f"{form.format(target)} ")
    if own is None:
        field = "target_language" if target is not None else "source_language"
        raise invalid(f"{field}: model {served.name} does not tell languages apart; leave it out", field)
    for field, given, expected in zip(("source_language", "target_language"), (source, target), own, strict=True):
        if given is not None and given != expected:
            raise _unknown(field, served, given, f"{own[0]} to {own[1]}")
    return Translation()


def _unknown(field: str, served: ServedModel, found: str | None, known: str) -> ApiError:
    if found is None:
        return invalid(f"{field} is required: model {served.name} has {known}", field, "missing_field")
    return invalid(f"{field}: model {served.name} has no language {shorten(found)}; it has {known}", field)
