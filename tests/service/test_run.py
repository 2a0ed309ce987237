"""`triptych run`: replies and conversations with a running service, and with a service that it starts itself."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.service.browser import eventually
from tests.service.dialects.support import chat_app, prompt_of, says
from tests.service.support import App, live
from tests.service.test_cli import triptych, triptych_here
from triptych.model.checkpoint import progress
from triptych.model.engine import packing
from triptych.model.errors import EngineError
from triptych.model.native import build
from triptych.model.system.log_lines import JsonLines
from triptych.service.cli import run as command
from triptych.service.cli import service_client
from triptych.service.settings.service_settings import ServiceSettings

NOWHERE = "http://127.0.0.1:9"  # nothing listens on this port


@pytest.fixture
def service() -> Iterator[tuple[App, str]]:
    app = chat_app(settings=ServiceSettings(api_keys=("key",)), max_model_len=4096)
    with live(app) as url:
        yield app, url


def typed(*lines: str) -> mock._patch[mock.Mock]:
    """The user types these lines and ends."""
    return mock.patch("builtins.input", side_effect=[*lines, EOFError])


def terminal(text: str = "", *, is_terminal: bool = True) -> mock._patch[io.StringIO]:
    stream = io.StringIO(text)
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    return mock.patch.object(sys, "stdin", stream)


def chat(url: str, *arguments: str, lines: tuple[str, ...] = (), proxy: str = "") -> subprocess.CompletedProcess[str]:
    with terminal(), typed(*lines):
        return triptych_here("run", "--url", url, *arguments, TRIPTYCH_API_KEY="key", http_proxy=proxy)


def test_one_reply(service: tuple[App, str]) -> None:
    app, url = service
    says(app, "Paris.")
    reply = chat(url, "chat", "Where is it?", "--temperature", "0.5", "--system", "Be brief.")
    assert (reply.returncode, reply.stdout) == (0, "Paris.\n")
    assert app.client.submitted[-1].params.temperature == 0.5
    assert "Be brief." in prompt_of(app) and "Where is it?" in prompt_of(app)


def test_the_first_model_that_chats_is_the_default(service: tuple[App, str]) -> None:
    app, url = service
    says(app, "Yes.")
    with terminal("a file\n", is_terminal=False):
        reply = triptych_here("run", "--url", url, "--api-key", "key")
    assert reply.stdout == "Yes.\n" and "a file" in prompt_of(app)


def test_text_on_standard_input_follows_the_prompt(service: tuple[App, str]) -> None:
    app, url = service
    says(app, "Short.")
    with terminal("a file\n", is_terminal=False):
        triptych_here("run", "chat", "Sum up:", "--url", url, "--api-key", "key")
    assert "Sum up:\n\na file" in prompt_of(app)


def reply_of(body: str, length: int | None = None) -> str:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n{body}"


INFO = (
    '{"name": "triptych", "models": [{"name": "chat", "state": "loaded", "model_type": "llama", "max_model_len": 9,'
    ' "chat": {"serves": true, "tools": "json", "reasoning": ""}, "capabilities": [{"name": "chat", "body": {}}]}]}'
)
STREAM = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {  # what a program answers that is no service, or one that ends: what is told
    "SSH-2.0-OpenSSH_9\r\n": "does not answer as an HTTP service does: 'SSH-2.0-",
    "": "does not answer",
    reply_of("<html>"): "is no triptych service: /info gives no JSON",
    reply_of("ÿ"): "is no triptych service: /info gives no JSON",
    reply_of("[]"): "is no triptych service: its /info has no models",
    reply_of('{"name": "triptych"}'): "is no triptych service: its /info has no models",
    reply_of("{", 99): "ended in the middle of its reply",
    STREAM + '40\r\ndata: {"choices": []}\n': "ended in the middle of its reply",
    reply_of("data: {x\n\n"): "is no triptych service: /v1/chat/completions gives no JSON",
}


@pytest.mark.parametrize("answer", BROKEN)
def test_what_is_no_service_is_said_in_one_line(answer: str) -> None:
    def serve(listener: socket.socket) -> None:
        for begins in (b"GET /info", b"GET /info", b"POST"):  # what a real service answers until the reply
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(65536)
                later = "choices" in answer or "data: {x" in answer
                text = reply_of(INFO) if later and asked.startswith(b"GET") else answer
                connection.sendall(text.encode("latin-1"))
                if text is answer:
                    return
                assert asked.startswith(begins)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        reply = chat(url, "chat", "Hello", proxy="http://127.0.0.1:9")
        thread.join()
    assert reply.returncode == 1 and reply.stderr.count("\n") == 1
    assert reply.stderr.startswith(f"triptych: {url} {BROKEN[answer]}")


@pytest.mark.parametrize("url", ["http://a b", "http://", "http://[::1", "http://a:x", "ftp://a", "http://a\nb"])
@pytest.mark.parametrize("command", [("ps",), ("run", "chat", "x"), ("models", "list"), ("launch", "codex")])
def test_an_address_is_checked_before_it_is_asked(url: str, command: tuple[str, ...]) -> None:
    reply = triptych_here(*command, "--url", url)
    assert (reply.returncode, reply.stderr) == (2, f"triptych: --url: expected http://HOST:PORT, found {url!r}\n")
    reply = triptych_here(*command, TRIPTYCH_URL=url)
    assert reply.stderr.startswith("triptych: TRIPTYCH_URL: expected http://HOST:PORT")


def test_a_prompt_without_a_model_is_told(service: tuple[App, str]) -> None:
    assert "a prompt comes after MODEL" in chat(service[1], "What is gravity?").stderr


def test_a_conversation_with_commands(service: tuple[App, str]) -> None:
    app, url = service
    says(app, "Paris.")
    lines = ("/help", "/system Be brief.", "Where?", "And then?", '"""two', 'lines"""', "/retry", "/set seed 7", "/set")
    reply = chat(url, "chat", lines=(*lines, "/models", "/nothing", "/model enc", "/clear", "Again?", "/bye", "Never"))
    assert reply.returncode == 0 and reply.stdout == "Paris.\n" * 5
    first, second, third, again, last = (prompt_of(app, at) for at in range(5))
    assert "Be brief." in first and "Where?" in second and "Paris." in second and "And then?" in second
    assert "two\nlines" in third and again == third
    assert "Where?" not in last and "Be brief." in last
    assert app.client.submitted[-1].params.seed == 7 and len(app.client.submitted) == 5
    for told in ("/retry  ", "seed 7", "* chat: chat, complete", "/nothing is not known", "enc does not write text"):
        assert told in reply.stderr


def test_a_stopped_reply_is_cancelled_and_kept(service: tuple[App, str]) -> None:
    app, url = service
    says(app, "One two three.")
    app.script.delay_s = 0.1
    add, seen = command._Printer.add, []

    def stop(printer: command._Printer, event: dict[str, object]) -> None:
        add(printer, event)
        seen.append(event)
        if len(seen) == 4:
            app.script.delay_s = 0.0
            raise KeyboardInterrupt

    with mock.patch.object(command._Printer, "add", stop):
        reply = chat(url, "chat", lines=("Count.", "Go on."))
    begun = reply.stdout.partition("\n")[0]
    assert reply.returncode == 0 and begun and "One two three.".startswith(begun)
    eventually(lambda: app.client.aborted)
    assert f"{begun}<" in prompt_of(app) and "Go on." in prompt_of(app)


def test_reasoning_and_calls_are_shown_apart() -> None:
    printer = command._Printer()
    deltas = [{"reasoning_content": "Hm."}, {"content": "Yes"}, {"tool_calls": [{"function": {"name": "f"}}]}]
    with mock.patch.object(sys, "stdout", io.StringIO()) as out, mock.patch.object(sys, "stderr", io.StringIO()) as err:
        for delta in deltas:
            printer.add({"choices": [{"delta": delta}]})
        printer.end()
    assert (out.getvalue(), err.getvalue()) == ("Yesf\n", "Hm.\n\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("enc", "x"), 2, "enc does not write text; it can embed, rerank: use triptych encode"),
        (("nothing", "x"), 2, "has no model nothing; it has"),
        (("chat", " "), 2, "the prompt is empty"),
        (("chat", "x", "--temperature", "-1"), 2, "temperature"),
    ],
)
def test_refusals(service: tuple[App, str], arguments: tuple[str, ...], code: int, message: str) -> None:
    reply = chat(service[1], *arguments)
    assert reply.returncode == code and message in reply.stderr and len(reply.stderr) < 700


def test_a_service_that_cannot_be_used(service: tuple[App, str]) -> None:
    assert "no service listens at http://127.0.0.1:9" in chat(NOWHERE, "chat", "x").stderr
    assert "expected http://HOST:PORT" in chat("x", "chat", "x").stderr
    with terminal():
        assert "401: " in triptych_here("run", "chat", "x", "--url", service[1], "--api-key", "wrong").stderr


def test_a_service_that_refuses_is_told_before_a_model_is_loaded_here(service: tuple[App, str]) -> None:
    with terminal(), mock.patch.object(command, "_Started", side_effect=EngineError("not in a test")):
        reply = triptych_here("run", "code", "x", TRIPTYCH_URL=service[1], TRIPTYCH_API_KEY="wrong")
    assert f"loading code ({service[1]} answers 401: an API key is needed" in reply.stderr


def test_a_model_that_no_service_has_is_served_for_the_time_of_the_chat(tmp_path: Path) -> None:
    """Also in a shell or a container with the settings of a service, which are not meant for this one."""
    others = {"LOG_FORMAT": "json", "REPLICAS": "2", "MODELS_DIR": str(tmp_path / "none"), "LORA": "a=b"}
    variables = {f"TRIPTYCH_{name}": value for name, value in others.items()}
    run = triptych("run", "code", "def add(a, b):\n    ", "--max-tokens", "8", TRIPTYCH_URL=NOWHERE, **variables)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
    assert run.stderr.startswith(f"loading code (no service at {NOWHERE} has it)")
    assert "Traceback" not in run.stderr


def test_the_start_of_a_service_tells_what_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    def line(logger: logging.Logger, text: str) -> str:
        return JsonLines().format(logging.LogRecord(logger.name, logging.INFO, "", 0, text, (), None)) + "\n"

    told = [line(build.logger, "compiling"), line(packing.logger, "packing"), line(progress.logger, "5 %")]
    rest = [line(logging.getLogger("uvicorn"), "x"), "triptych 1 on http://a:1 (y)\n", "ready in 1 s.\n", "later\n"]
    child = mock.Mock(stderr=iter(told + rest))
    assert service_client._wait_ready(child) == "http://a:1"
    assert capsys.readouterr().err == "compiling\npacking\n5 %\n"


def test_standard_input_that_is_no_text_is_told(service: tuple[App, str]) -> None:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG\xff"), "utf-8")):
        reply = triptych_here("run", "--url", service[1], "--api-key", "key")
    assert (reply.returncode, reply.stderr.count("\n")) == (2, 1) and "not utf-8" in reply.stderr
