"""Output constraints: turns `response_format`, `regex`, `choice` or `grammar` of a body into a grammar that compiles.

Sizes are checked first. The grammar is then compiled in a process that can be killed
(`triptych.service.sandbox.grammar_main`). Whether that succeeds is cached.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core

from triptych.model.errors import GrammarError
from triptych.model.text.grammar import choice_grammar, json_grammar, regex_grammar, written_grammar
from triptych.service.core.errors import ApiError, invalid, try_again, unavailable
from triptych.service.core.models import ServedModel
from triptych.service.sandbox.process_pool import ForkingWorker, WorkerError, WorkerPool
from triptych.service.schemas.bodies import GenerateBody, ResponseFormat
from triptych.service.settings.service_settings import Limits

CONSTRAINT_FIELDS = ("response_format", "regex", "choice", "grammar")
SCHEMA_PARAM = "response_format.json_schema.schema"

_WORKERS = 2
_MAX_REASON = 480  # characters
_MAX_CACHED = 256  # grammars
_MAX_CACHED_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A grammar, and the name of its field.

    `parts` are the constraints that it combines; an error names the first one that cannot be used.
    """

    grammar: str
    param: str
    parts: tuple[OutputConstraint, ...] = ()

    @property
    def field(self) -> str:
        """The name of the field of the body, without the path inside it."""
        return self.param.partition(".")[0].partition("[")[0]


Constrain = Callable[[OutputConstraint | None], OutputConstraint | None]


def constraint_of(body: GenerateBody, limits: Limits) -> OutputConstraint | None:
    """Return the constraint of a body, None if it has none; raises `ApiError` for two, or for a large one."""
    formatted = body.response_format is not None and body.response_format.type != "text"
    given = [name for name in CONSTRAINT_FIELDS[1:] if getattr(body, name) is not None]
    given = ["response_format"] * formatted + given
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"{given[1]} and {given[0]} exclude each other", given[1])
    if body.response_format is not None and formatted:
        return _from_format(body.response_format, limits)
    if body.regex is not None:
        return _from_pattern(body.regex, limits)
    if body.grammar is not None:
        return _from_grammar(body.grammar, limits)
    return _from_choices(body.choice or [], limits)


def check_schema(schema: Mapping[str, Any], param: str, limits: Limits) -> None:
    """Raise an `ApiError` that names `param` for a JSON schema that is too large."""
    size = len(pydantic_core.to_json(schema, inf_nan_mode="constants"))
    if size > limits.max_schema_bytes:
        raise invalid(f"{param} has {size} bytes, more than {limits.max_schema_bytes}", param)


def _from_format(given: ResponseFormat, limits: Limits) -> OutputConstraint:
    if given.type == "json_object":
        if given.json_schema is not None:
            raise invalid("json_schema has no meaning with type json_object", "response_format.json_schema")
        return OutputConstraint(json_grammar({"type": "object"}), "response_format")
    if given.json_schema is None:
        raise invalid("response_format.json_schema is required", "response_format.json_schema", "missing_field")
    schema = given.json_schema.schema_
    check_schema(schema, SCHEMA_PARAM, limits)
    return schema_constraint(schema, SCHEMA_PARAM)


def schema_constraint(schema: Mapping[str, Any], param: str) -> OutputConstraint:
    """Return the constraint of a JSON schema; raises an `ApiError` that names `param` if it is not supported."""
    try:
        return OutputConstraint(json_grammar(schema), param)
    except GrammarError as error:
        raise invalid_grammar(param, str(error)) from None


def _from_pattern(pattern: str, limits: Limits) -> OutputConstraint:
    if len(pattern) > limits.max_regex_characters:
        raise invalid(f"regex must have at most {limits.max_regex_characters} characters", "regex")
    try:
        return OutputConstraint(regex_grammar(pattern), "regex")
    except GrammarError as error:
        raise invalid_grammar("regex", str(error)) from None


