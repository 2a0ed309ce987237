"""Facts that rendering a chat template reveals: formats of calls and reasoning, and the form of messages."""

from __future__ import annotations

import json
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.service.dialects.support import prompt_of, says, talker
from tests.service.support import App, ask, make_app
from tests.service.test_bad_requests import check_error
from triptych.model.api.messages import ModelSpec
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes
from triptych.service.chat import template_probe
from triptych.service.chat.abilities import chat_abilities
from triptych.service.chat.call_grammar import reply_grammar, written_calls
from triptych.service.chat.chat_template import CallIds, ChatTemplate
from triptych.service.chat.formats import TOOL_FORMATS, reasoning_format, tool_format
from triptych.service.chat.message_fit import fitted_messages, shown_tools
from triptych.service.chat.render_pool import RenderWorker
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.template_files import TemplateFiles
from triptych.service.chat.template_probe import probed_template
from triptych.service.chat.tools import Tool, ToolUse
from triptych.service.core.models import ServedModel
from triptych.service.runtimes.model_reader import read_model

_TEXTS = tuple(bytes([byte]) for byte in range(256))
BYTES = Vocabulary(TokenBytes(_TEXTS, _TEXTS))
USER = {"role": "user", "content": "Hi"}
TOOL = Tool("f", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}})
JSON = "{{ f.arguments | tojson }}"
PLAIN = "{{ m.content or '' }}"


def template(opening: str, call: str, separator: str = "", closing: str = "", content: str = PLAIN) -> str:
    """Return a template in ChatML's style that writes calls in this form."""
    return (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}" + content
        + "{% if m.tool_calls %}" + opening + "{% for c in m.tool_calls %}{% set f = c.function %}" + call
        + "{% if not loop.last %}" + separator + "{% endif %}{% endfor %}" + closing + "{% endif %}"
        + "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )  # fmt: skip


