"""The process that renders chat templates: `python -m triptych.service.chat.render_main`.

A template is a program. Neither Jinja's sandbox nor a tracing function limits its cost: one operation such as
`9**9**9` or `'x' * 10**10` does not return to the interpreter. So it runs in a process that
`triptych.service.sandbox.worker_main` confines and the kernel kills at the time limit. Templates are compiled here too,
because the compiler evaluates constants. The process serves many requests, because compiling takes longer than
rendering.

A request `{template, variables, limit, seconds}` gets one reply, `{"text"}` or `{"error", "message"}`. Without
`variables` the reply is `{"names"}`: the variables that the template reads and does not define.
"""

from __future__ import annotations

import codecs
import importlib
import json
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from triptych.service.sandbox import worker_main

_MEMORY = 512 << 20
_MESSAGE = 300


class _Raised(TemplateError):
    """An error that the template itself raises by `raise_exception`."""


class _Generation(Extension):
    """The block `{% generation %}...{% endgeneration %}`, which marks assistant messages and renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dictionaries:
    """The function `dict(...)` of templates and its `fromkeys`, which do not expose the type."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """The function `namespace` of templates, which refuses names with a leading underscore."""

    def __init__(*args: Any, **named: Any) -> None:
        for name in dict(*args[1:], **named):
            _refuse_underscore(name)
        Namespace.__init__(*args, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("names of a namespace must not begin with an underscore")


def _raise(message: str) -> None:
    raise _Raised(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return plain JSON, as templates expect; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the settings and functions of `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dictionaries(),
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _rendered(source: str, variables: dict[str, Any], limit: int) -> dict[str, Any]:
    pieces, size = [], 0
    for piece in _compiled(source).generate(variables):
        size += len(piece)
        if size > limit:
            return {"error": "length", "message": f"more than {limit} characters"}
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # raises for half of a surrogate pair
    return {"text": text}


def _names(source: str) -> dict[str, Any]:
    return {"names": sorted(find_undeclared_variables(_environment().parse(source)))}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the text or the names, or an `error`: raised, syntax, failed, memory or length."""
    source = request["template"]
    try:
        if "variables" not in request:
            return _names(source)
        return _rendered(source, request["variables"], request["limit"])
    except _Raised as error:
        return {"error": "raised", "message": str(error)[:_MESSAGE]}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"[:_MESSAGE]}
    except MemoryError:
        return {"error": "memory", "message": f"more than {_MEMORY >> 20} MiB"}
    except Exception as error:
        return {"error": "failed", "message": type(error).__name__}


def _load_all() -> None:
    """Import what Jinja and the clock import on first use, because no file can be opened later."""
    for module in ("html", "jinja2.debug", "pprint", "textwrap", "urllib.parse"):
        importlib.import_module(module)
    for encoding in ("unicode_escape", "ascii", "latin-1", "utf-16", "utf-32", "idna"):
        codecs.lookup(encoding)
    time.tzset()
    _now("%c")


def main() -> None:
    """Answer requests until the service closes the connection."""
    _load_all()
    worker_main.serve(lambda request, _: (answer(request), b""), _MEMORY)


if __name__ == "__main__":
    main()