def _from_grammar(grammar: str, limits: Limits) -> OutputConstraint:
    size = len(grammar.encode())
    if size > limits.max_schema_bytes:
        raise invalid(f"grammar has {size} bytes, more than {limits.max_schema_bytes}", "grammar")
    try:
        return OutputConstraint(written_grammar(grammar), "grammar")
    except GrammarError as error:
        raise invalid_grammar("grammar", str(error)) from None


def _from_choices(choices: list[str], limits: Limits) -> OutputConstraint:
    if len(choices) > limits.max_choices:
        raise invalid(f"choice has {len(choices)} entries, more than {limits.max_choices}", "choice")
    for index, text in enumerate(choices):
        if len(text) > limits.max_choice_characters:
            param = f"choice[{index}]"
            raise invalid(f"{param} must have at most {limits.max_choice_characters} characters", param)
    return OutputConstraint(choice_grammar(choices), "choice")


class GrammarChecker:
    """Compiles grammars before their requests are accepted, each grammar once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = WorkerPool(lambda: _worker(limits.grammar_s), limits.grammar_s, _WORKERS, "triptych-grammar")
        self._results: OrderedDict[str, str] = OrderedDict()  # reason of the refusal, or empty, by grammar

    async def constraint(self, body: GenerateBody, constrain: Constrain | None) -> OutputConstraint | None:
        """Return the constraint of the output; it is made in a thread, because large schemas take long.

        `constrain` makes the constraint of a dialect's reply from that of the body.
        """

        def found() -> OutputConstraint | None:
            own = constraint_of(body, self._limits)
            return own if constrain is None else constrain(own)

        if constrain is None and all(getattr(body, name) is None for name in CONSTRAINT_FIELDS):
            return None
        return await asyncio.to_thread(found)

    async def check(self, constraint: OutputConstraint, served: ServedModel) -> None:
        """Raise an `ApiError` that names the field if the grammar cannot be used."""
        served.require_tokenizer(constraint.param)
        grammar = constraint.grammar
        if grammar not in self._results:
            self._store(grammar, await self._compile(grammar, constraint.param))
        self._results.move_to_end(grammar)
        if self._results[grammar]:
            await self._check_parts(constraint, served)
            raise invalid_grammar(constraint.param, self._results[grammar])

    async def _check_parts(self, constraint: OutputConstraint, served: ServedModel) -> None:
        """Find the part that cannot be used; search no longer than one grammar may take."""
        end = time.monotonic() + self._limits.grammar_s
        for part in constraint.parts:
            if time.monotonic() > end:
                return
            await self.check(part, served)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    async def _compile(self, grammar: str, param: str) -> str:
        try:
            await self._pool.run(lambda worker: worker.ask({"grammar": grammar}))
        except WorkerError as error:
            if error.kind == "busy":
                raise try_again("too many grammars are being compiled", "grammars", 1) from None
            if error.kind == "start":
                raise unavailable("the process that compiles grammars does not start", "grammar_worker") from None
            if error.kind == "time":  # not cached, because it may succeed under a lower load
                raise invalid_grammar(param, f"it takes more than {self._limits.grammar_s:g} s to compile") from None
            return "it takes too much memory to compile" if error.kind == "crashed" else str(error)
        return ""

    def _store(self, grammar: str, refusal: str) -> None:
        self._results[grammar] = refusal
        size = sum(map(len, self._results))
        while len(self._results) > 1 and (len(self._results) > _MAX_CACHED or size > _MAX_CACHED_CHARACTERS):
            oldest, _ = self._results.popitem(last=False)
            size -= len(oldest)


def invalid_grammar(param: str, reason: str) -> ApiError:
    """Return the error for a grammar that does not compile, or that failed while an output was generated."""
    return invalid(f"{param} cannot be followed: {' '.join(reason.split())[:_MAX_REASON]}", param, "invalid_grammar")


def _worker(seconds: float) -> ForkingWorker:
    return ForkingWorker(seconds, "triptych.service.sandbox.grammar_main")
