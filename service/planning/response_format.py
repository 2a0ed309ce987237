"""What a body says its output must be: `response_format`, `regex` or `choice` become a grammar that compiles.

Sizes are bounded before anything is done with them; the grammar is then tried in a process that can be killed
(`service.sandbox.grammar_main`), and what came of it is remembered.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass

from model.text.grammar import GrammarError, choice_grammar, json_grammar, regex_grammar
from service.core.errors import ApiError, invalid, scrub, unavailable
from service.core.model_registry import ServedModel
from service.sandbox.process_pool import Worker, WorkerError, WorkerPool
from service.schemas.bodies import GenerateBody, ResponseFormat
from service.settings.service_settings import Limits

STRUCTURE_FIELDS = ("response_format", "regex", "choice")
SCHEMA_PARAM = "response_format.json_schema.schema"

_WORKERS = 2
_REMEMBERED = 256  # grammars with what came of them
_REMEMBERED_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Structure:
    """A grammar and the field that it stood in."""

    grammar: str
    param: str


def structure_of(body: GenerateBody, limits: Limits) -> Structure | None:
    """The one that `body` asks for; raises `ApiError` for two, for what is too large and for what means nothing."""
    formatted = body.response_format is not None and body.response_format.type != "text"
    given = [name for name in STRUCTURE_FIELDS[1:] if getattr(body, name) is not None]
    given = ["response_format"] * formatted + given
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"{given[1]} and {given[0]} exclude each other", given[1])
    if body.ignore_eos:
        raise invalid(f"ignore_eos has no meaning with {given[0]}, which says where the output ends", "ignore_eos")
    if body.response_format is not None and formatted:
        return _of_format(body.response_format, limits)
    if body.regex is not None:
        return _of_pattern(body.regex, limits)
    return _of_choices(body.choice or [], limits)


def _of_format(asked: ResponseFormat, limits: Limits) -> Structure:
    if asked.type == "json_object":
        if asked.json_schema is not None:
            raise invalid("json_schema has no meaning with type json_object", "response_format.json_schema")
        return Structure(json_grammar({"type": "object"}), "response_format")
    if asked.json_schema is None:
        raise invalid("response_format.json_schema is required", "response_format.json_schema", "missing_field")
    schema = asked.json_schema.schema_
    size = len(json.dumps(schema, separators=(",", ":")))
    if size > limits.max_schema_bytes:
        raise invalid(f"{SCHEMA_PARAM} has {size} bytes, more than {limits.max_schema_bytes}", SCHEMA_PARAM)
    return Structure(json_grammar(schema), SCHEMA_PARAM)


def _of_pattern(pattern: str, limits: Limits) -> Structure:
    if len(pattern) > limits.max_regex_characters:
        raise invalid(f"regex must have at most {limits.max_regex_characters} characters", "regex")
    try:
        return Structure(regex_grammar(pattern), "regex")
    except GrammarError as error:
        raise refused("regex", str(error)) from None


def _of_choices(choices: list[str], limits: Limits) -> Structure:
    if len(choices) > limits.max_choices:
        raise invalid(f"choice has {len(choices)} entries, more than {limits.max_choices}", "choice")
    for index, text in enumerate(choices):
        if len(text) > limits.max_choice_characters:
            param = f"choice[{index}]"
            raise invalid(f"{param} must have at most {limits.max_choice_characters} characters", param)
    return Structure(choice_grammar(choices), "choice")


class GrammarTrials:
    """Tries grammars before they are accepted; the same one once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = WorkerPool(lambda: _worker(limits.grammar_s), limits.grammar_s, _WORKERS, "triptych-grammar")
        self._known: OrderedDict[str, str] = OrderedDict()  # why it was refused, empty where it was not

    async def check(self, structure: Structure, served: ServedModel) -> None:
        """Raise an `ApiError` that names the field where no output can be held to it."""
        served.require_tokenizer(structure.param)
        grammar = structure.grammar
        if grammar not in self._known:
            self._remember(grammar, await self._try(grammar, structure.param))
        self._known.move_to_end(grammar)
        if self._known[grammar]:
            raise refused(structure.param, self._known[grammar])

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    async def _try(self, grammar: str, param: str) -> str:
        try:
            await self._pool.run(lambda worker: worker.ask({"grammar": grammar}))
        except WorkerError as error:
            if error.kind == "busy":
                raise _busy() from None
            if error.kind == "start":
                raise unavailable("no process that compiles grammars starts", "grammar_worker") from None
            if error.kind == "time":  # by another clock, under another load, it may do
                raise refused(param, f"it takes more than {self._limits.grammar_s:g} s to compile") from None
            return "it takes too much memory to compile" if error.kind == "crashed" else str(error)
        return ""

    def _remember(self, grammar: str, refusal: str) -> None:
        self._known[grammar] = refusal
        size = sum(map(len, self._known))
        while len(self._known) > 1 and (len(self._known) > _REMEMBERED or size > _REMEMBERED_CHARACTERS):
            oldest, _ = self._known.popitem(last=False)
            size -= len(oldest)


def refused(param: str, reason: str) -> ApiError:
    """For a grammar that is none, and for an output that could not go on although it is one."""
    return invalid(f"{param} cannot be followed: {scrub(reason)}", param, "invalid_grammar")


def _busy() -> ApiError:
    return ApiError(
        429,
        "too many grammars are being compiled; try again after the time in Retry-After",
        type="overloaded_error",
        code="queue_full",
        headers={"Retry-After": "1"},
        reason="grammars",
    )


def _worker(seconds: float) -> Worker:
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return Worker(seconds, [sys.executable, "-m", "service.sandbox.grammar_main"], environment)
