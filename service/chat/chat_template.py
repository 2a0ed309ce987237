"""Chat templates of checkpoints, which turn a conversation into a prompt.

A template comes only from the checkpoint's folder (`triptych.service.chat.template_files`). A request can set tools,
`add_generation_prompt`, `continue_final_message`, and the template's own variables. Templates are rendered in a
process that can be killed (`triptych.service.chat.render_main`). Loading a model renders its template first, as a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from triptych.service.chat.render_pool import RenderError, RenderPool, RenderWorker
from triptych.service.chat.template_files import TOKENS, TemplateError
from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import ApiError, invalid, scrub, try_again

# -- The texts around tool calls, as data for grammars and parsers. Three characters of Unicode's private use area mark
# what differs from call to call: `ID` the call's id, `INDEX` its number, `KIND` the type of an argument.

ID, INDEX, KIND = "\ue000", "\ue001", "\ue002"
VARYING = {ID: r"[A-Za-z0-9_.:\-]", INDEX: "[0-9]", KIND: "[a-z]"}  # the characters that each of them replaces
_MARK = re.compile(r"<[^<>\s\ue000-\ue002]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class ArgumentSyntax:
    """The texts around one argument, for calls whose arguments are not one JSON object.

    An argument is `before` KEY `between` VALUE `after`; `separator` separates arguments. A string is written unescaped
    between the two `quotes`; if `quotes` is None, it is JSON like all other values. `KIND` in `between` becomes
    `text_kind` for a string, and one of `other_kinds` for another value.
    """

    before: str
    between: str
    after: str
    separator: str = ""
    quotes: tuple[str, str] | None = ("", "")
    text_kind: str = ""
    other_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts around calls.

    A reply has `opening`, then calls `before` NAME `between` ARGUMENTS `after`, separated by `separator`, then
    `closing`. `trigger` begins calls after content; empty: calls are the whole reply. The arguments are a JSON object,
    or have the syntax `arguments`.
    """

    before: str
    between: str
    after: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    content: str = ""  # beginning of a reply without calls, for calls without a trigger
    one: bool = False  # a reply ends with its first call
    arguments: ArgumentSyntax | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags in these texts, which may be special tokens."""
        texts = [self.opening, self.before, self.between, self.after, self.separator, self.closing]
        if self.arguments is not None:
            texts += [self.arguments.before, self.arguments.between, self.arguments.after]
        return tuple(dict.fromkeys(mark for text in texts for mark in _MARK.findall(text)))


# -- What a chat template does with messages, found by rendering a few conversations
# (`triptych.service.chat.template_probe`).


class CallIds(StrEnum):
    """The form of call ids that a template accepts."""

    ANY = "any"
    SHORT = "short"  # nine letters and digits
    NUMBERED = "numbered"  # functions.NAME:NUMBER, which the template writes in place of the name


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around reasoning of no known format."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How to give messages to a template, and how it writes calls and reasoning.

    `tool_format` and `reasoning_format` name formats of `triptych.service.chat.formats`. If none of these fits,
    `call_syntax` and `reasoning_marks` are the texts that the template writes.
    """

    tool_format: str = ""
    call_syntax: CallSyntax | None = None
    call_ends: tuple[str, ...] = ()  # special tokens that end a reply with calls
    tools_problem: str = ""  # why calls cannot be parsed; empty: they can, or the template reads no tools
    renders_calls: bool = False  # calls of earlier turns reach the prompt
    text_in_parts: bool = False  # content is a list of parts, each with a type
    calls_apart: bool = False  # the template drops calls of a message with content: they need a message of their own
    calls_in_content: bool = False  # the template drops tool_calls: calls go into the content
    empty_content: str | None = ""  # the content of a message that has only calls
    has_content_key: bool = True  # False: such a message has no key `content`
    text_arguments: bool = False  # arguments of calls are text, not objects
    ids: CallIds = CallIds.ANY
    content_or_reasoning: bool = False  # it refuses a message with calls, content and reasoning
    names_results: bool = False  # a tool's result needs the tool's name
    describes: bool = False  # tools and their parameters need descriptions
    reasoning_format: str = ""
    reasoning_marks: ReasoningMarks | None = None
    reasoning_key: str = ""  # the message key for reasoning, if it is not the reference library's
    knows_developer: bool = False  # it renders the role `developer` in a form of its own


Messages = Sequence[Mapping[str, Any]]