HERMES = template("", '<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + JSON + "}\n</tool_call>", "{{ '\n' }}")


def found(source: str) -> ChatTemplate:
    return probed_template(TemplateFiles({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}), "model")


def rendered(chat: ChatTemplate, messages: list[dict[str, Any]], tools: tuple[Tool, ...] = (TOOL,)) -> str:
    worker = RenderWorker(20.0)
    try:
        fitted = fitted_messages(messages, tools, chat, tool_format(chat.traits))
        shown = shown_tools(tools, chat.traits)
        variables = chat.variables(fitted, add_generation_prompt=False, tools=shown)
        return worker.render(chat.source, variables, 100_000)
    finally:
        worker.close()


_KEYS = "{% for k, v in f.arguments.items() %}<k>{{ k }}</k><v>{{ v if v is string else v | tojson }}</v>{% endfor %}"
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
# How templates write calls, and the name of the format; `template`: one of its own.
CALLS = {
    "hermes": (HERMES, "hermes"),
    "a list between tags": (
        template("<TOOLS>[", '{"name": "{{ f.name }}", "arguments": ' + JSON + "}", ", ", "]</TOOLS>"),
        "template",
    ),
    "JSON with line breaks": (
        template(
            "Action:\n[",
            '{\n "tool_name": "{{ f.name }}",\n "args": {{ f.arguments | tojson(indent=2) }}\n}',
            ", ",
            "]",
        ),
        "template",
    ),
    "whole messages' calls": (template("<tools>[", "{{ c | tojson }}", ", ", "]</tools>"), "template"),
    "tags within tags": (
        template("<calls>", "<call>{{ f.name + '\n```json\n' }}" + JSON + "{{ '\n```' }}</call>", "", "</calls>"),
        "template",
    ),
    "a key for a name": (template("<|calls|>[", '{"{{ f.name }}": ' + JSON + "}", ", ", "]<|end_calls|>"), "template"),
    "a tag for a name": (template("", "<fn={{ f.name }}>" + JSON + "</fn>"), "template"),
    "ids": (template("", "<|call|>{{ c.id }}<|name|>{{ f.name }}<|args|>" + JSON + "<|end_call|>"), "template"),
    "keys and values": (template("", "<call>{{ f.name }}\n" + _KEYS + "</call>", "{{ '\n' }}"), "template"),
    "python": (template("<|py|>[", _PYTHON, ", ", "]<|end_py|>"), "template"),
    "bare JSON": (template("", '{"name": "{{ f.name }}", "parameters": ' + JSON + "}", "; "), "llama3"),
    "one call alone": (
        template(
            '{% if m.tool_calls | length > 1 %}{{ raise_exception("one") }}{% endif %}',
            "<fn>{{ f.name }}{{ '\n' }}" + JSON + "</fn>",
        ),
        "template",
    ),
    "text joined to arguments": (
        template("", "{{ '>>>' + f.name + '\n' + f.arguments }}").replace("assistant\\n", "assistant\\n>>>"),
        "functionary_v32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_the_format_is_the_one_that_gives_a_rendered_call_again(kind: str) -> None:
    source, name = CALLS[kind]
    format = tool_format(found(source).traits)
    assert format is not None and format.name == name
    for first in ({"city": "Zü 9", "n": 3}, {}):
        calls = [("f", first), ("f", {"n": 4})][: 1 if format.syntax.one else 2]
        parser = ReplyParser(ReplyFormat(calls=format, tools={"f": TOOL}))
        reply = parser.whole(written_calls(format.syntax, calls))
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls and not reply.content
        assert not format.syntax.one or kind == "one call alone"
        held = ReplyFormat(calls=format, tools={"f": TOOL}, is_held=True)
        matcher = compile_grammar(reply_grammar(held, ToolUse((TOOL,), "required"), "", lambda _: None), BYTES)
        for byte in written_calls(format.syntax, calls).encode():
            assert matcher.tokens[byte]
            matcher.accept(byte)
        assert matcher.is_complete


def test_calls_go_into_content_where_a_template_asks_for_them_and_leaves_them_out() -> None:
    """LFM2 and Granite 3: the template shows the tools, and expects calls in the words of the model."""
    shows = "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    chat = found(template("", "").replace("{{ tools | tojson if tools }}", shows).replace(PLAIN, "{{ m.content }}"))
    assert tool_format(chat.traits).name == "lfm2"  # type: ignore[union-attr]
    text = rendered(chat, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert text.endswith('assistant\n<|tool_call_start|>[f(city="Oslo")]<|tool_call_end|><|im_end|>\n')


def test_a_mark_in_a_comment_decides_nothing() -> None:
    """Formats of calls and of reasoning, and the role `developer`."""
    words = "{# <tool_call> to=functions. </think> developer <|channel|>analysis reasoning_content #}"
    chat = found(words + template("<TOOLS>[", '{"name": "{{ f.name }}", "arguments": ' + JSON + "}", ", ", "]</TOOLS>"))
    assert tool_format(chat.traits).name == "template" and reasoning_format(chat.traits) is None  # type: ignore[union-attr]
    assert "<|im_start|>system\nRules" in rendered(chat, [{"role": "developer", "content": "Rules"}, USER])


def test_a_role_developer_of_its_own_is_kept() -> None:
    own = "{% if m.role == 'developer' %}# Developer: {% endif %}{{ m.content }}"
    assert found(template("", "", content=own)).traits.knows_developer
    assert not found(
        template("", "", content="{% if m.role != 'developer' %}{{ m.content }}{% endif %}")
    ).traits.knows_developer


REASONING = {
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n": ("think", "", ""),
    "[THINK]{{ m.thinking }}[/THINK]": ("mistral", "", ""),
    "<|reason|>{{ m.reasoning }}<|/reason|>": ("template", "<|reason|>", "<|/reason|>"),
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant": ("harmony", "", ""),
}


@pytest.mark.parametrize("marks", REASONING)
def test_reasoning_is_found_where_the_template_writes_it(marks: str) -> None:
    name, opening, closing = REASONING[marks]
    given = "m.reasoning_content or m.thinking or m.reasoning" if name != "template" else "m.reasoning"
    chat = found(template("", "", content="{% if " + given + " %}" + marks + "{% endif %}" + PLAIN))
    format = reasoning_format(chat.traits)
    assert format is not None and format.name == name
    assert not opening or (format.opening, format.closing) == (opening, closing)
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert "Hm." in rendered(chat, [USER, said], ())


def test_reasoning_is_found_where_a_template_opens_removes_or_switches_it() -> None:
    opens = template("", "").replace("assistant\\n'", "assistant\\n<think>\\n'")
    removes = template("", "", content="{{ m.content.split('</think>')[-1] }}")
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}{% endif %}"
    switches = template("", "").removesuffix("{% endif %}") + switch
    empty = template("", "", content="{% if m.role == 'assistant' %}<think></think>{% endif %}" + PLAIN)
    for source in (opens, removes, switches, empty):
        assert reasoning_format(found(source).traits) == reasoning_format(found(opens).traits) is not None


CALL = {"id": "call_12", "type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize(
    ("content", "call"),
    [
        ("{{ m.content.strip() }}", JSON),  # null and absent fail
        ("{% if m.content is none %}{% elif '' in m.content %}{{ m.content }}{% endif %}", JSON),
        ("{% if not (m.tool_calls and m.content is none) %}{{ m.content }}!{% endif %}", JSON),  # only null is right
        ("{% if m.tool_calls and m.content is defined %}{{ raise_exception('both') }}{% endif %}{{ m.content }}", JSON),
        (PLAIN, "{{ f.arguments + '' }}"),  # objects fail
    ],
)
def test_the_services_own_reply_goes_back(content: str, call: str) -> None:
    """Calls with null, empty or absent content are passed in the form that the template accepts."""
    chat = found(template("", "<fn={{ f.name }}>" + call + "</fn>", content=content))
    assert chat.traits.tool_format == "template", chat.traits
    for said in ({}, {"content": ""}, {"content": None}):
        text = rendered(chat, [USER, {"role": "assistant", "tool_calls": [CALL], **said}])
        assert text.endswith('assistant\n<fn=f>{"city": "Oslo"}</fn><|im_end|>\n'), said


def test_ids_and_names_are_given_as_templates_want_them() -> None:
    asks = "{% if m.tool_calls and m.tool_calls[0].id | length != 9 %}{{ raise_exception('9') }}{% endif %}" + PLAIN
    assert found(HERMES.replace(PLAIN, asks)).traits.ids is CallIds.SHORT
    numbered = found(
        template("", "<|call|>{{ c.id }}<|args|>" + JSON + "<|end|>", content=PLAIN + "{{ m.tool_call_id }}")
    )
    assert numbered.traits.ids is CallIds.NUMBERED or numbered.traits.tools_problem
    needs_name = "{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}" + PLAIN
    chat = found(HERMES.replace(PLAIN, needs_name))
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "7", "tool_call_id": "call_12"},
    ]
    assert "tool\nf: 7" in rendered(chat, messages)


def test_tools_without_descriptions_get_empty_ones_where_the_template_needs_them() -> None:
    lists = (
        "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
        "{% for k, v in t.function.parameters.properties.items() %}{{ k + v.description }}{% endfor %}{% endfor %}"
    )
    bare = Tool("f", None, TOOL.parameters)
    assert "f: cityn" in rendered(found(lists + HERMES), [USER], (bare, Tool("g", None, None)))
    assert '"description"' not in rendered(found(HERMES), [USER], (bare,))


def test_text_goes_in_parts_where_templates_show_no_other() -> None:
    """Templates of models that read images too, which would iterate over a string's letters."""
    parts = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    chat = found(template("", "", content=parts))
    assert "user\nHi<|im_end|>" in rendered(chat, [USER], ())
    app = app_of(parts.join(("{% for m in messages %}{{ m.role }}:", "{% endfor %}")))
    said = [USER, {"role": "assistant", "content": "So "}]
    assert ask(app, "POST", "/v1/chat/completions", json=BODY | {"messages": said, **CONTINUES}).status_code == 200
    assert prompt_of(app) == "user:Hiassistant:So "


def test_content_and_calls_of_a_message_both_reach_the_prompt() -> None:
    """Also where the template shows one of them alone, and where it reads no tools."""
    calls = "{% for c in m.tool_calls %}<fn={{ c.function.name }}>{{ c.function.arguments | tojson }}</fn>{% endfor %}"
    either = "{% if m.content %}{{ m.content }}{% else %}" + calls + "{% endif %}"
    for reads_tools in ("{{ tools | tojson }}", ""):
        chat = found(reads_tools + "{% for m in messages %}{{ m.role }}:" + either + ";{% endfor %}")
        asked = [USER, {"role": "assistant", "content": "See.", "tool_calls": [CALL]}]
        text = rendered(chat, asked, (TOOL,) if reads_tools else ())
        assert text.endswith('assistant:See.;assistant:<fn=f>{"city": "Oslo"}</fn>;')
        assert '"name": "f"' in rendered(chat, asked)  # the tools are shown in any case


def test_content_with_a_mark_of_its_own_is_parted_without_tools_too() -> None:
    app = app_of(CALLS["text joined to arguments"][0])
    says(app, "all\nHello")
    reply = ask(app, "POST", "/v1/chat/completions", json=BODY | {"max_tokens": 20}).json()
    assert reply["choices"][0]["message"]["content"] == "Hello"


def test_probing_a_hostile_template_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts full of marks, and renderings that take long: nothing is found out, and the model is served."""
    began = time.monotonic()
    marks = "{% if messages | length > 1 %}{{ '<tool_call>{' * 15000 }}{% endif %}{{ tools }}{{ messages[0].content }}"
    assert found(marks).traits.tools_problem
    monkeypatch.setattr(template_probe, "_RENDER_SECONDS", 0.5)
    slow = "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    assert found(slow + "{{ messages[0].content }}").traits.tools_problem
    assert time.monotonic() - began < 20


def test_results_may_come_in_parts_and_calls_as_null() -> None:
    app = app_of(HERMES)
    call = CALL | {"function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_12", "content": [{"type": "text", "text": "7"}]}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    messages += [{"role": "assistant", "content": "So.", "tool_calls": None}, USER]
    assert (
        ask(app, "POST", "/v1/chat/completions", json=BODY | {"messages": messages, "tools": TOOLS}).status_code == 200
    )
    assert "<|im_start|>tool\n7<|im_end|>" in prompt_of(app)


def app_of(source: str) -> App:
    return make_app(talker(source), max_model_len=8_192)


BODY = {"model": "chat", "messages": [USER], "max_tokens": 1}
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_tools_are_refused_where_no_call_can_be_read_back() -> None:
    app = app_of(template("", "{{ f.name | reverse }}"))
    post = partial(ask, app, "POST", "/v1/chat/completions")
    error = check_error(post(json=BODY | {"tools": TOOLS}), 400, "tools", "not_supported")
    assert "leaves calls out" in error["message"] and "--tool-format" in error["message"]
    called = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{}"}}]},
    ]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"messages": called}):
        assert post(json=BODY | fields).status_code == 200, fields
    [model] = [one for one in ask(app, "GET", "/info").json()["models"] if one["name"] == "chat"]
    assert model["chat"] == {
        "serves": True,
        "problem": "its chat template leaves calls out",
        "tools": None,
        "reasoning": None,
    }


def test_a_template_without_a_mark_after_names_of_arguments_is_read() -> None:
    types = "{{ 'string' if v is string else 'number' }}"
    keys = "{% for k, v in f.arguments.items() %}<a>{{ k }} " + types + ">{{ v }}</a>{% endfor %}"
    chat = found(template("", "<call>{{ f.name + '\n' }}" + keys + "</call>"))
    assert "of no known format" in chat.traits.tools_problem


def bare_model(tmp_path: Path) -> Path:
    """Write a folder that `read_model` reads: a config.json, and weights that are not read."""
    folder = tmp_path / "folder"
    folder.mkdir()
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 9, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")  # which is not read here
    return folder


def test_a_model_whose_template_cannot_be_used_serves_all_else(tmp_path: Path) -> None:
    folder = bare_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ nothing.x.y }}")
    read = read_model(ModelSpec("chat", str(folder)))
    problem = read.chat_problem
    assert read.chat is None and problem.startswith("model chat: folder: the chat template does not render")
    plain = talker(HERMES)
    app = make_app(ServedModel("chat", plain.checkpoint, plain.tokenizer, chat_problem=problem))
    error = check_error(ask(app, "POST", "/v1/chat/completions", json=BODY), 400, "model", "no_chat_template")
    assert error["message"].startswith(problem)
    generated = ask(app, "POST", "/generate", json={"model": "chat", "prompt": "a", "max_tokens": 1})
    assert generated.status_code == 200


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer_config.json", '{"chat_template": [{"name": ["x"], "template": "a"}]}', "must be a text, a list of"),
        ("tokenizer_config.json", '{"chat_template": [{"name": {}}]}', "must be a text, a list of"),
        ("tokenizer_config.json", '{"chat_template": {"a\\nb": "x"}}', "(a b) have none called default"),
        ("chat_template.jinja", "a" * 4_000_001, "chat_template.jinja has more than 1,000,000 characters"),
        (
            "chat_template.jinja",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "is a Git LFS pointer: run",
        ),
        ("chat_template.jinja", "a" * 1_000_001, "more than 32 chat templates of 1,000,000 characters"),
    ],
)
def test_templates_of_another_form_are_refused_in_one_line(file: str, text: str, message: str, tmp_path: Path) -> None:
    folder = bare_model(tmp_path)
    (folder / file).write_text(text)
    problem = read_model(ModelSpec("chat", str(folder))).chat_problem
    assert message in problem and "\n" not in problem and len(problem) < 700
    assert chat_abilities(None, problem)["problem"] == problem


def test_the_table_in_the_docs_is_that_of_the_formats() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    shown = [f"| `{one.name}` | {one.models} |" for one in TOOL_FORMATS.values()]
    assert [row for row in rows if row in shown] == shown and text.count("\n".join(shown)) == 1
