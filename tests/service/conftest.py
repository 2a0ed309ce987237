"""Fixtures for tests of the service."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from tests import checkpoints
from tests.service.sandboxes import shared_sandboxes
from tests.service.speech import ids, speech_app
from tests.service.support import App, check_accounts, make_app


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a decoder and an encoder that read and write text, as arguments of `triptych serve`."""
    folder = tmp_path_factory.mktemp("models")
    return [f"gen={checkpoints.llama(folder / 'llama')}", f"enc={checkpoints.bert(folder / 'bert')}"]


@pytest.fixture(scope="session", autouse=True)
def end_sandboxes() -> Iterator[Callable[[], None]]:
    """Return a function that ends the sandbox processes left by applications of earlier tests."""
    with shared_sandboxes() as end:
        yield end


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Import the client's package here: it takes 2 s, which every process that collects the tests would spend."""
    return pytest.importorskip("anthropic", reason="anthropic's client is not installed")


@pytest.fixture
def app() -> Iterator[App]:
    """Yield the application over a scripted engine; at the end every request must be accounted for."""
    made = make_app()
    yield made
    check_accounts(made)


@pytest.fixture
def speech() -> Iterator[App]:
    """Yield the same with a model that reads audio and always hears "Hello."."""
    made = speech_app(ids(" Hello."))
    yield made
    check_accounts(made)


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub talk to this machine: other tests set it offline, for `transformers`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def no_ray_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove Ray's settings from the environment for one test."""
    monkeypatch.setattr(os, "environ", {name: v for name, v in os.environ.items() if not name.startswith("RAY_")})
    return monkeypatch
