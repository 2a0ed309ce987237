"""Finds what a chat template does with messages by rendering a few short conversations when a model is loaded.

A call is rendered and parsed: the format that gives back the call is the template's format. Reasoning, empty content
and the role `developer` are tried in the same way. A model's name is never used.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from triptych.service.chat.call_grammar import Calls, is_written, written_calls
from triptych.service.chat.chat_template import CallIds, ChatTemplate, Messages, TemplateTraits, in_parts
from triptych.service.chat.derived_syntax import WrittenCalls, derived, shared_beginning
from triptych.service.chat.formats import OWN, TOOL_FORMATS, ToolFormat, own_format
from triptych.service.chat.parts import Arguments, Call, Content
from triptych.service.chat.reasoning_probe import ReasoningProbe
from triptych.service.chat.render_pool import RenderError, RenderWorker
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.template_files import TemplateError, TemplateFiles, template_files
from triptych.service.chat.tools import Tool
from triptych.service.core.errors import scrub

_RENDER_SECONDS, _PROBE_SECONDS = 5.0, 20.0
_MOST_RENDERED, _MOST_REPLY = 200_000, 20_000  # characters
_USER = {"role": "user", "content": "Question-3"}
_SAID = "Answer-5"
_TOOLS = tuple(
    Tool(
        name,
        "Tells it.",
        {
            "type": "object",
            "properties": {key: {"type": kind, "description": "It."} for key, kind in kinds.items()},
            "required": list(kinds),
        },
    )
    for name, kinds in (
        ("get_weather", {"city": "string", "days": "integer"}),
        ("find_place", {"place": "string", "count": "integer"}),
    )
)
_CALLS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("get_weather", {"city": "Malm\u00f6-7", "days": 37}),
    ("find_place", {"place": "Lund-8", "count": 52}),
)
_IDS = {
    CallIds.ANY: ("call_6f2b4c1d9e8a7b3c", "call_0a9b8c7d6e5f4a3b"),
    CallIds.SHORT: ("aQ3xT9kL2", "bR4yU8mN1"),
    CallIds.NUMBERED: ("functions.get_weather:0", "functions.find_place:1"),
}
_ABSENT = object()
_TAGS = re.compile(r"(\s|<[^<>\s]{1,64}>|\[[^\[\]\s]{1,32}\])*")  # tags that may end a turn
_SPACES, _ANYTHING = re.compile(r"\s*"), re.compile(r"(?s:.*)")
_TAIL_SHOWN = 120


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the folder's chat template; None if there is none. Raises `TemplateError` if it cannot be used."""
    files = template_files(folder)
    return None if files is None else probed_template(files, folder.name)


def probed_template(files: TemplateFiles, name: str) -> ChatTemplate:
    """Test the templates of the folder `name` and return them with their traits; raises `TemplateError`."""
    return _probed(files.default(name), files.templates.get("tool_use"), tuple(sorted(files.tokens.items())), name)


@lru_cache(maxsize=64)
def _probed(source: str, tool_use: str | None, tokens: tuple[tuple[str, str], ...], name: str) -> ChatTemplate:
    worker = RenderWorker(_RENDER_SECONDS)
    try:
        template = ChatTemplate.compiled(source, dict(tokens), name, worker)
        template.test(name, worker)
        if tool_use is None:
            return template.with_traits(_Probe(template, worker).traits())
        return template.with_traits(_Probe(template, worker).traits(), _for_tools(tool_use, tokens, name, worker))
    finally:
        worker.close()


def _for_tools(source: str, tokens: tuple[tuple[str, str], ...], name: str, worker: RenderWorker) -> ChatTemplate:
    try:
        template = ChatTemplate.compiled(source, dict(tokens), name, worker)
    except TemplateError as error:
        problem = f"its template tool_use does not compile: {error}"
        return ChatTemplate(source, dict(tokens), frozenset({"tools"}), TemplateTraits(tools_problem=problem))
    return template.with_traits(_Probe(template, worker).traits())


