"""Published chat templates: rendered as the reference library renders them, and calls read back.

Each template gets 30 kinds of conversation. What our messages become is compared with what the reference makes of the
same messages; a refusal by both counts as equal. The call that a template writes is read back whole and in every split,
and the grammar of a forced call must accept it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.conformance.template_files import published_templates
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes
from triptych.service.chat.call_grammar import reply_grammar
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.formats import REASONING_FORMATS, ToolFormat, tool_format
from triptych.service.chat.message_fit import fitted_messages, shown_tools
from triptych.service.chat.parts import WholeReply
from triptych.service.chat.render_pool import RenderError, RenderPool, RenderWorker
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.template_files import TemplateError, TemplateFiles
from triptych.service.chat.template_probe import _Probe, probed_template
from triptych.service.chat.tools import Tool, ToolUse
from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import ApiError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OTHER = "{% for message in messages %}{{ message.content }}{% endfor %}"
_WHERE = {"type": "string", "description": "Where."}
TOOLS = (
    Tool(
        "get_weather",
        "Tells the weather.",
        {"type": "object", "properties": {"city": _WHERE, "n": {"type": "integer"}}},
    ),
    Tool("list_files", None, None),
    Tool(
        "send",
        "Sends it.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "to": {"type": "array", "items": {"type": "string"}},
                "urgent": {"type": "boolean"},
                "more": {"type": "object", "properties": {"k": {"type": "null"}}},
            },
            "required": ["text"],
        },
    ),
)
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "a call": [("get_weather", {"city": "Malmö", "n": 3})],
    "no arguments": [("list_files", {})],
    "hard values": [("send", {"text": 'a "b" <c> \\ {d} 7', "to": ["x", "y"], "urgent": True, "more": {"k": None}})],
    "two calls": [("get_weather", {"city": "Lund", "n": 1}), ("get_weather", {"city": "Oslo", "n": 2})],
}
Message = dict[str, Any]


def _user(text: str = "How are you?") -> Message:
    return {"role": "user", "content": text}


def _said(text: str | None = "Well.", **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _called(kind: str, text: str | None = None, **more: Any) -> Message:
    calls = [
        {"id": f"call_{at}a2b3c4d5e6", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(CALLS[kind])
    ]
    return {"role": "assistant", **({} if text is None else {"content": text}), "tool_calls": calls, **more}


def _results(count: int = 1, **more: Any) -> list[Message]:
    return [
        {"role": "tool", "content": f"Result {at}", "tool_call_id": f"call_{at}a2b3c4d5e6", **more}
        for at in range(count)
    ]


_SYSTEM = {"role": "system", "content": "Be brief."}
_DEVELOPER = {"role": "developer", "content": "Be brief."}
_WEATHER = _user("Weather?")
# Messages, whether there are tools, and whether the model is to speak.
KINDS: dict[str, tuple[list[Message], bool, bool]] = {
    "hello": ([_user()], False, True),
    "hello, not to speak": ([_user()], False, False),
    "system": ([_SYSTEM, _user()], False, True),
    "system alone": ([_SYSTEM], False, True),
    "developer": ([_DEVELOPER, _user()], False, True),
    "developer and tools": ([_DEVELOPER, _user()], True, True),
    "two turns": ([_user(), _said(), _user("And now?")], False, True),
    "three turns": ([_SYSTEM, _user(), _said(), _user("And now?"), _said("Better."), _user("Why?")], False, True),
    "ends with the assistant": ([_user(), _said()], False, False),
    "two of the user": ([_user(), _user("Hm?")], False, True),
    "empty text": ([_user("")], False, True),
    "spaces": ([_user("  a \n b  "), _said(" c \n"), _user("d")], False, True),
    "marks in the text": ([_user("<think> {{ x }} [INST] </s> <|im_end|>")], False, True),
    "unicode": ([_user("Zürich 東京 🙂")], False, True),
    "tools": ([_WEATHER], True, True),
    "tools and system": ([_SYSTEM, _WEATHER], True, True),
    "tools, later turn": ([_user(), _said(), _WEATHER], True, True),
    "call without content": ([_WEATHER, _called("a call")], True, False),
    "call with null content": ([_WEATHER, _called("a call") | {"content": None}], True, False),
    "call with empty content": ([_WEATHER, _called("a call", "")], True, False),
    "call with content": ([_WEATHER, _called("a call", "Let me see.")], True, False),
    "call of no arguments": ([_WEATHER, _called("no arguments")], True, False),
    "call of hard values": ([_WEATHER, _called("hard values")], True, False),
    "parallel calls": ([_WEATHER, _called("two calls")], True, False),
    "a result": ([_WEATHER, _called("a call"), *_results()], True, True),
    "results": ([_WEATHER, _called("two calls"), *_results(2)], True, True),
    "after a result": ([_WEATHER, _called("a call"), *_results(), _said("Warm."), _user("Thanks")], True, True),
    "calls without tools": ([_WEATHER, _called("a call"), *_results()], False, True),
    "reasoning": ([_user(), _said("Well.", reasoning_content="Hm.")], False, False),
    "reasoning of an earlier turn": ([_user(), _said("Well.", reasoning_content="Hm."), _user("Why?")], False, True),
    "reasoning and a call": ([_WEATHER, _called("a call", reasoning_content="Hm."), *_results()], True, True),
}


def run(report: Report, packages: Packages) -> None:
    """Try each template."""
    formats: Counter[str] = Counter()
    reasoning: Counter[str] = Counter()
    vocabulary = Vocabulary(
        TokenBytes(tuple(bytes([byte]) for byte in range(256)), tuple(bytes([byte]) for byte in range(256)))
    )
    worker = RenderWorker(20.0)
    for name, source in sorted(published_templates(packages).items()):
        for_tools = name.endswith("tool_use")  # the folder's other template is for conversations without tools
        files = {"default": _OTHER, "tool_use": source} if for_tools else {"default": source}
        try:
            chat = probed_template(TemplateFiles(files, TOKENS), name).chosen(with_tools=for_tools)
        except TemplateError as error:
            _check_refusal(report, name, source, error)
            continue
        traits = chat.traits
        for kind, (messages, with_tools, speak) in KINDS.items():
            if for_tools and not with_tools:
                continue
            _compare(report, f"{name}: {kind}", worker, chat, messages, with_tools=with_tools, speak=speak)
        _compare_continued(report, f"{name}: continued", worker, chat)
        reasoning[traits.reasoning_format or "none"] += 1
        if not chat.reads("tools"):
            formats["(in plain messages)"] += 1
            continue
        format = tool_format(traits)
        formats["(refused)" if format is None else format.name] += 1
        if format is None:
            report.refuses(f"{name}: tools", traits.tools_problem)
        elif not traits.calls_in_content:
            _read_back(report, name, worker, chat, format, vocabulary)
    worker.close()
    print("  tools:", dict(formats.most_common()))
    print("  reasoning:", dict(reasoning.most_common()))


def _check_refusal(report: Report, name: str, source: str, error: TemplateError) -> None:
    """Count a template that is refused whole: right where the reference does not render a lone greeting either."""
    try:
        _reference(source, [_user("Hello")], None, speak=True)
    except Exception:
        report.refuses(name, str(error))
    else:
        report.fails(name, str(error))


def _reference(source: str, messages: list[Message], tools: list[Any] | None, *, speak: bool) -> str:
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=speak, **TOKENS
    )
    return str(texts[0])


def _rendered(
    worker: RenderWorker, chat: ChatTemplate, messages: list[Message], tools: list[Any], *, speak: bool
) -> str:
    variables = chat.variables(messages, add_generation_prompt=speak, tools=tools)
    return worker.render(chat.source, variables, 1_000_000)


def _compare(
    report: Report,
    case: str,
    worker: RenderWorker,
    chat: ChatTemplate,
    messages: list[Message],
    *,
    with_tools: bool,
    speak: bool,
) -> None:
    """Compare the text of a conversation with the reference's, and refuse nothing that the reference renders."""
    tools = TOOLS if with_tools else ()
    format = tool_format(chat.traits)
    if with_tools and chat.reads("tools") and format is None:
        return  # tools are refused
    fitted = fitted_messages(messages, tools, chat, format)
    shown = shown_tools(tools, chat.traits)
    try:
        expected: str | None = _reference(chat.source, fitted, shown or None, speak=speak)
    except Exception:
        expected = None
    try:
        text: str | None = _rendered(worker, chat, fitted, shown, speak=speak)
    except RenderError:
        text = None
    if text is not None or expected is not None:
        report.check(case, text == expected, f"{text!r} is not {expected!r}")
        return
    try:
        _reference(chat.source, messages, [tool.shown() for tool in tools] or None, speak=speak)
    except Exception:
        report.passes(case)
    else:
        report.fails(case, "it is refused as it is given to the template, and rendered as the client sends it")


