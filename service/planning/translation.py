"""How a model is asked to translate from one language to another: by tokens, by a text in front, or by a task.

| models | by |
|---|---|
| NLLB, mBART-50, M2M-100, mBART | the tokens of both languages, which their tokenizers list |
| T5 | a task `translation_SOURCE_to_TARGET` of config.json, whose prefix stands in front of the text |
| MADLAD-400 | `<2TARGET>` in front of the text |
| Marian of several targets | `>>TARGET<<` in front of the text |
"""

from __future__ import annotations

from typing import NamedTuple

from service.core.errors import ApiError, invalid, listed, shorten
from service.core.models import ServedModel

_MARKS = ("<2{}>", ">>{}<<")  # MADLAD's and Marian's
_PAIR = ("translation_", "_to_")


class Translation(NamedTuple):
    """The fields of a body of /generate that choose the languages, and what stands in front of each text."""

    source_language: str | None = None
    target_language: str | None = None
    task: str | None = None
    prefix: str = ""


def translation(served: ServedModel, source: str | None, target: str | None) -> Translation:
    """Return how a model translates from `source` to `target`, None for what its folder says.

    Raises a 400 that names `source_language` or `target_language` for languages that the model does not have.
    """
    languages = served.require_tokenizer("prompt").source_languages
    if languages is not None:
        return Translation(source, target)  # which the planner checks
    if source is None and target is None:
        return Translation(task="translation" if "translation" in served.checkpoint.tasks else None)
    pairs = _pairs(served)
    if pairs:
        return Translation(task=pairs[_known_pair(served, pairs, source, target)])
    return _marked(served, source, target)


def _pairs(served: ServedModel) -> dict[tuple[str, str], str]:
    """Return the tasks of T5's kind, by their languages."""
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
    """Return the mark of the target in front of a text, of a model that has such marks."""
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