def last_reply(text: str, prompt: str, plain: str = "") -> tuple[str, bool]:
    """Return the last reply of a rendered conversation, and whether its start is certain.

    `prompt` is what is rendered before the reply, `plain` the beginning of a conversation whose reply has no calls.
    """
    is_sure = bool(prompt) and text.startswith(prompt)
    if is_sure:
        begin = len(prompt)
    else:
        begin = max(len(shared_beginning(text, one)) for one in (prompt, plain))
        tag = max(text.rfind("<", 0, begin), text.rfind("[", 0, begin))
        if tag > max(text.rfind(">", 0, begin), text.rfind("]", 0, begin)):
            begin = tag  # the texts differ within a tag
    return text[begin : begin + _MOST_REPLY], is_sure


class _Style:
    """A form in which messages with calls are given to a template."""

    def __init__(self, ids: CallIds, *, as_text: bool, content: object) -> None:
        self.ids, self.as_text, self.content = ids, as_text, content

    def message(self, calls: Calls) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": id,
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments,
                    },
                }
                for id, (name, arguments) in zip(_IDS[self.ids], calls, strict=False)
            ],
        }
        return message if self.content is _ABSENT else {**message, "content": self.content}


class _Probe:
    """A renderer of conversations with one template, for a bounded time."""

    def __init__(self, template: ChatTemplate, worker: RenderWorker) -> None:
        self._template = template
        self._worker = worker
        self._end = time.monotonic() + _PROBE_SECONDS
        self._error = "it does not render"
        self._in_parts = False
        self._tools = [tool.shown() for tool in _TOOLS] if template.reads("tools") else []

    def render(
        self,
        messages: Messages,
        *,
        tools: bool | list[Any] = False,
        speak: bool = False,
        **more: Any,
    ) -> str | None:
        """Return the text; None if the template does not render it."""
        if time.monotonic() > self._end:
            return None
        if self._in_parts:
            messages = [in_parts(message) for message in messages]
        given = tools if isinstance(tools, list) else self._tools if tools else []
        variables = self._template.variables(messages, add_generation_prompt=speak, tools=given, more=more)
        try:
            return self._worker.render(self._template.source, variables, _MOST_RENDERED)
        except RenderError as error:
            self._error = f"{error.kind}: {scrub(str(error))}"
            if error.kind in ("time", "crashed", "memory"):
                self._end = 0.0
            return None

    def traits(self) -> TemplateTraits:
        """Return all traits of the template."""
        self._in_parts = self._takes_parts_alone()
        reasoning = ReasoningProbe(self.render, self._template)
        found: dict[str, Any] = {"text_in_parts": self._in_parts, **reasoning.traits()}
        found["knows_developer"] = self._knows_developer()
        self._reasoning = reasoning
        found |= self._calls()
        if self._template.reads("tools"):
            found["describes"] = self._describes()
        return TemplateTraits(**found)

    def _takes_parts_alone(self) -> bool:
        """Return whether the template shows content only if it is a list of parts."""
        texts = [self.render([_USER], tools=True), self.render([in_parts(_USER)], tools=True)]
        shown = [text is not None and _USER["content"] in text for text in texts]
        return shown == [False, True]

    def _knows_developer(self) -> bool:
        """Return whether the template writes a developer's message differently from one of an unknown role."""
        said = "Rule-4"
        known, other = (self.render([{"role": role, "content": said}, _USER]) for role in ("developer", "qrole"))
        if known is None or said not in known:
            return False
        return other is None or other.lower().replace("qrole", "developer") != known.lower()

    def _describes(self) -> bool:
        bare = json.loads(json.dumps(self._tools))
        for tool in bare:
            del tool["function"]["description"]
            for schema in tool["function"]["parameters"]["properties"].values():
                del schema["description"]
        return self.render([_USER], tools=bare) is None and self.render([_USER], tools=True) is not None

    # -- calls

    def _calls(self) -> dict[str, Any]:
        """Return the traits of calls: how the template accepts them, and how it writes them."""
        prompt = self.render([_USER], tools=True, speak=True) or ""
        plain = self.render([_USER, {"role": "assistant", "content": _SAID}], tools=True) or ""
        self._prompt, self._plain = prompt, plain.rpartition(_SAID)[0]
        self._ending = plain.rpartition(_SAID)[2]
        unread: tuple[str, _Style] | None = None
        for ids, as_text in product(CallIds, (False, True)):
            best: tuple[int, dict[str, Any]] | None = None
            for content in ("", None, _ABSENT):
                style = _Style(ids, as_text=as_text, content=content)
                text = self.render([_USER, style.message(_CALLS[:1])], tools=True)
                if text is None or not all(said in text.removeprefix(self._prompt) for said in (_CALLS[0][0], "37")):
                    continue
                unread = unread or (text, style)
                found = self._read_back(text, style)
                if found is not None and (best is None or len(text) < best[0]):
                    best = len(text), found | self._given(style)
            if best is not None:
                return best[1]
        if unread is None:
            return (self._in_content() or {"tools_problem": self._why_not_written()}) if self._tools else {}
        text, style = unread
        shown = scrub(self._reply(text)[0].strip()[:_TAIL_SHOWN])
        problem = f"what its chat template writes for a call is of no known format: {shown}" if self._tools else ""
        return self._given(style) | {"tools_problem": problem}

    def _why_not_written(self) -> str:
        text = self.render([_USER, _Style(CallIds.ANY, as_text=False, content="").message(_CALLS[:1])], tools=True)
        if text is None:
            return f"its chat template does not render a call ({self._error})"
        return "its chat template leaves calls out"

    def _given(self, style: _Style) -> dict[str, Any]:
        content = style.content
        found: dict[str, Any] = {"ids": style.ids, "text_arguments": style.as_text, "renders_calls": True}
        found |= {"empty_content": None, "has_content_key": False} if content is _ABSENT else {"empty_content": content}
        said = {**style.message(_CALLS[:1]), "content": _SAID}
        thought = {**said, "reasoning_content": _SAID, "thinking": _SAID}
        found["content_or_reasoning"] = (
            self.render([_USER, thought], tools=True) is None and self.render([_USER, said], tools=True) is not None
        )
        found["calls_apart"] = self._leaves_calls_out(said, style.message(_CALLS[:1]))
        result = {"role": "tool", "content": "Result-6", "tool_call_id": _IDS[style.ids][0]}
        asked = [_USER, style.message(_CALLS[:1])]
        if self.render([*asked, result], tools=True) is None:
            named = self.render([*asked, {**result, "name": _CALLS[0][0]}], tools=True)
            found["names_results"] = named is not None
        return found

    def _leaves_calls_out(self, both: dict[str, Any], calls: dict[str, Any]) -> bool:
        """Return whether the template drops the calls of a message with content, but shows those of the next one."""
        words = {"role": "assistant", "content": both["content"]}
        texts = [self.render([_USER, *said], tools=True) for said in ([both], [words, calls])]
        shown = [text is not None and str(_CALLS[0][1]["days"]) in text for text in texts]
        return texts[0] is not None and shown == [False, True]

    def _reply(self, text: str) -> tuple[str, bool]:
        """Return the last reply of a rendered conversation without reasoning, and whether its start is certain."""
        reply, is_sure = last_reply(text, self._prompt, self._plain)
        return self._reasoning.without(reply), is_sure

    def _read_back(self, text: str, style: _Style) -> dict[str, Any] | None:
        """Return the traits of the format that parses the call correctly; None if there is none."""
        reply, is_sure = self._reply(text)
        around = _SPACES if is_sure else _TAGS
        known = [one for one in TOOL_FORMATS.values() if self._reads(one, reply, _CALLS[:1], around)]
        for whole in (True, False):
            for format in known:
                if is_written(format.syntax, _CALLS[:1], reply, whole=whole):
                    return {"tool_format": format.name}
        firm = [one.name for one in known if one.parser is not None and one.name != "json"]
        if firm:
            return {"tool_format": firm[0]}
        own = self._own_format(reply, style)
        if own is not None:
            return {"tool_format": OWN, "call_syntax": own.syntax, "call_ends": own.ends}
        return {"tool_format": known[0].name} if known else None

    def _own_format(self, reply: str, style: _Style) -> ToolFormat | None:
        """Return the format with the syntax found in the reply; None if it does not parse all calls that are tried."""
        tried = [reply]
        both = self.render([_USER, style.message(_CALLS)], tools=True)
        if both is not None:
            tried.append(self._reply(both)[0])
        written = [WrittenCalls(text, _CALLS[:at], _IDS[style.ids], self._ending) for at, text in enumerate(tried, 1)]
        for second in dict.fromkeys((written[-1], None)):
            found = derived(written[0], second)
            format = None if found is None else own_format(*found)
            if format is not None and self._gives_all(format, reply, second, style):
                return format
        return None

    def _gives_all(self, format: ToolFormat, reply: str, second: WrittenCalls | None, style: _Style) -> bool:
        """Return whether a format parses one call, two calls, another call, and a call after content."""
        _, other = _CALLS
        message = style.message([other])
        message["tool_calls"][0]["id"] = _IDS[style.ids][1]
        alone = self.render([_USER, message], tools=True)
        said = self.render([_USER, {**style.message(_CALLS[:1]), "content": _SAID}], tools=True)
        follows = said is None or _SAID not in said or _CALLS[0][0] not in said.rpartition(_SAID)[2]
        return (
            self._reads(format, reply, _CALLS[:1], _TAGS)
            and (second is None or self._reads(format, second.text, _CALLS, _TAGS))
            and (alone is None or self._reads(format, self._reply(alone)[0], (other,), _TAGS))
            and (follows or self._reads(format, (said or "").rpartition(_SAID)[2], _CALLS[:1], _ANYTHING))
        )

    def _reads(self, format: ToolFormat, reply: str, calls: Calls, around: re.Pattern[str]) -> bool:
        """Return whether the format parses exactly these calls; `around` matches the other text allowed before them."""
        before: list[str] = []
        after: list[str] = []
        names: list[str] = []
        arguments: list[str] = []
        parser = ReplyParser(ReplyFormat(calls=format, tools={tool.name: tool for tool in _TOOLS}))
        for part in parser.push(reply, end=True):
            match part:
                case Call(_, _, name):
                    before += after
                    after = []
                    names.append(name)
                    arguments.append("")
                case Arguments(index, piece):
                    arguments[index] += piece
                case Content(piece):
                    after.append(piece)
        try:
            found = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
        except ValueError:
            return False
        rest = "".join(after).replace(self._ending, "") if self._ending.strip() else "".join(after)
        tail = _ANYTHING if around is _ANYTHING else _TAGS
        is_clean = around.fullmatch("".join(before)) is not None and tail.fullmatch(rest) is not None
        return found == [*calls] and is_clean

    def _in_content(self) -> dict[str, Any] | None:
        """Return the traits of a template that asks for calls of a known format, but drops earlier ones."""
        prompt = self.render([_USER], tools=True) or ""
        for format in TOOL_FORMATS.values():
            if format.shown_by and format.shown_by in prompt:
                written = written_calls(format.syntax, _CALLS[:1])
                text = self.render([_USER, {"role": "assistant", "content": written}], tools=True)
                if text is not None and self._reads(format, self._reply(text)[0], _CALLS[:1], _TAGS):
                    return {"tool_format": format.name, "calls_in_content": True, "renders_calls": True}
        return None