class _Pool(RenderPool):
    """Renders with one worker."""

    def __init__(self, worker: RenderWorker) -> None:
        self._worker = worker

    async def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        return self._worker.render(template, variables, limit)


def _compare_continued(report: Report, case: str, worker: RenderWorker, chat: ChatTemplate) -> None:
    """Compare the text that a model is to continue with the reference's."""
    messages = fitted_messages([_user(), _said("and then ")], (), chat, None)
    try:
        texts, _ = render_jinja_template([messages], chat_template=chat.source, continue_final_message=True, **TOKENS)
        expected: str | None = texts[0]
    except Exception:
        expected = None
    try:
        text: str | None = asyncio.run(chat.continued(_Pool(worker), messages, ContextBound(1_000_000, 1, 1_000_000)))
    except (ApiError, RenderError):
        text = None
    report.check(case, text == expected, f"{text!r} is not {expected!r}")


def _read_back(
    report: Report, name: str, worker: RenderWorker, chat: ChatTemplate, format: ToolFormat, vocabulary: Vocabulary
) -> None:
    """Check that calls which the template writes are read back, however they are cut, and that a grammar takes them."""
    probe = _Probe(chat, worker)
    probe.traits()
    use = ToolUse(TOOLS, "required")
    reply_format = ReplyFormat(calls=format, tools={tool.name: tool for tool in TOOLS})
    channels = REASONING_FORMATS["harmony"] if format.name == "harmony" else None
    held = ReplyFormat(channels, calls=format, tools=reply_format.tools, is_held=True)
    shown = shown_tools(TOOLS, chat.traits)
    for kind, calls in CALLS.items():
        fitted = fitted_messages([_WEATHER, _called(kind)], TOOLS, chat, format)
        try:
            text = _rendered(worker, chat, fitted, shown, speak=False)
            prompt = _rendered(worker, chat, [_WEATHER], shown, speak=True)
        except RenderError:
            continue  # compared with the reference elsewhere
        probe._prompt, probe._plain = prompt, ""
        reply, _ = probe._reply(text)
        if not all(str(value) in reply for _, given in calls for value in list(given.values())[:1]):
            continue  # the template takes one call, or changes strings
        found = ReplyParser(reply_format).whole(reply)
        report.check(f"{name}: read back: {kind}", _calls(found) == calls, f"{_calls(found)} from {reply!r}")
        streamed = all(_calls(_streamed(reply_format, pieces)) == _calls(found) for pieces in _splits(reply))
        report.check(f"{name}: in pieces: {kind}", streamed, f"another reply in pieces: {reply!r}")
        grammar = reply_grammar(held, use, "", lambda _: None)
        taken = _taken(grammar, vocabulary, reply[max(reply.find(format.syntax.trigger), 0) :])
        report.check(
            f"{name}: grammar: {kind}",
            taken is not None and _calls(ReplyParser(held).whole(taken)) == calls,
            f"{taken!r} of {reply!r}",
        )


def _calls(reply: WholeReply) -> list[tuple[str, Any]]:
    try:
        return [(call.name, json.loads(call.arguments)) for call in reply.calls]
    except ValueError:
        return [(call.name, call.arguments) for call in reply.calls]


def _splits(text: str) -> Iterator[list[str]]:
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))


def _streamed(format: ReplyFormat, pieces: list[str]) -> WholeReply:
    parser, reply = ReplyParser(format), WholeReply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.push("", end=True))
    return reply


def _taken(grammar: str, vocabulary: Vocabulary, text: str) -> str | None:
    """Return the beginning of a text that is a whole reply of the grammar; None if no beginning is."""
    matcher, data, complete = compile_grammar(grammar, vocabulary), text.encode(), 0
    for at, byte in enumerate(data):
        if not matcher.tokens[byte]:
            break
        matcher.accept(byte)
        if matcher.is_complete:
            complete = at + 1
    return data[:complete].decode() if complete else None
