"""Chat templates: the same texts as transformers gives, and limits of time, memory and size for hostile ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tests.service.dialects.support import LINES, STYLES, TOKENS, TURNS, chat_app, prompt_of
from tests.service.support import ask, check_accounts, run
from tests.service.test_bad_requests import check_error
from triptych.model.errors import ConfigError
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.render_pool import RenderError, RenderPool, RenderWorker
from triptych.service.chat.template_files import TemplateFiles, template_files
from triptych.service.chat.template_probe import probed_template, read_chat_template
from triptych.service.core.context_bound import ContextBound
from triptych.service.settings.service_settings import Limits, ServiceSettings

HI = {"role": "user", "content": " Hi "}
SAID = {"role": "assistant", "content": "Hello!"}
RULES = {"role": "system", "content": "Be <brief> & 'kind'"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Zürich", "n": [1]}}}]}
ANSWER = {"role": "tool", "content": "<b>12°</b>", "tool_call_id": "c"}
CONVERSATIONS: list[list[dict[str, Any]]] = [[HI], [RULES, HI], [HI, SAID, HI], [RULES, HI, SAID, HI]]
SECONDS = 1.0  # limit of hostile templates; others get as long as a busy machine takes


@pytest.fixture(scope="module")
def worker() -> Iterator[RenderWorker]:
    made = RenderWorker(20.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[RenderWorker]:
    made = RenderWorker(SECONDS)
    yield made
    made.close()


def reference(source: str) -> PreTrainedTokenizerFast:
    raw = RawTokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=source, **TOKENS)


def rendered(worker: RenderWorker, source: str, messages: list[dict[str, Any]], *, speak: bool = False) -> str:
    variables = ChatTemplate(source, TOKENS, frozenset()).variables(messages, add_generation_prompt=speak)
    return worker.render(source, variables, 10_000)


@pytest.mark.parametrize("speak", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_texts_are_the_reference_librarys(worker: RenderWorker, style: str, speak: bool) -> None:
    source = STYLES[style]
    library = reference(source)
    conversations = CONVERSATIONS + ([[HI, CALL, ANSWER]] if style == "lines" else [])
    for messages in conversations:
        expected = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=speak)
        assert rendered(worker, source, messages, speak=speak) == expected


def test_helpers_are_the_reference_librarys(worker: RenderWorker) -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if loop.first %}{% continue %}"
        "{% endif %}{{ m | tojson(indent=2) }}{{ m.content | trim }}{% break %}{% endfor %}{{ ns.n }}"
        "{{ dict(a='<é>') | tojson }}{{ dict.fromkeys('ab', 1) }}{{ strftime_now('%Y') }}"
        "{{ tools is none }}{{ documents is none }}"
        "{{ pad_token is defined }}{{ nothing }}{% generation %} ok {% endgeneration %}\n"
    )
    expected = reference(source).apply_chat_template([RULES, HI, SAID], tokenize=False)
    assert rendered(worker, source, [RULES, HI, SAID]) == expected


def test_a_refusal_of_the_template_itself(worker: RenderWorker) -> None:
    with pytest.raises(RenderError, match="take turns") as caught:
        rendered(worker, STYLES["brackets"], [HI, HI])
    assert caught.value.kind == "raised"


@pytest.mark.parametrize("style", STYLES)
def test_a_continued_message_is_the_reference_librarys(style: str) -> None:
    source = STYLES[style]
    messages = [HI, {"role": "assistant", "content": "and then "}]
    expected = reference(source).apply_chat_template(messages, tokenize=False, continue_final_message=True)

    async def work() -> str:
        pool = RenderPool(20)
        try:
            return await ChatTemplate(source, TOKENS, frozenset()).continued(
                pool, messages, ContextBound(10_000, 1, 10_000)
            )
        finally:
            pool.close()

    assert asyncio.run(work()) == expected


HOSTILE = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power at run time": "{% set n = messages | length + 9 %}{{ n ** (n ** n) }}",
    "one huge text": "{{ 'x' * 10 ** 10 }}",
    "doubled texts": "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "padding": "{{ 'x'.rjust(9999999999) }}{{ 'x' | center(9999999999) }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "a long list": "{{ ([1] * 9999999999) | length }}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format escape": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "indirect format": "{{ ['{0.__class__.__mro__}'] | map('format', messages) | list }}",
    "stored method": "{% set f = '{0.__class__.__mro__}'.format %}{{ f(messages) }}",
    "attr filter": "{{ (messages | attr('__class__')).__mro__ }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "mutation": "{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "half a character": "{{ '\\ud800' }}",
    "not a template": "{% if %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_time_and_yield_nothing(impatient: RenderWorker, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RenderError) as caught:
        impatient.render(HOSTILE[name], {"messages": [HI]}, 10_000)
    assert time.monotonic() - began < SECONDS + 15  # a process may be started, on a busy machine
    assert caught.value.kind in {"time", "memory", "length", "failed", "syntax", "crashed"}
    assert impatient.render("{{ 1 }}", {}, 10) == "1"


def test_a_worker_sees_no_environment_and_writes_no_file(worker: RenderWorker) -> None:
    worker.render("{{ 1 }}", {}, 10)
    process = worker._process
    assert process is not None
    names = [entry.partition("=")[0] for entry in Path(f"/proc/{process.pid}/environ").read_text().split("\0")]
    assert set(names) <= {"PYTHONPATH", ""}
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert any(line.startswith("Max file size") and line.split()[3] == "0" for line in limits.splitlines())


def test_stuck_conversations_do_not_wedge_others(end_sandboxes: Callable[[], None]) -> None:
    end_sandboxes()  # four new ones start at the same time
    source = "{% if messages[0].content == 'stuck' %}" + HOSTILE["power at run time"] + "{% endif %}" + TURNS
    app = chat_app(source, settings=ServiceSettings(limits=Limits(chat_template_s=3.0)))

    def body(content: str) -> dict[str, Any]:
        return {"model": "chat", "messages": [{"role": "user", "content": content}], "max_tokens": 1}

    async def work(client: httpx.AsyncClient) -> None:
        path = "/v1/chat/completions"
        await asyncio.gather(*(client.post(path, json=body("free")) for _ in range(4)))  # starts the processes
        stuck = [asyncio.create_task(client.post(path, json=body("stuck"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (await client.post(path, json=body("free"))).status_code == 200
        assert not any(task.done() for task in stuck)
        for reply in await asyncio.gather(*stuck):
            error = check_error(reply, 400, "messages", "chat_template")
            assert "more than 3 s" in error["message"]

    run(app, work)
    check_accounts(app)


def test_a_prompt_longer_than_the_context_is_not_made() -> None:
    app = chat_app("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}")
    reply = ask(app, "POST", "/v1/chat/completions", json={"model": "chat", "messages": [HI]})
    check_error(reply, 400, "messages", "context_length_exceeded")


class HeldPool(RenderPool):
    """A pool that renders once it is released."""

    def __init__(self) -> None:
        super().__init__(20.0)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def render(self, source: str, variables: Mapping[str, Any], limit: int) -> str:
        self.asked.set()
        await self.go.wait()
        return await super().render(source, variables, limit)


def test_a_drain_waits_for_what_is_being_rendered() -> None:
    app = chat_app()
    app.service.renderers = pool = HeldPool()

    async def work(client: httpx.AsyncClient) -> None:
        body = {"model": "chat", "messages": [HI], "max_tokens": 2}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await pool.asked.wait()
        drained = asyncio.create_task(app.service.drain())
        await asyncio.sleep(0)
        pool.go.set()
        await drained
        assert (await asked).status_code == 200

    run(app, work)
    check_accounts(app)


def folder(path: Path, **files: object) -> Path:
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_sources_of_a_chat_template(tmp_path: Path) -> None:
    """The order is the reference's: .jinja files, tokenizer_config.json in its three forms, chat_template.json."""
    assert read_chat_template(tmp_path) is None
    folder(tmp_path, chat_template__json={"chat_template": "{{ messages[0].content }}"})
    found = template_files(tmp_path)
    assert found is not None and found.templates == {"default": "{{ messages[0].content }}"}
    eos = {"content": "</s>", "lstrip": False}
    folder(tmp_path, special_tokens_map__json={"bos_token": "<s>", "eos_token": eos})
    folder(tmp_path, tokenizer_config__json={"chat_template": LINES, "eos_token": "old", "pad_token": None})
    assert template_files(tmp_path) == TemplateFiles({"default": LINES}, TOKENS)
    template = read_chat_template(tmp_path)
    assert template is not None and template.names == {"messages", "eos_token", "add_generation_prompt"}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TURNS}]
    for value in (several, {one["name"]: one["template"] for one in several}):
        folder(tmp_path, tokenizer_config__json={"chat_template": value})
        found = template_files(tmp_path)
        assert found is not None and found.templates == {"tool_use": "x", "default": TURNS}
    folder(tmp_path, chat_template__jinja=STYLES["brackets"])
    (tmp_path / "additional_chat_templates").mkdir()
    folder(tmp_path / "additional_chat_templates", rag__jinja="y")
    found = template_files(tmp_path)
    assert found is not None and found.templates == {"default": STYLES["brackets"], "rag": "y"}


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "name": "<s>"},
        {"role": "tool", "name": "<s>", "tool_call_id": "<s>"},
        {"role": "function", "name": "<s>"},
        {"role": "<s>", "name": "f"},
    ],
)
def test_what_others_spell_is_text_in_names_and_roles_too(fields: dict[str, str]) -> None:
    source = "{% for m in messages %}{{ m.role }} {{ m.name }}{{ m.tool_call_id }}: {{ m.content }}{% endfor %}"
    app = chat_app(source, max_model_len=99)
    body = {"model": "chat", "messages": [{**fields, "content": "<s>"}], "max_tokens": 1}
    reply = ask(app, "POST", "/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert prompt_of(app).count("<s>") == 2 and 256 not in app.client.submitted[-1].prompt_token_ids


def test_conversations_with_tools_use_the_template_for_them() -> None:
    files = TemplateFiles({"default": "plain", "tool_use": "{{ tools }}{{ messages[0].content }}"}, {})
    template = probed_template(files, "model")
    assert template.chosen(with_tools=False).source == "plain"
    assert template.chosen(with_tools=True).source == files.templates["tool_use"]
    assert "leaves calls out" in template.chosen(with_tools=True).traits.tools_problem
    broken = probed_template(TemplateFiles({"default": "plain", "tool_use": "{% if %}"}, {}), "model")
    assert "tool_use" in broken.chosen(with_tools=True).traits.tools_problem


def test_a_request_may_set_what_the_template_reads_from_outside() -> None:
    source = (
        "{% for message in messages %}{{ message.depth }}{% set shown = 'style' %}{{ shown }}{% endfor %}"
        "{% if not tone is defined %}{% set tone = 'dry' %}{% endif %}{{ tone }}{{ strftime_now('%d') }}"
    )
    template = probed_template(TemplateFiles({"default": source}, {}), "model")
    names = ("tone", "message", "depth", "shown", "style", "strftime_now", "messages")
    assert [name for name in names if template.takes(name)] == ["tone"]


def test_templates_read_the_special_tokens_that_only_a_tokenizer_has(tmp_path: Path) -> None:
    tokens = {"boi_token": "<img>", "extra_special_tokens": {"audio_token": {"content": "<au>"}}, "add_bos_token": True}
    source = "{{ boi_token }}{{ audio_token }}{{ messages[0].content }}{{ tone }}"
    template = read_chat_template(folder(tmp_path, tokenizer_config__json={"chat_template": source, **tokens}))
    assert template is not None and template.tokens == {"boi_token": "<img>", "audio_token": "<au>"}
    assert [name for name in ("boi_token", "audio_token", "tone") if template.takes(name)] == ["tone"]


@pytest.mark.parametrize(
    "value",
    [7, ["x"], {"default": 7}, {"other": "x"}, [{"name": "other", "template": "x"}], "{% if %}", "{{ nothing.x.y }}"],
)
def test_a_bad_template_is_found_when_it_is_loaded(tmp_path: Path, value: object) -> None:
    folder(tmp_path, tokenizer_config__json={"chat_template": value})
    with pytest.raises(ConfigError, match=r"chat.template"):
        read_chat_template(tmp_path)


def test_a_template_may_refuse_the_first_conversation(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config__json={"chat_template": "{{ raise_exception('a system message is needed') }}"})
    assert read_chat_template(tmp_path) is not None
