"""The formats in which families of models mark reasoning and tool calls in their replies.

`triptych.service.chat.template_probe` finds the format that a chat template writes; a setting overrides it. A family
whose calls differ only in the texts around them is a row here, which `MarkedCalls` parses. If no row fits a template,
its syntax is read from what it renders.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from triptych.service.chat import call_parsers
from triptych.service.chat.call_parsers import DEEPSEEK_MARKS, CallParser
from triptych.service.chat.call_texts import pythonic
from triptych.service.chat.chat_template import (
    ID,
    INDEX,
    KIND,
    ArgumentSyntax,
    CallIds,
    CallSyntax,
    ChatTemplate,
    ReasoningMarks,
    TemplateTraits,
)
from triptych.service.chat.marked_calls import MarkedCalls
from triptych.service.chat.parts import call_id

AUTO, NONE = "auto", "none"
_JSON_TRAITS = TemplateTraits(tool_format="json")
OWN = "template"  # name of a format that was read from a template


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    models: str  # models of this format, for the docs
    syntax: CallSyntax
    parser: CallParser | None = None  # None: made from the syntax
    more_marks: tuple[str, ...] = ()  # further texts that may be special tokens
    ends: tuple[str, ...] = ()  # special tokens that end a reply with calls
    ids: CallIds = CallIds.ANY
    shown_by: str = ""  # text of a template that asks for this format but drops calls of earlier turns
    held_parser: CallParser | None = (
        None  # parser under a grammar, if `parser` accepts more than the grammar constrains
    )
    frames_content: bool = False  # replies without calls have marks too

    @property
    def parse(self) -> CallParser:
        return self.parser or _marked(self.syntax, is_held=False)

    @property
    def held_parse(self) -> CallParser:
        """The parser of replies that a grammar constrains."""
        return self.held_parser or self.parser or _marked(self.syntax, is_held=True)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that may be special tokens, which decoding must then keep."""
        return tuple(dict.fromkeys((*self.syntax.marks, *self.more_marks)))


@lru_cache(maxsize=256)
def _marked(syntax: CallSyntax, *, is_held: bool) -> CallParser:
    return MarkedCalls(syntax, is_held=is_held)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning, which begins a reply."""

    name: str
    opening: str
    closing: str
    channels: tuple[str, ...] = ()  # marks of all parts of a reply, if reasoning is one of several channels

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that may be special tokens, which decoding must then keep, also in replies without tools."""
        return self.channels or (self.opening.strip(), self.closing)


_TAG = CallSyntax(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
)
_FUNCTION = CallSyntax(
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    arguments=call_parsers.PARAMETERS,
)
_PAIRS = CallSyntax(
    "<tool_call>",
    "\n",
    "</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    arguments=ArgumentSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_INVOKE = CallSyntax(
    '<invoke name="',
    '">\n',
    "</invoke>",
    opening="<minimax:tool_call>\n",
    separator="\n",
    closing="\n</minimax:tool_call>",
    trigger="<minimax:tool_call>",
    arguments=ArgumentSyntax('<parameter name="', '">', "</parameter>\n"),
)
_DSML = CallSyntax(
    '<\uff5cDSML\uff5cinvoke name="',
    '">\n',
    "</\uff5cDSML\uff5cinvoke>",
    opening="<\uff5cDSML\uff5cfunction_calls>\n",
    separator="\n",
    closing="\n</\uff5cDSML\uff5cfunction_calls>",
    trigger="<\uff5cDSML\uff5cfunction_calls>",
    arguments=ArgumentSyntax(
        '<\uff5cDSML\uff5cparameter name="',
        f'" string="{KIND}">',
        "</\uff5cDSML\uff5cparameter>\n",
        text_kind="true",
        other_kinds=("false",),
    ),
)
_PYTHON = ArgumentSyntax("", "=", "", separator=", ", quotes=None)
_JSON_ARRAY = CallSyntax('{"name": "', '", "arguments": ', "}", opening="[", separator=", ", closing="]")
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_OPENING, _CLOSING, _BEGIN, _END, _SEPARATOR = DEEPSEEK_MARKS
_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")