_GIVEN = frozenset(
    {
        *TOKENS,
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "dict",
        "namespace",
        "range",
        "cycler",
        "joiner",
        "raise_exception",
        "strftime_now",
    }
)  # variables that no request may set
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
_HELLO = ({"role": "user", "content": "Hello"},)
_TEST_MAX_CHARACTERS = 1_000_000
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # its trailing space is lost if the template strips content


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, its special tokens (`bos_token` ...), and `names`, all variables that it reads.

    `tool_use` is the folder's template of this name, which conversations with tools use instead.
    """

    source: str
    tokens: Mapping[str, str]
    names: frozenset[str]
    traits: TemplateTraits = field(default_factory=TemplateTraits)
    tool_use: ChatTemplate | None = None

    @classmethod
    def compiled(cls, source: str, tokens: Mapping[str, str], folder: str, worker: RenderWorker) -> ChatTemplate:
        """Compile a template; raises `TemplateError` that names the folder."""
        try:
            return cls(source, tokens, worker.names(source))
        except RenderError as error:
            raise cannot_render(folder, error) from None

    def test(self, folder: str, worker: RenderWorker) -> None:
        """Render a short conversation, which the template may refuse by `raise_exception`; raises `TemplateError`."""
        try:
            worker.render(self.source, self.variables(_HELLO, add_generation_prompt=True), _TEST_MAX_CHARACTERS)
        except RenderError as error:
            if error.kind != "raised" and not self._takes_parts(worker):
                raise cannot_render(folder, error) from None

    def _takes_parts(self, worker: RenderWorker) -> bool:
        """Return whether the template renders content that is a list of parts."""
        variables = self.variables([in_parts(one) for one in _HELLO], add_generation_prompt=True)
        try:
            return _HELLO[0]["content"] in worker.render(self.source, variables, _TEST_MAX_CHARACTERS)
        except RenderError:
            return False

    def with_traits(self, traits: TemplateTraits, tool_use: ChatTemplate | None = None) -> ChatTemplate:
        """Return the template with its traits."""
        return replace(self, traits=traits, tool_use=tool_use)

    def chosen(self, *, with_tools: bool) -> ChatTemplate:
        """Return the template for a conversation with or without tools."""
        return self.tool_use if with_tools and self.tool_use is not None else self

    def reads(self, name: str) -> bool:
        """Return whether the template reads this variable."""
        return name in self.names

    def takes(self, name: str) -> bool:
        """Return whether a request may set this variable: the template reads it, and the service does not set it."""
        return name not in _GIVEN and name not in self.tokens and self.reads(name)

    @property
    def switch(self) -> str | None:
        """The variable that turns reasoning on and off; None: there is none."""
        return next((name for name in SWITCHES if self.takes(name)), None)

    def variables(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the variables that the template can read; `more` are those that a request sets."""
        return {
            **(more or {}),
            **self.tokens,
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    async def render(
        self,
        pool: RenderPool,
        messages: Messages,
        bound: ContextBound,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt, at most as long as `bound` allows; raises `ApiError` that names `messages`."""
        try:
            variables = self.variables(messages, add_generation_prompt=add_generation_prompt, tools=tools, more=more)
            text = await pool.render(self.source, variables, bound.characters)
        except RenderError as error:
            raise _refusal(error, bound) from None
        bound.check_bytes(text, "messages")
        return text

    async def continued(
        self,
        pool: RenderPool,
        messages: Messages,
        bound: ContextBound,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt up to the end of the last message's content, which the model continues."""
        last = messages[-1]
        content = text_of(last)
        if content is None:
            raise invalid("continue_final_message: the last message has no text at its end", "continue_final_message")
        said = last["content"]
        tagged_content = content + _TAG if isinstance(said, str) else [*said[:-1], {**said[-1], "text": content + _TAG}]
        tagged = [*messages[:-1], {**last, "content": tagged_content}]
        text = await self.render(pool, tagged, bound, add_generation_prompt=False, tools=tools, more=more)
        before, found, after = text.rpartition(_TAG.strip())
        if not found or content.strip() not in before:
            raise invalid(
                "continue_final_message: the chat template leaves the last message out", "continue_final_message"
            )
        return before if after.startswith(" ") else before.rstrip()


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def text_of(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message, in parts or not; None if it has none."""
    content = message.get("content")
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    return content if isinstance(content, str) else None


def cannot_render(folder: str, error: RenderError) -> TemplateError:
    """Return the error for a template that does not compile or fails its test rendering."""
    return TemplateError(f"{folder}: the chat template does not render ({error.kind}): {scrub(str(error))}")


def _refusal(error: RenderError, bound: ContextBound) -> ApiError:
    if error.kind == "busy":
        return try_again("too many conversations are being rendered", "chat_templates", 1)
    if error.kind == "length":
        return bound.too_long("messages")
    if error.kind == "raised":
        return invalid(f"the chat template refuses these messages: {scrub(str(error))}", "messages", "chat_template")
    detail = f"{error.kind}: {scrub(str(error))}"
    return invalid(f"the chat template cannot render these messages ({detail})", "messages", "chat_template")
