"""The pages, `GET /` and `/docs`: what is served, and what a person can do with them in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium, eventually
from tests.service.dialects.support import calling_app, chat_app, prompt_of, says
from tests.service.encode_models import encode_app
from tests.service.speech import TRANSLATE, at, ids, speech_app
from tests.service.support import App, ask, check_accounts, live, make_app
from tests.service.test_bad_requests import check_error
from triptych.service.settings.service_settings import Limits, ServiceSettings

ARROW_RIGHT, CONTROL, ENTER, ESCAPE = "\ue014", "\ue009", "\ue007", "\ue00c"
HTML = {"accept": "text/html"}
KEYS = ServiceSettings(api_keys=("canary-key", "key:with:colons"))
with_browser = pytest.mark.skipif(not (CHROMEDRIVER and CHROMIUM), reason="needs chromium and chromedriver")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_and_its_headers(app: App, path: str) -> None:
    reply = ask(app, "GET", path, headers=HTML)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["trusted-types"] == "'none'"
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    check_error(ask(app, "PUT", path, json={}), 405, None, "method_not_allowed")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_needs_nothing_from_outside(app: App, path: str) -> None:
    page = ask(app, "GET", path, headers=HTML).text
    assert set(re.findall(r"\w+://[\w.]+", page)) == {"http://www.w3.org"}  # the name of SVG, never fetched
    for outside in (
        r"\bsrc=",
        r"@import",
        r"url\((?!data:)",
        r"\son\w+=",
        r"\sstyle=",
        r"innerHTML|document\.write|eval\(",
    ):
        assert not re.search(outside, page), outside
    assert [link.startswith("data:") for link in re.findall(r"<link [^>]*href=\"([^\"]*)", page)] == [True]


def test_openapi_has_the_page_as_html(app: App) -> None:
    document = ask(app, "GET", "/openapi.json").json()
    assert list(document["paths"]["/"]["get"]["responses"]["200"]["content"]) == ["text/html", "text/plain"]


@pytest.mark.parametrize("key", KEYS.api_keys)
def test_a_key_may_be_a_basic_password(key: str) -> None:
    app = make_app(settings=KEYS)
    for path in ("/", "/info", "/docs"):
        assert ask(app, "GET", path, auth=("anybody", key)).status_code == 200
    good = {"model": "gen", "prompt": "ab", "max_tokens": 2}
    assert ask(app, "POST", "/generate", json=good, auth=("", key)).status_code == 200
    check_accounts(app)


def _basic(credentials: bytes) -> str:
    return f"Basic {base64.b64encode(credentials).decode()}"


@pytest.mark.parametrize(
    "credentials",
    [None, _basic(b"canary-key"), _basic(b"canary-key:"), _basic(b"u:canary-key2"), "Basic %%%", "Basic \xff", "Basic"],
)
def test_without_a_key_only_a_browser_is_asked_for_a_password(credentials: str | None) -> None:
    app = make_app(settings=KEYS)
    sent = {} if credentials is None else {"authorization": credentials.encode("latin-1")}
    for accept, challenge in (("*/*", "Bearer"), ("text/html,*/*", 'Basic realm="triptych", charset="UTF-8"')):
        reply = ask(app, "GET", "/", headers={"accept": accept, **sent})
        check_error(reply, 401, None, "invalid_api_key")
        assert reply.headers["www-authenticate"] == challenge
        assert "canary" not in reply.text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    microphone = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    with chromium(Path(tmp_path_factory.mktemp("profile")), *microphone) as one:
        yield one


def _open(browser: Browser, url: str, model: str) -> None:
    browser.console()
    browser.open(url)
    eventually(lambda: browser.text(".model b"))
    _choose(browser, model)


def _choose(browser: Browser, model: str) -> None:
    browser.run("document.querySelector(`input[value=${arguments[0]}]`).click()", model)


def _busy(browser: Browser) -> bool:
    return bool(browser.run("return document.getElementById('output').getAttribute('aria-busy') === 'true'"))


def _done(browser: Browser) -> str:
    """The line of facts, once the request has ended, and the error if it ended so."""
    eventually(lambda: not _busy(browser))
    return browser.text("#facts") + browser.text("#error:not([hidden])")


@with_browser
def test_type_stream_stop_and_see(browser: Browser, app: App) -> None:
    app.script.delay_s = 0.2
    with live(app) as url:
        _open(browser, url, "gen")
        browser.type("#prompt", "ab")
        browser.press("#prompt", CONTROL + ENTER)
        eventually(lambda: "hello h" in browser.text("#output"))
        assert _busy(browser)
        browser.click("#stop-button")
        assert _done(browser).startswith("stopped")
        assert re.fullmatch(r"ab(hello )+h?e?l?l?o?", browser.text("#output"))
        eventually(lambda: app.client.aborted and not app.client.running)

        app.script.delay_s = 0
        browser.type("[name=max_tokens]", "9")
        browser.click("#start")
        facts = _done(browser)
        assert browser.text("#output") == "abhello hel"
        assert facts.startswith("length") and "3 in, 9 tokens out" in facts and "first token" in facts
        assert app.client.submitted[-1].params.logprobs == 5
        assert "Authorization" not in browser.text("#curl")  # no key is asked for
        browser.press("#output", ARROW_RIGHT * 2)
        eventually(lambda: browser.text(".token.on") == "e")
        assert "60.7 %" in browser.text("#tip")  # exp(-0.5), the script's
        assert browser.run("return document.querySelectorAll('#tip li').length") == 5
        browser.press("#output", ESCAPE)
        assert browser.run("return document.getElementById('tip').hidden")
        assert browser.console() == []


@with_browser
def test_sampling_controls_and_refusals(browser: Browser, app: App) -> None:
    with live(app) as url:
        _open(browser, url, "seq")
        browser.type("#prompt", "ab")
        for name, value in dict(temperature="0.5", top_k="3", top_p="0.9", min_p="0.1", seed="7").items():
            browser.type(f"[name={name}]", value)
        browser.type("[name=stop]", "lo\\n\no h")
        browser.type("[name=repetition_penalty]", "1.5")
        browser.click("#with-logprobs")
        browser.click("#start")
        assert _done(browser).startswith("stop (o·h)")
        assert browser.text("#output") == "hell"
        params = app.client.submitted[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 3, 0.9, 0.1, 7)
        assert (params.stop, params.repetition_penalty, params.logprobs) == (("lo\n", "o h"), 1.5, None)

        for typed, words in (("99999999999999999999", "seed: "), ("x", "seed: input should be a valid integer")):
            browser.type("[name=seed]", typed)
            browser.click("#start")
            said = str(eventually(lambda: browser.text("#error:not([hidden])")))
            assert words in said and "HTTP 400" in said
            assert browser.run("return document.querySelector('[aria-invalid]').name") == "seed"

        browser.type("[name=seed]", "1")
        app.script.die_after = 3
        browser.click("#start")
        eventually(lambda: "the engine failed while it processed the request" in browser.text("#error"))
        assert _done(browser).startswith("failed")
        app.script.die_after = None


@with_browser
def test_an_empty_control_shows_what_it_means(browser: Browser) -> None:
    app = make_app(settings=ServiceSettings(limits=Limits(default_max_tokens=7)))
    app.served["seq"].checkpoint.sampling_defaults.update(max_length=9, temperature=0.25)
    with live(app) as url:
        for model, max_tokens, temperature in (("gen", "7", "0"), ("seq", "up to 8", "0.25")):
            _open(browser, url, model)
            shown = "return document.querySelector(arguments[0]).placeholder"
            assert browser.run(shown, "[name=max_tokens]") == max_tokens
            assert browser.run(shown, "[name=temperature]") == temperature
            browser.type("#prompt", "ab")
            browser.click("#start")
            assert f"in, {max_tokens.split()[-1]} tokens out" in _done(browser)
        assert browser.console() == []


@with_browser
def test_model_output_is_inserted_as_text(browser: Browser, app: App) -> None:
    said = "<img src=x onerror=1><b>é</b>"
    tokenizer = app.served["gen"].tokenizer
    assert tokenizer is not None
    app.script.token_ids = tokenizer.encode(said, add_special_tokens=False).ids
    with live(app) as url:
        _open(browser, url, "gen")
        browser.type("#prompt", "<script>")
        browser.type("[name=max_tokens]", str(len(app.script.token_ids)))
        browser.click("#start")
        _done(browser)
        assert browser.text("#output") == "<script>" + said
        assert browser.run("return document.querySelectorAll('#output :not(span), #output img').length") == 0
        assert browser.console() == []
        blocked = "try { document.body.innerHTML = '<p>'; return 'set' } catch (error) { return error.name }"
        assert browser.run(blocked) == "TypeError"


@with_browser
def test_encode_and_see_the_heat_map(browser: Browser, app: App) -> None:
    with live(app) as url:
        _open(browser, url, "enc")
        for _ in range(2):
            browser.click(".text:last-child button")
        browser.type(".text:nth-child(1) textarea", "w1 w2")
        browser.type(".text:nth-child(2) textarea", "w50")
        browser.click("#compare button.first")
        eventually(lambda: browser.text("#map tbody"))
        shown = browser.run("return [...document.querySelectorAll('#map td')].map((cell) => cell.textContent).slice(1)")
        raw = httpx.post(f"{url}/encode", json={"model": "enc", "input": ["w1 w2", "w50"]}).json()["data"]
        one, other = (item["embedding"] for item in raw)
        dot, squares = (
            sum(a * b for a, b in zip(one, other, strict=True)),
            (sum(a * a for a in v) for v in (one, other)),
        )
        cosine = f"{dot / (next(squares) * next(squares)) ** 0.5:.2f}"
        assert shown == ["1.00", cosine, cosine, "1.00"]
        assert f"closest: 1 and 2, {cosine}" in browser.text("#encode-facts")
        assert browser.console() == []

        browser.type(".text:nth-child(2) textarea", "w1 " * 20)
        browser.run("document.getElementById('compare').style.paddingTop = '2000px'; window.scrollTo(0, 1e6)")
        browser.run("document.getElementById('compare').requestSubmit()")
        eventually(lambda: "input[1] has 22 tokens" in browser.text("#error:not([hidden])"))
        assert browser.run("return document.getElementById('error').getBoundingClientRect().top >= 0")


@with_browser
def test_rank_documents(browser: Browser, app: App) -> None:
    with live(app) as url:
        _open(browser, url, "enc")
        browser.click("#tasks label:nth-child(2) input")
        for _ in range(2):
            browser.click(".text:last-child button")
        for at, text in enumerate(("w1 w2", "w50", "w1 w2 w3"), start=1):
            browser.type(f".text:nth-child({at}) textarea", text)
        browser.click("#compare button.first")
        eventually(lambda: browser.text("#map .ranks"))
        body = {"model": "enc", "query": "w1 w2", "documents": ["w50", "w1 w2 w3"]}
        best, other = httpx.post(f"{url}/v1/rerank", json=body).json()["results"]
        shown = browser.run("return [...document.querySelectorAll('.ranks li')].map((row) => row.textContent)")
        assert shown == [
            f"{one['index'] + 1}{body['documents'][one['index']]}{one['relevance_score']:.3f}" for one in (best, other)
        ]
        assert browser.console() == []
        browser.type(".text:nth-child(3) textarea", "")
        browser.click("#compare button.first")
        eventually(lambda: "documents[1]" in browser.text("#error:not([hidden])"))
        assert browser.run("return document.querySelector('[aria-invalid]').ariaLabel") == "Text 2"
        browser.click("#tasks label:first-child input")
        assert browser.run("return document.querySelectorAll('.text').length") == 4  # the other task's own texts


@with_browser
def test_fill_a_mask(browser: Browser) -> None:
    app = encode_app("bert-masked")
    with live(app) as url:
        _open(browser, url, "bert-masked")
        browser.click("#tasks label:nth-child(3) input")
        assert "[MASK]" in browser.run("return document.querySelector('.text textarea').value")
        browser.type(".text textarea", "the [MASK] sat [MASK]")
        browser.click("#compare button.first")
        eventually(lambda: browser.text("#map .ranks"))
        body = {"model": "bert-masked", "input": "the [MASK] sat [MASK]", "output": "fill_mask", "top_k": 8}
        masks = httpx.post(f"{url}/encode", json=body).json()["data"][0]["masks"]
        shown = browser.run(
            "return [...document.querySelectorAll('li > span:nth-child(2)')].map((one) => one.textContent)"
        )
        assert shown == [one["text"] for mask in masks for one in mask["candidates"]]
        assert browser.console() == []


@with_browser
def test_the_last_comparison_is_the_one_that_is_shown(browser: Browser, app: App) -> None:
    def ask_for(text: str) -> None:
        browser.type(".text:nth-child(1) textarea", text)
        browser.click("#compare button.first")

    with live(app) as url:
        _open(browser, url, "enc")
        for _ in range(2):
            browser.click(".text:last-child button")
        browser.type(".text:nth-child(2) textarea", "w50")
        app.script.delay_s = 2.0
        ask_for("w1")
        eventually(lambda: app.client.running)
        app.script.delay_s = 0.0
        ask_for("w2")
        eventually(lambda: app.client.aborted and not app.client.running)  # no client waits for the first any more
        eventually(lambda: "w2" in browser.text("#map tbody"))

        app.script.delay_s = 2.0
        ask_for("w3")
        eventually(lambda: app.client.running)
        _choose(browser, "gen")
        eventually(lambda: not app.client.running)
        _choose(browser, "enc")
        assert browser.text("#map tbody") == browser.text("#error:not([hidden])") == ""
        assert browser.console() == []


@with_browser
def test_in_a_browser_with_a_key(browser: Browser) -> None:
    app = make_app(settings=KEYS)
    with live(app) as url:
        _open(browser, url.replace("//", "//anybody:canary-key@"), "gen")
        browser.type("[name=max_tokens]", "5")
        browser.click("#start")
        assert _done(browser).startswith("length")
        assert browser.text("#output").endswith("hello")
        assert browser.console() == []
        line = browser.text("#curl")  # pasted where the variable has the key, it works
        assert '-H "Authorization: Bearer $TRIPTYCH_API_KEY"' in line and "canary" not in line
    check_accounts(app)


def _answered(browser: Browser, words: str) -> None:
    """Wait until the last turn has ended and has these words."""
    eventually(lambda: not browser.run("return document.getElementById('send').disabled"))
    assert words in browser.text(".turn:last-child"), browser.text("#turns") + browser.text("#error")


@with_browser
def test_a_chat_with_turns(browser: Browser) -> None:
    app = chat_app(settings=KEYS, max_model_len=4096)
    says(app, "Paris.")
    with live(app) as url:
        _open(browser, url.replace("//", "//anybody:canary-key@"), "chat")
        assert browser.run("return document.getElementById('chat').checkVisibility()")
        assert browser.text("#turns") == "Say something to the model."
        browser.type("#system", "Be brief.")
        browser.type("#chat [name=temperature]", "0.5")
        browser.press("#message", "Where?" + ENTER)
        _answered(browser, "Paris.")
        assert browser.text("#chat-facts").startswith("stop")
        browser.type("#message", "<b>And</b>?")
        browser.click("#send")
        _answered(browser, "Paris.")
        assert "Be brief." in prompt_of(app) and "Where?" in prompt_of(app) and "<b>And</b>?" in prompt_of(app)
        assert app.client.submitted[-1].params.temperature == 0.5
        assert browser.run("return document.querySelectorAll('#turns b').length") == 0
        line = browser.text("#chat-curl")
        assert "/v1/chat/completions" in line and "$TRIPTYCH_API_KEY" in line and "canary" not in line

        says(app, "London.")
        browser.run(
            "[...document.querySelectorAll('.acts button')].find((one) => one.textContent === 'Regenerate').click()"
        )
        _answered(browser, "London.")
        assert browser.run("return document.querySelectorAll('.turn').length") == 4
        assert prompt_of(app) == prompt_of(app, -2)

        app.script.delay_s = 0.2
        browser.type("#message", "Go on")
        browser.click("#send")
        eventually(lambda: app.client.running)
        browser.click("#chat-stop")
        eventually(lambda: app.client.aborted and not app.client.running)
        assert browser.text("#chat-facts").startswith("stopped")
        app.script.delay_s = 0.0

        _choose(browser, "gen")  # and back: the conversation is kept
        assert not browser.run("return document.getElementById('views').checkVisibility()")
        _choose(browser, "chat")
        assert "London." in browser.text("#turns")
        browser.click("#views label:nth-child(2) input")
        assert browser.run("return document.getElementById('generate').checkVisibility()")
        browser.click("#views label:first-child input")
        browser.click("#chat-new")
        assert browser.text("#turns") == "Say something to the model."
        browser.type("#chat [name=seed]", "x")
        browser.type("#message", "Hi")
        browser.click("#send")
        assert "seed" in str(eventually(lambda: browser.text("#error:not([hidden])")))
        assert browser.run("return document.querySelector('[aria-invalid]').form.id") == "chat"
        assert [one for one in browser.console() if "400" not in one] == []


@with_browser
def test_a_chat_with_reasoning_and_tools(browser: Browser) -> None:
    app = calling_app()
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    says(app, f"<think>\nHm.\n</think>\n\n<tool_call>\n{call}\n</tool_call>")
    with live(app) as url:
        _open(browser, url, "chat")
        browser.click("#sample-tools")
        browser.type("#message", "The weather in Oslo?")
        browser.click("#send")
        _answered(browser, "calls get_weather")
        assert '{"city": "Oslo"}' in browser.text(".call pre") and "get_weather" in prompt_of(app)
        assert browser.text(".turn:last-child details .thought").strip() == "Hm."
        assert not browser.run("return document.querySelector('.turn:last-child details').open")
        says(app, "Rain.")
        browser.type(".call textarea", "rain all day")
        browser.run(
            "[...document.querySelectorAll('.acts button')].find((one) => one.textContent === 'Send results').click()"
        )
        _answered(browser, "Rain.")
        assert "rain all day" in prompt_of(app) and "Oslo" in prompt_of(app)
        assert browser.console() == []


@with_browser
def test_commands_are_copied_and_routes_are_found(browser: Browser, app: App) -> None:
    with live(app) as url:
        browser.open(f"{url}/docs")
        eventually(lambda: browser.text("section pre"))
        browser.type("#find", "fill mask inputs")
        shown = browser.run(
            "return [...document.querySelectorAll('main > section[id]:not([hidden])')].map((one) => one.id)"
        )
        assert "post/pipeline/fill-mask" in shown and "get/livez" not in shown
        browser.type("#find", "speech wav language")
        browser.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
        browser.run("document.querySelector('main > section:not([hidden]) .line button').click()")
        assert str(eventually(lambda: browser.run("return window.copied"))).startswith("curl")


@with_browser
def test_the_docs_show_every_route_and_field(browser: Browser, app: App) -> None:
    document = ask(app, "GET", "/openapi.json").json()
    with live(app) as url:
        browser.console()
        browser.open(f"{url}/docs")
        eventually(lambda: browser.text("section"))
        shown = browser.run("return [...document.querySelectorAll('main > section[id]')].map((one) => one.id)")
        assert shown == [method + path for path, one in document["paths"].items() for method in one]
        rows = "return [...document.querySelectorAll(`#${arguments[0]} tbody th`)].map((one) => one.firstChild.data)"
        for name, schema in document["components"]["schemas"].items():
            assert browser.run(rows, name) == list(schema.get("properties", {})), name
        shapes = browser.text("#GenerateBody")
        assert "temperature" in shapes and "number 0 to 100" in shapes
        usage = "document.getElementById('Usage').innerText.includes('cached_tokens')"
        assert browser.run(f"return location.hash = 'Usage', {usage}") is False
        eventually(lambda: browser.run(f"return document.getElementById('Usage').open && {usage}"))
        assert "TRIPTYCH_API_KEY" not in browser.text("main")
        assert f"curl {url}/info" in browser.text("main")
        shown = browser.text("[id='post/v1/audio/transcriptions']")
        assert "Body, as multipart/form-data" in shown and "timestamp_granularities" in shown
        assert f"curl -s {url}/sample.flac | curl {url}/v1/audio/transcriptions -F 'model=MODEL' -F 'file=@-'" in shown
        shown = browser.text("[id='post/pipeline/image-classification']")
        assert "| base64 -d | curl" in shown and "-H 'Content-Type: image/png' --data-binary @-" in shown
        assert browser.console() == []


@with_browser
def test_a_file_and_the_microphone_are_transcribed(browser: Browser, tmp_path: Path) -> None:
    app = speech_app([at(0), *ids(" Hello <b>you</b>."), at(0.4)])
    file = tmp_path / "half.wav"
    file.write_bytes(b"0.5")

    def heard() -> str:
        eventually(lambda: browser.text("#listen-facts").startswith(("done", "failed")))
        return browser.text("#heard") + browser.text("#error:not([hidden])")

    with live(app) as url:
        _open(browser, url, "speech")
        assert not browser.run("return document.getElementById('generate').checkVisibility()")
        browser.click("#transcribe")
        assert "choose an audio file" in browser.text("#error:not([hidden])")
        browser.press("#file", str(file))
        browser.click("#transcribe")
        assert heard() == "Hello <b>you</b>."
        assert not app.client.submitted[-1].params.timestamps

        browser.click("#listen [name=times]")
        browser.click("#listen [name=translate]")
        browser.click("#transcribe")
        eventually(lambda: browser.text("#heard") == "0:00.0\u20130:00.4Hello <b>you</b>.")
        assert app.client.submitted[-1].prompt_token_ids[-1] == TRANSLATE
        assert "v1/audio/translations" in browser.text("#listen-curl")

        browser.click("#listen [name=translate]")
        browser.click("#listen [name=times]")
        browser.type("#listen [name=language]", "xx")
        browser.click("#transcribe")
        assert "language: model speech has no 'xx'" in str(eventually(lambda: browser.text("#error:not([hidden])")))
        assert browser.run("return document.querySelector('[aria-invalid]').name") == "language"
        browser.type("#listen [name=language]", "en")

        browser.click("#sample")
        eventually(lambda: "sample.flac" in browser.text("#listen-curl"))
        browser.click("#record")
        eventually(lambda: browser.text("#record") == "Stop recording")
        time.sleep(0.5)  # of the microphone's beeps
        browser.click("#record")
        eventually(lambda: browser.text("#sound").endswith("s recorded"))
        assert "recording.wav" in browser.text("#listen-curl")
        browser.click("#transcribe")
        eventually(lambda: browser.text("#heard").startswith("Hello <b>you</b>."))
        assert browser.text("#error:not([hidden])") == ""
        assert [one for one in browser.console() if "400" not in one] == []
    check_accounts(app)
