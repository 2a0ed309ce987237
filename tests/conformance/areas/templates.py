"""Published chat templates: rendered as the reference library renders them, and calls read back.

Each template gets 30 kinds of conversation. What our messages become is compared with what the reference makes of the
same messages; a refusal by both counts as equal. The checks of `triptych check` are run too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.conformance.template_files import published_templates
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.check_conversations import ASKED, TOOLS, called, results
from triptych.service.chat.formats import tool_format
from triptych.service.chat.message_fit import fitted_messages, shown_tools
from triptych.service.chat.render_pool import RenderError, RenderPool, RenderWorker
from triptych.service.chat.template_check import TemplateCheck
from triptych.service.chat.template_files import TemplateError, TemplateFiles
from triptych.service.chat.template_probe import probed_template
from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import ApiError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OTHER = "{% for message in messages %}{{ message.content }}{% endfor %}"
Message = dict[str, Any]


def _user(text: str = "How are you?") -> Message:
    return {"role": "user", "content": text}


def _said(text: str | None = "Well.", **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _called(kind: str, text: str | None = None, **more: Any) -> Message:
    return called(kind, **({} if text is None else {"content": text}), **more)


_SYSTEM = {"role": "system", "content": "Be brief."}
_DEVELOPER = {"role": "developer", "content": "Be brief."}
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
    "tools": ([ASKED], True, True),
    "tools and system": ([_SYSTEM, ASKED], True, True),
    "tools, later turn": ([_user(), _said(), ASKED], True, True),
    "call without content": ([ASKED, _called("a call")], True, False),
    "call with null content": ([ASKED, _called("a call") | {"content": None}], True, False),
    "call with empty content": ([ASKED, _called("a call", "")], True, False),
    "call with content": ([ASKED, _called("a call", "Let me see.")], True, False),
    "call of no arguments": ([ASKED, _called("no arguments")], True, False),
    "call of hard values": ([ASKED, _called("hard values")], True, False),
    "parallel calls": ([ASKED, _called("two calls")], True, False),
    "a result": ([ASKED, _called("a call"), *results("Result 0")], True, True),
    "results": ([ASKED, _called("two calls"), *results("Result 0", "Result 1")], True, True),
    "after a result": ([ASKED, _called("a call"), *results("Result 0"), _said("Warm."), _user("Thanks")], True, True),
    "calls without tools": ([ASKED, _called("a call"), *results("Result 0")], False, True),
    "reasoning": ([_user(), _said("Well.", reasoning_content="Hm.")], False, False),
    "reasoning of an earlier turn": ([_user(), _said("Well.", reasoning_content="Hm."), _user("Why?")], False, True),
    "reasoning and a call": ([ASKED, _called("a call", reasoning_content="Hm."), *results("Result 0")], True, True),
}


def run(report: Report, packages: Packages) -> None:
    """Try each template."""
    formats: Counter[str] = Counter()
    reasoning: Counter[str] = Counter()
    worker = RenderWorker(20.0)
    for name, source in sorted(published_templates(packages).items()):
        for_tools = name.endswith("tool_use")  # the folder's other template is for conversations without tools
        files = {"default": _OTHER, "tool_use": source} if for_tools else {"default": source}
        try:
            whole = probed_template(TemplateFiles(files, TOKENS), name)
        except TemplateError as error:
            _check_refusal(report, name, source, error)
            continue
        _check_itself(report, name, TemplateCheck(whole, worker))
        chat = whole.chosen(with_tools=for_tools)
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
    worker.close()
    print("  tools:", dict(formats.most_common()))
    print("  reasoning:", dict(reasoning.most_common()))


def _check_itself(report: Report, name: str, template: TemplateCheck) -> None:
    """Run the checks of `triptych check`. A grammar that takes another form than the template's counts as a failure."""
    for check in template.all():
        if check.name == "tool format" and check.result == "no":
            report.refuses(f"{name}: tools", check.reason)
        elif check.reason.startswith("the template does not render it"):  # nor does the reference, by the comparison
            report.refuses(f"{name}: {check.name}", check.reason)
        elif check.result != "not applicable":  # what a template refuses is compared with the reference
            is_exact = check.result == "yes" and not (check.reason and check.name.startswith("grammar"))
            report.check(f"{name}: {check.name}", is_exact, check.reason)


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
