"""Pictures in prompts over HTTP: the tokens of `transformers`, by the official clients, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import torch
from PIL import Image

from tests.model.test_images import file, picture
from tests.service.browser import CHROMEDRIVER, CHROMIUM, chromium, eventually
from tests.service.encode_models import Client, client_of
from tests.service.picture_chats import (
    ASKED,
    FILES,
    MARK,
    TOKENS,
    app_of,
    claude_part,
    coded,
    make_folder,
    openai_part,
    url_of,
    words,
)
from tests.service.support import live
from tests.service.test_bad_requests import check_error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with client_of(app_of(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Return a function: messages and files to the prompt's length and the text that `transformers` generates."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).float().eval()

    @torch.inference_mode()
    def generate(messages: list[Any], files: list[bytes]) -> tuple[int, str]:
        images = [Image.open(BytesIO(one)).convert("RGB") for one in files]
        given = processor(images, return_tensors="pt")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = text.split(MARK)
        rows = [int(one.prod()) // 4 for one in given["image_grid_thw"]]
        text = pieces[0] + "".join(MARK * count + piece for count, piece in zip(rows, pieces[1:], strict=True))
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        kinds = (inputs["input_ids"] == model.config.image_token_id).int()
        out = model.generate(**inputs, **given, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=TOKENS)
        length = inputs["input_ids"].shape[1]
        return length, tokenizer.decode(out[0, length:], skip_special_tokens=True)

    return generate


SAID: list[Any] = [{"type": "image"}, words("What"), {"type": "image"}, words(" is it?")]


@pytest.fixture(scope="module")
def answer(expected: Any) -> tuple[int, str]:
    """Return the length of a prompt of two pictures, and its answer."""
    found: tuple[int, str] = expected([{"role": "user", "content": SAID}], FILES)
    return found


@pytest.fixture(autouse=True)
def no_picture_is_held(client: Client) -> Iterator[None]:
    yield
    assert client.images.held_bytes == 0


def test_openai(client: Client, answer: tuple[int, str]) -> None:
    content: Any = [openai_part(FILES[0]), words("What"), openai_part(FILES[1]), words(" is it?")]
    made = openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=client.asgi())

    async def ask() -> tuple[Any, str]:
        asked: Any = {**ASKED, "messages": [{"role": "user", "content": content}]}
        whole = await made.chat.completions.create(**asked)
        pieces = [one async for one in await made.chat.completions.create(**asked, stream=True)]
        return whole, "".join(one.choices[0].delta.content or "" for one in pieces)

    for cached in (False, True):
        reply, streamed = client.run(ask())
        assert (reply.usage.prompt_tokens, reply.choices[0].message.content) == answer
        assert streamed == answer[1] and (reply.usage.prompt_tokens_details.cached_tokens > 0) == cached


def test_responses_and_what_continues_them(client: Client, answer: tuple[int, str], expected: Any) -> None:
    parts = [{"type": "input_image", "image_url": url_of(one), "detail": "auto"} for one in FILES]
    texts = [{"type": "input_text", "text": one["text"]} for one in (SAID[1], SAID[3])]
    made = openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=client.asgi())

    async def ask() -> tuple[Any, Any, Any]:
        given: Any = [{"role": "user", "content": [parts[0], texts[0], parts[1], texts[1]]}]
        asked: Any = {"model": "seeing", "max_output_tokens": TOKENS, "temperature": 0}
        first = await made.responses.create(input=given, **asked)
        second = await made.responses.create(input="And?", previous_response_id=first.id, **asked)
        return first, second, await made.responses.input_items.list(first.id)

    first, second, items = client.run(ask())
    assert (first.usage.input_tokens, first.output_text) == answer
    turns = [{"role": "user", "content": SAID}, {"role": "assistant", "content": first.output_text}]
    assert (second.usage.input_tokens, second.output_text) == expected(
        [*turns, {"role": "user", "content": "And?"}], FILES
    )
    [item] = items.data
    assert [one.type for one in item.content] == ["input_image", "input_text"] * 2
    assert item.content[0].image_url == url_of(FILES[0])


def test_anthropic_and_its_counts(client: Client, answer: tuple[int, str]) -> None:
    content: Any = [claude_part(FILES[0]), words("What"), claude_part(FILES[1]), words(" is it?")]
    own = httpx2.AsyncClient(transport=httpx2.ASGITransport(client.app))
    made = anthropic.AsyncAnthropic(base_url="http://test", api_key="any", http_client=own)

    async def ask() -> tuple[Any, Any]:
        messages: Any = [{"role": "user", "content": content}]
        count = await made.messages.count_tokens(model="seeing", messages=messages)
        asked: Any = {"model": "seeing", "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
        return count, await made.messages.create(**asked, messages=messages)

    count, reply = client.run(ask())
    usage = reply.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens == answer[0]
    assert reply.content[0].text == answer[1]


def test_the_result_of_a_tool_may_be_a_picture(client: Client, expected: Any) -> None:
    """The template has no tools, so the result becomes a message of the user."""
    called = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [claude_part(FILES[0])]}
    messages = [{"role": one, "content": [part]} for one, part in (("assistant", called), ("user", result))]
    reply = client.post("/v1/messages", **ASKED, messages=[{"role": "user", "content": "Look"}, *messages]).json()
    shown = [words("Result of look:\n"), {"type": "image"}]
    call = '[{"name": "look", "arguments": {}}]'
    turns = [("user", "Look"), ("assistant", call), ("user", shown)]
    length, text = expected([{"role": role, "content": content} for role, content in turns], FILES[:1])
    assert (reply["usage"]["input_tokens"], reply["content"][0]["text"]) == (length, text)


def test_ollama_puts_pictures_before_the_text(client: Client, expected: Any) -> None:
    content = [{"type": "image"}, {"type": "image"}, words("What?")]
    length, text = expected([{"role": "user", "content": content}], FILES)
    images, settings = list(map(coded, FILES)), {"temperature": 0, "num_predict": TOKENS}
    common = {"model": "seeing", "stream": False, "options": settings}
    chat = client.post("/api/chat", messages=[{"role": "user", "content": "What?", "images": images}], **common).json()
    written = client.post("/api/generate", prompt="What?", images=images, **common).json()
    assert (chat["prompt_eval_count"], chat["message"]["content"]) == (length, text)
    assert (written["prompt_eval_count"], written["response"]) == (length, text) and "context" not in written
    assert "vision" in client.post("/api/show", model="seeing").json()["capabilities"]


def test_a_prompt_without_a_template_has_the_marks(client: Client, answer: tuple[int, str]) -> None:
    seen = f"<|vision_start|>{MARK}<|vision_end|>"
    prompt = f"<|im_start|>user\n{seen}What{seen} is it?<|im_end|>\n<|im_start|>assistant\n"
    given = {"model": "seeing", "max_tokens": TOKENS, "temperature": 0.0, "prompt": prompt}
    reply = client.post("/generate", **given, images=list(map(coded, FILES)), n=2).json()
    assert {one["text"] for one in reply["choices"]} == {answer[1]} and reply["usage"]["prompt_tokens"] == answer[0]
    [echoed] = client.post("/generate", **given, images=list(map(coded, FILES)), echo=True).json()["choices"]
    assert echoed["text"] == prompt + answer[1]
    low = client.post("/generate", **given, images=list(map(coded, FILES)), image_detail="low").json()
    assert low["usage"]["prompt_tokens"] <= answer[0]


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_mark_in_a_text_is_text(role: str, client: Client) -> None:
    def tokens(content: str) -> int:
        messages = [{"role": role, "content": content}, {"role": "user", "content": [openai_part(FILES[0])]}]
        reply = client.post("/v1/chat/completions", **ASKED, messages=messages).json()
        return int(reply["usage"]["prompt_tokens"])

    assert tokens(MARK) == tokens("") + len(MARK)


def test_a_mark_in_a_call_and_in_a_tool_is_text(client: Client) -> None:
    def tokens(mark: str) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": mark})}}
        messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": [openai_part(FILES[0])]}]
        tool = {"type": "function", "function": {"name": "f", "description": mark}}
        reply = client.post("/v1/chat/completions", **ASKED, messages=messages, tools=[tool])
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens"])

    assert tokens(MARK) == tokens("") + 2 * len(MARK)


CHAT, GENERATE, URL = "/v1/chat/completions", "/generate", "http://127.0.0.1:9/x.png"
BROKEN = openai_part(FILES[0][:900])


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, said(words("a"), openai_part(FILES[0])) | {"model": "blind"}, "", "has no chat template"),
        (CHAT, said(BROKEN), "messages[0].content[0].image_url.url", "the image file is broken"),
        (CHAT, said({"type": "image_url", "image_url": URL}), "messages[0].content[0].image_url", "no addresses"),
        (CHAT, said(openai_part(FILES[0], detail="x")), "messages[0].content[0].image_url.detail", "auto"),
        (CHAT, said(openai_part(FILES[0]), role="system"), "messages[0].content[0].image_url.url", "users and tools"),
        (CHAT, said(*[openai_part(b"")] * 257), "messages[0].content[256].image_url.url", "256 images"),
        (CHAT, said(*[openai_part(FILES[0])] * 40), "messages", "images of more than"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
         "input[0].content[0].image_url", "no addresses"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["AAAA"]}]}, "", "messages[0].images[0]: not an image"),
        ("/api/generate", {"prompt": "a", "images": ["AAAA"], "raw": True}, "", "images and raw exclude each other"),
        (GENERATE, {"prompt": "a", "images": [coded(FILES[0])], "model": "blind"}, "images[0]", "blind reads text"),
        (GENERATE, {"prompt": "a", "images": [coded(FILES[0])], "model": "reading"}, "images[0]", "reading reads text"),
        (GENERATE, {"prompt": f"{MARK} {MARK}", "images": [coded(FILES[0])]}, "prompt", "2 of <|image_pad|>"),
        (GENERATE, {"prompt": ["a"], "images": [coded(FILES[0])]}, "images", "must be one text"),
        (GENERATE, {"prompt": "a", "image_detail": "low"}, "image_detail", "needs images"),
        (GENERATE, {"prompt": MARK}, "prompt", "1 tokens 260, which stand for images; the images have 0"),
        ("/v1/completions", {"prompt": [1, 260, 260]}, "prompt", "2 tokens 260"),
    ],
)  # fmt: skip
def test_what_is_refused(path: str, fields: dict[str, Any], param: str, words: str, client: Client) -> None:
    reply = client.post(path, **({"model": "seeing"} | fields))
    if path.startswith("/api/"):
        assert reply.status_code == 400 and words in reply.json()["error"]
    else:
        status = 413 if "256 images" in words else 400
        assert words in check_error(reply, status, param or reply.json()["error"]["param"])["message"]


def test_every_curl_of_the_page_is_answered(client: Client) -> None:
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text()
    lines = re.findall(r"curl -s http://127\.0\.0\.1:8000(/\S+) .*\n\s+-d '(.*\"seeing\".*)'", page)
    assert len(lines) == 5
    for path, text in lines:
        reply = client.post(path, **json.loads(text.replace("'$IMAGE'", coded(FILES[1]))))
        assert reply.status_code == 200, (text, reply.text)


def test_the_ability_and_its_request(client: Client) -> None:
    models = {one["name"]: one for one in client.get("/info").json()["models"]}
    [ability] = [one for one in models["seeing"]["capabilities"] if one["name"] == "chat_image"]
    assert client.post(ability["path"], **ability["body"]).status_code == 200
    for name in ("blind", "reading"):
        assert "chat_image" not in [one["name"] for one in models[name]["capabilities"]]


def test_addresses_in_anthropics_form_are_refused(client: Client) -> None:
    block = {"type": "image", "source": {"type": "url", "url": URL}}
    reply = client.post("/v1/messages", **ASKED, messages=[{"role": "user", "content": [block]}])
    assert reply.status_code == 400 and "source.url is not supported" in reply.json()["error"]["message"]


_GIVEN = """const text = atob(arguments[0]), given = new DataTransfer();
given.items.add(new File([Uint8Array.from(text, (one) => one.charCodeAt(0))], "a.png", {type: "image/png"}));
const on = document.getElementById("message"), kind = arguments[1], at = {bubbles: true, cancelable: true};
on.dispatchEvent(kind === "drop" ? new DragEvent("drop", {dataTransfer: given, ...at})
  : new ClipboardEvent("paste", {clipboardData: given, ...at}));"""


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMEDRIVER and CHROMIUM), reason="needs chromium and chromedriver")
def test_the_playground_takes_pictures(folder: Path, tmp_path: Path, answer: tuple[int, str]) -> None:
    app = app_of(folder)
    (tmp_path / "one.jpg").write_bytes(FILES[1])
    shown = "return document.querySelectorAll('{} img').length"
    (tmp_path / "profile").mkdir()
    with live(app) as url, chromium(tmp_path / "profile") as browser:
        browser.open(url)
        eventually(lambda: browser.text(".model b"))
        assert browser.run("return document.getElementById('picture').checkVisibility()")
        browser.run(_GIVEN, coded(FILES[0]), "paste")
        eventually(lambda: browser.run(shown.format("#attached")) == 1)
        browser.run(_GIVEN, coded(FILES[0]), "drop")
        eventually(lambda: browser.run(shown.format("#attached")) == 2)
        browser.press("#picture", str(tmp_path / "one.jpg"))
        eventually(lambda: browser.run(shown.format("#attached")) == 3)
        browser.click("#attached figure:first-child button")
        assert browser.run(shown.format("#attached")) == 2
        assert '"$(base64 -w0 picture1.png)"' in browser.text("#chat-curl")
        browser.type("#chat [name=max_tokens]", "4")
        browser.type("#message", "What?")
        browser.click("#send")
        eventually(lambda: browser.text("#chat-facts") or browser.text("#error"))
        assert browser.text("#chat-facts").startswith("length"), browser.text("#error")
        assert browser.run(shown.format("#turns")) == 2 and browser.run(shown.format("#attached")) == 0
        assert browser.console() == []
        (tmp_path / "thin.png").write_bytes(file(picture(1, 999)))
        browser.press("#picture", str(tmp_path / "thin.png"))
        eventually(lambda: browser.run(shown.format("#attached")) == 1)
        browser.type("#message", "And this?")
        browser.click("#send")
        eventually(lambda: "times as long as the other" in browser.text("#error"))  # it may be changed and sent again
        assert browser.run("return document.getElementById('message').value") == "And this?"
        assert browser.run(shown.format("#turns")) == 2 and browser.run(shown.format("#attached")) == 1
        assert len(browser.console()) == 1  # the 400
        browser.run("document.querySelector('input[value=blind]').click()")
        eventually(lambda: not browser.run("return document.getElementById('picture').checkVisibility()"))
