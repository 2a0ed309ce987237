"""What a chat template does with messages, as rendering a few conversations shows (`service.chat.template_probe`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from service.core.call_syntax import CallSyntax


class CallIds(StrEnum):
    """The ids of calls that a template takes."""

    ANY = "any"
    SHORT = "short"  # nine letters and digits
    NUMBERED = "numbered"  # functions.NAME:NUMBER, which the template writes in the place of the name


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around reasoning that no known format has."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How to give messages to a template, and how it writes calls and reasoning.

    `tool_format` and `reasoning_format` name formats of `service.chat.formats`. Where none of these fits, `call_syntax`
    and `reasoning_marks` say what the template writes.
    """

    tool_format: str = ""
    call_syntax: CallSyntax | None = None
    call_ends: tuple[str, ...] = ()  # special tokens after calls, where a reply ends
    tools_problem: str = ""  # why no call can be read back; empty: it can, or the template reads no tools
    renders_calls: bool = False  # calls of earlier turns reach the prompt
    text_in_parts: bool = False  # content is a list of parts, of which each has a type
    calls_apart: bool = False  # calls are left out of a message that has content: they go into one of their own
    calls_in_content: bool = False  # the template leaves tool_calls out: calls go into the content
    empty_content: str | None = ""  # the content of a message that has only calls
    has_content_key: bool = True  # False: such a message has no content at all
    text_arguments: bool = False  # arguments of calls are text, not objects
    ids: CallIds = CallIds.ANY
    content_or_reasoning: bool = False  # it refuses a message with calls that has both
    names_results: bool = False  # a tool's result needs the tool's name
    describes: bool = False  # tools and their parameters need descriptions
    reasoning_format: str = ""
    reasoning_marks: ReasoningMarks | None = None
    reasoning_key: str = ""  # under which it reads reasoning, if not as the reference library gives it
    knows_developer: bool = False  # it has a form of its own for the role `developer`
