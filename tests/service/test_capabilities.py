"""What models of each kind can do: every example that they show is answered, and a card's text is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.dialects.support import chat_app
from tests.service.encode_models import client_of, encode_app
from tests.service.speech import served_speech
from tests.service.support import App, ask, make_app
from triptych.service.planning.capabilities import capabilities, choices
from triptych.service.runtimes.model_reader import card_examples

ENCODERS = {
    "bert": ["embed", "rerank"],
    "bert-masked": ["fill", "embed", "rerank", "embed_sparse"],
    "bert-sequence": ["classify"],
    "bert-nli": ["classify", "zero_shot", "decide"],
    "bert-entities": ["tag"],
    "bert-answers": ["answer"],
    "vit": ["embed_image"],
    "vit-image": ["classify_image", "embed_image"],
}


def test_every_example_of_an_encoder_is_answered() -> None:
    with client_of(encode_app(*ENCODERS)) as client:
        found = {one["name"]: one["capabilities"] for one in client.get("/info").json()["models"]}
        assert {name: [one["name"] for one in able] for name, able in found.items()} == ENCODERS
        for one in (one for able in found.values() for one in able):
            reply = client.post(one["path"], **one["body"])
            assert reply.status_code == 200, (one, reply.text)


def test_examples_of_models_that_write() -> None:
    """A chat model is asked in a chat, not by a raw prompt; a model without a tokenizer gets token ids."""
    app = chat_app(max_model_len=512)
    shown = {one["name"]: one["capabilities"] for one in ask(app, "GET", "/info").json()["models"]}
    assert [one["name"] for one in shown["chat"]] == ["chat", "complete", "decide"]
    for able in shown.values():
        for one in able:
            assert ask(app, "POST", one["path"], json=one["body"]).status_code == 200, one
    app = make_app("bare")
    (shown,) = (one["capabilities"] for one in ask(app, "GET", "/info").json()["models"] if one["name"] == "bare")
    assert shown[0]["body"]["prompt"] == [0, 1, 2]
    assert ask(app, "POST", "/generate", json=shown[0]["body"]).status_code == 200


def test_speech_shows_a_command_that_pipes_the_sample() -> None:
    (first, *_) = capabilities(served_speech())
    line = first.curl("http://x", with_key=True)
    assert line.startswith("curl -s http://x/sample.flac -H") and "| curl http://x/v1/audio/transcriptions" in line
    assert line.endswith("-F 'model=speech' -F 'file=@-'") and line.count("$TRIPTYCH_API_KEY") == 2


def test_the_documentation_names_a_model_that_can(app: App) -> None:
    """A route that no served model answers says what it needs; the others name a model that has the ability."""
    found = choices(app.served.values())
    assert (found["complete"].model, found["rewrite"].model, found["embed"].model) == ("gen", "seq", "enc")
    assert "chat" not in found
    paths = ask(app, "GET", "/openapi.json").json()["paths"]
    shown = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["examples"]["openai"]
    assert shown["x-needs"] == "has a chat template" and shown["value"]["model"] == "MODEL"


@pytest.mark.parametrize(
    ("card", "texts"),
    [
        ("---\nwidget:\n- text: Hello\n- text: Other\n---\n# m\n", ("Hello", "Other")),
        ('---\r\nwidget:\r\n  - text: "a\\n"\r\n---\r\n', ("a\n",)),
        ("---\nwidget: [Hello]\n---\n", ("Hello",)),
        ("---\nwidget: 3\n---\n", ()),
        ("---\nwidget: [{text: 3}, {src: x}]\n---\n", ()),
        ("---\n: [\n---\n", ()),
        ("# m\n---\nwidget: [x]\n---\n", ()),
        (f"---\nwidget: [{'x' * 500}]\n---\n", ()),
        (f"---\n{'[' * 5000}\n---\n", ()),
        ("---\nwidget: !!bool x\n---\n", ()),
        ("---\nwidget: !!timestamp x\n---\n", ()),
    ],
)
def test_the_examples_of_a_card(card: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert card_examples(tmp_path) == card_examples(tmp_path / "model.gguf") == texts
    assert card_examples(tmp_path / "none" / "model.gguf") == ()
