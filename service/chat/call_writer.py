"""Writes calls as text, as a model of a format would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.core.call_syntax import ID, INDEX, KIND, VARYING, ArgumentSyntax, CallSyntax

Calls = Sequence[tuple[str, Mapping[str, Any]]]  # names and arguments


def written_calls(syntax: CallSyntax, calls: Calls) -> str:
    """Return the text of calls, without content before it."""
    texts = (
        _numbered(syntax.before, at)
        + name
        + _numbered(syntax.between, at)
        + _arguments(syntax.arguments, arguments)
        + _numbered(syntax.after, at)
        for at, (name, arguments) in enumerate(calls)
    )
    return _numbered(syntax.opening, 0) + syntax.separator.join(texts) + syntax.closing


def is_written(syntax: CallSyntax, calls: Calls, text: str, *, whole: bool) -> bool:
    """Return whether a text has these calls as the syntax writes them; not `whole`: without the marks around all."""
    calls = calls if whole else calls[:1]
    joined = syntax.separator.join(
        syntax.before + name + syntax.between + _arguments(syntax.arguments, arguments) + syntax.after
        for name, arguments in calls
    )
    pattern = re.escape(syntax.opening + joined + syntax.closing if whole else joined)
    for mark, characters in VARYING.items():
        pattern = pattern.replace(mark, f"{characters}+")
    return re.search(pattern, text) is not None


def _numbered(text: str, at: int) -> str:
    return text.replace(INDEX, str(at)).replace(ID, f"call_{at}")


def _arguments(syntax: ArgumentSyntax | None, arguments: Mapping[str, Any]) -> str:
    if syntax is None:
        return json.dumps(arguments, ensure_ascii=False)
    return syntax.separator.join(_argument(syntax, name, value) for name, value in arguments.items())


def _argument(syntax: ArgumentSyntax, name: str, value: Any) -> str:
    if isinstance(value, str) and syntax.quotes is not None:
        kind, text = syntax.text_kind, value.join(syntax.quotes)
    else:
        kind, text = next(iter(syntax.other_kinds), ""), json.dumps(value, ensure_ascii=False)
    return syntax.before + name + syntax.between.replace(KIND, kind) + text + syntax.after
