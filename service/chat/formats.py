"""How families mark reasoning and tool calls in their replies, and which of these a chat template stands for.

A format is chosen by the marks that the chat template itself writes for the messages of a conversation; a setting
overrides the choice.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from service.chat import call_parsers
from service.chat.call_parsers import DEEPSEEK_MARKS, CallParser
from service.chat.parts import call_id

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts around calls, as a grammar writes them.

    They are `opening`, then `before` NAME `between` ARGUMENTS `after` with `separator` between several, then `closing`.
    `trigger` is what begins calls behind content; empty: calls are a whole reply.
    """

    before: str
    between: str
    after: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    one: bool = False  # a reply ends with its first call


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    parse: CallParser
    syntax: CallSyntax
    marks: tuple[str, ...] = ()  # which may be special tokens, and must be shown then
    ends: tuple[str, ...] = ()  # special tokens that end a reply with calls
    has_short_ids: bool = False
    held_parse: CallParser | None = None  # under a grammar, which does not hold all that `parse` takes for a call


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning, which comes first."""

    name: str
    opening: str
    closing: str
    channels: tuple[str, ...] = ()  # marks of all parts of a reply, where reasoning is one of them

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts which may be special tokens, and must be shown then, also in replies without tools."""
        return self.channels or (self.opening.strip(), self.closing)


_TAG = CallSyntax(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
)
_ARRAY = CallSyntax('{"name": "', '", "arguments": ', "}", opening="[", separator=", ", closing="]")
_HERMES = ToolFormat("hermes", call_parsers.hermes, _TAG, ("<tool_call>", "</tool_call>"))
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_OPENING, _CLOSING, _BEGIN, _END, _SEPARATOR = DEEPSEEK_MARKS
_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")

TOOL_FORMATS = {
    one.name: one
    for one in (
        _HERMES,
        ToolFormat("qwen3_coder", call_parsers.qwen3_coder, _TAG, _HERMES.marks, held_parse=call_parsers.hermes),
        ToolFormat(
            "llama3",
            call_parsers.bare_json,
            CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
            ("<|python_tag|>",),
            ("<|eom_id|>",),
        ),
        ToolFormat(
            "mistral",
            call_parsers.mistral,
            CallSyntax(
                *('{"name": "', '", "arguments": ', "}"),
                opening="[TOOL_CALLS][",
                separator=", ",
                closing="]",
                trigger="[TOOL_CALLS]",
            ),
            _MISTRAL_MARKS,
            has_short_ids=True,
        ),
        ToolFormat(
            "mistral_args",
            call_parsers.mistral,
            CallSyntax("[TOOL_CALLS]", "[ARGS]", "", trigger="[TOOL_CALLS]"),
            _MISTRAL_MARKS,
            has_short_ids=True,
        ),
        ToolFormat(
            "gemma",
            call_parsers.gemma,
            CallSyntax("<|tool_call>call:", "", "<tool_call|>", trigger="<|tool_call>"),
            ("<|tool_call>", "<tool_call|>", '<|"|>'),
        ),
        ToolFormat(
            "functiongemma",
            call_parsers.gemma,
            CallSyntax("<start_function_call>call:", "", "<end_function_call>", trigger="<start_function_call>"),
            ("<start_function_call>", "<end_function_call>", "<escape>"),
            ("<start_function_response>",),
        ),
        ToolFormat(
            "harmony",
            call_parsers.harmony,
            CallSyntax("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", one=True),
            _HARMONY_MARKS,
            ("<|call|>",),
        ),
        ToolFormat(
            "deepseek_v3",
            call_parsers.deepseek,
            CallSyntax(
                f"{_BEGIN}function{_SEPARATOR}",
                "\n```json\n",
                f"\n```{_END}",
                opening=_OPENING,
                separator="\n",
                closing=_CLOSING,
                trigger=_OPENING,
            ),
            DEEPSEEK_MARKS,
        ),
        ToolFormat(
            "deepseek_v31",
            call_parsers.deepseek,
            CallSyntax(
                _BEGIN,
                _SEPARATOR,
                _END,
                opening=_OPENING,
                closing=_CLOSING,
                trigger=_OPENING,
            ),
            DEEPSEEK_MARKS,
        ),
        ToolFormat("json", call_parsers.generic, _ARRAY, held_parse=call_parsers.bare_json),
    )
}
REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
        ReasoningFormat("harmony", "", "", _HARMONY_MARKS),  # which are parsed with its calls
    )
}
# The first of these that a template has tells its format.
_TOOL_MARKS = (
    ("to=functions.", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "functiongemma"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    (_SEPARATOR, "deepseek_v31"),
    ("<|python_tag|>", "llama3"),
    ('"parameters":', "llama3"),
)
_REASONING_MARKS = (
    ("<|channel|>analysis", "harmony"),
    ("</seed:think>", "seed"),
    ("</think>", "think"),
    ("[/THINK]", "mistral"),
    ("<|channel>thought", "gemma"),
)


@lru_cache(maxsize=256)
def tool_format(template: str, setting: str = AUTO) -> ToolFormat:
    """Return the format of tool calls for a chat template, or the one that is set."""
    if setting != AUTO:
        return TOOL_FORMATS[setting]
    name = next((name for mark, name in _TOOL_MARKS if mark in template), "json")
    if name == "deepseek_v31" and "```json" in template:
        name = "deepseek_v3"
    return TOOL_FORMATS[name]


@lru_cache(maxsize=256)
def reasoning_format(template: str, setting: str = AUTO) -> ReasoningFormat | None:
    """Return the format of reasoning for a chat template, or the one that is set; None: no reasoning is parted."""
    if setting != AUTO:
        return REASONING_FORMATS.get(setting)
    name = next((name for mark, name in _REASONING_MARKS if mark in template), None)
    return None if name is None else REASONING_FORMATS[name]


def id_maker(format: ToolFormat) -> Callable[[], str]:
    """Return what makes ids of calls; Mistral's templates take only nine letters and digits."""
    return (lambda: secrets.token_hex(5)[:9]) if format.has_short_ids else call_id


def fitting_id(format: ToolFormat, id: str) -> str:
    """Return a call's id as the format's templates take it: the same, or for Mistral's the same short one each time."""
    if not format.has_short_ids or (len(id) == 9 and id.isalnum()):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]