def _gemma(begin: str, end: str, quote: str) -> CallSyntax:
    strings = ArgumentSyntax("", ":", "", separator=",", quotes=(quote, quote))
    return CallSyntax(f"{begin}call:", "{", f"}}{end}", trigger=begin, arguments=strings)


TOOL_FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", "Hermes 2 and later, Qwen 2.5, Qwen 3, Granite 4", _TAG, call_parsers.hermes),
        ToolFormat(
            *("qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3", _FUNCTION, call_parsers.qwen3_coder),
            held_parser=MarkedCalls(_FUNCTION, is_held=True),
        ),
        ToolFormat(
            "llama3",
            "Llama 3.1 to 3.3",
            CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
            call_parsers.bare_json,
            ("<|python_tag|>",),
            ("<|eom_id|>",),
        ),
        ToolFormat(
            "mistral",
            "Mistral 7B v0.3, Nemo, Large",
            CallSyntax(
                *('{"name": "', '", "arguments": ', "}"),
                opening="[TOOL_CALLS][",
                separator=", ",
                closing="]",
                trigger="[TOOL_CALLS]",
            ),
            call_parsers.mistral,
            _MISTRAL_MARKS,
            ids=CallIds.SHORT,
        ),
        ToolFormat(
            "mistral_args",
            "Devstral, Magistral, Ministral 3",
            CallSyntax("[TOOL_CALLS]", "[ARGS]", "", trigger="[TOOL_CALLS]"),
            call_parsers.mistral,
            _MISTRAL_MARKS,
            ids=CallIds.SHORT,
        ),
        ToolFormat(
            "mistral_ids",
            "Mistral Small 3.2",
            CallSyntax("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", "", trigger="[TOOL_CALLS]"),
            call_parsers.mistral,
            _MISTRAL_MARKS,
            ids=CallIds.SHORT,
        ),
        ToolFormat(
            "gemma",
            "Gemma 4",
            _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
            call_parsers.gemma,
            ('<|"|>',),
            ("<|tool_response>",),
        ),
        ToolFormat(
            "functiongemma",
            "FunctionGemma",
            _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
            call_parsers.gemma,
            ("<escape>",),
            ("<start_function_response>",),
        ),
        ToolFormat(
            "harmony",
            "gpt-oss",
            CallSyntax("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", one=True),
            call_parsers.harmony,
            _HARMONY_MARKS,
            ("<|call|>",),
        ),
        ToolFormat(
            "deepseek_v3",
            "DeepSeek V3, R1",
            CallSyntax(
                f"{_BEGIN}function{_SEPARATOR}",
                "\n```json\n",
                f"\n```{_END}",
                opening=_OPENING,
                separator="\n",
                closing=_CLOSING,
                trigger=_OPENING,
            ),
            call_parsers.deepseek,
        ),
        ToolFormat(
            "deepseek_v31",
            "DeepSeek V3.1",
            CallSyntax(_BEGIN, _SEPARATOR, _END, opening=_OPENING, closing=_CLOSING, trigger=_OPENING),
            call_parsers.deepseek,
        ),
        ToolFormat("deepseek_v32", "DeepSeek V3.2", _DSML),
        ToolFormat("glm", "GLM 4.5 to 5", _PAIRS),
        ToolFormat("minimax_m2", "MiniMax M2", _INVOKE),
        ToolFormat(
            "kimi_k2",
            "Kimi K2",
            CallSyntax(
                "<|tool_call_begin|>functions.",
                f":{INDEX}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                opening="<|tool_calls_section_begin|>",
                closing="<|tool_calls_section_end|>",
                trigger="<|tool_calls_section_begin|>",
            ),
        ),
        ToolFormat(
            "command_r",
            "Command R7B, Command A",
            CallSyntax(
                f'{{"tool_call_id": "{INDEX}", "tool_name": "',
                '", "parameters": ',
                "}",
                opening="<|START_ACTION|>[\n    ",
                separator=",\n    ",
                closing="\n]<|END_ACTION|>",
                trigger="<|START_ACTION|>",
            ),
        ),
        ToolFormat(
            "granite",
            "Granite 3",
            CallSyntax(
                *('{"name": "', '", "arguments": ', "}"),
                opening="<|tool_call|>[",
                separator=", ",
                closing="]",
                trigger="<|tool_call|>",
            ),
            parser=call_parsers.granite,
            shown_by="<|tool_call|>",
        ),
        ToolFormat(
            "functionary_v31",
            "functionary 3.1",
            CallSyntax("<function=", ">", "</function>", trigger="<function="),
            ends=("<|eom_id|>",),
        ),
        ToolFormat(
            "functionary_v32",
            "functionary 3.2",
            CallSyntax("", "\n", "", separator=">>>", content="all\n"),
            call_parsers.functionary,
            frames_content=True,
        ),
        ToolFormat(
            "lfm2",
            "LFM2",
            CallSyntax(
                *("", "(", ")"),
                opening="<|tool_call_start|>[",
                separator=", ",
                closing="]<|tool_call_end|>",
                trigger="<|tool_call_start|>",
                arguments=_PYTHON,
            ),
            shown_by="<|tool_list_start|>",
        ),
        ToolFormat(
            "pythonic",
            "Llama 4, where its template says so",
            CallSyntax("", "(", ")", opening="[", separator=", ", closing="]", arguments=_PYTHON),
            pythonic,
        ),
        ToolFormat("json", "others", _JSON_ARRAY, call_parsers.generic, held_parser=call_parsers.bare_json),
    )
}
REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
        ReasoningFormat("harmony", "", "", _HARMONY_MARKS),  # parsed together with its calls
    )
}


def tool_format(traits: TemplateTraits, setting: str = AUTO) -> ToolFormat | None:
    """Return the format of a template's tool calls, or the one that is set; None: calls cannot be parsed."""
    if setting != AUTO:
        return TOOL_FORMATS[setting]
    if traits.call_syntax is not None:
        return own_format(traits.call_syntax, traits.call_ends)
    return TOOL_FORMATS[traits.tool_format] if traits.tool_format else None


def calls_of(chat: ChatTemplate, setting: str = AUTO) -> ToolFormat | None:
    """Return the format of calls for a template, JSON if it reads no tools: then messages describe them."""
    return tool_format(chat.traits if chat.reads("tools") else _JSON_TRAITS, setting)


@lru_cache(maxsize=256)
def own_format(syntax: CallSyntax, ends: tuple[str, ...]) -> ToolFormat:
    """Return the tool format of a template with a syntax of its own."""
    return ToolFormat(OWN, "", syntax, ends=ends)


def reasoning_format(traits: TemplateTraits, setting: str = AUTO) -> ReasoningFormat | None:
    """Return the format of a template's reasoning, or the one that is set; None: reasoning stays in the content."""
    if setting != AUTO:
        return REASONING_FORMATS.get(setting)
    if traits.reasoning_marks is not None:
        return own_reasoning(traits.reasoning_marks)
    return REASONING_FORMATS.get(traits.reasoning_format)


def own_reasoning(marks: ReasoningMarks) -> ReasoningFormat:
    """Return the reasoning format of a template with marks of its own."""
    return ReasoningFormat(OWN, marks.opening, marks.closing)


def id_maker(ids: CallIds) -> Callable[[], str]:
    """Return the function that makes call ids; Mistral's templates accept only nine letters and digits."""
    return (lambda: secrets.token_hex(5)[:9]) if ids is CallIds.SHORT else call_id


def fitting_id(ids: CallIds, id: str) -> str:
    """Return a call's id in the form that the template accepts; the same id always gives the same result."""
    if ids is not CallIds.SHORT or (len(id) == 9 and id.isalnum()):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]
