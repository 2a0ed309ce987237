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
    """A decoder and an encoder that read and write text, as `triptych serve` is given them."""
    folder = tmp_path_factory.mktemp("models")
    return [f"gen={checkpoints.llama(folder / 'llama')}", f"enc={checkpoints.bert(folder / 'bert')}"]


@pytest.fixture(scope="session", autouse=True)
def end_sandboxes() -> Iterator[Callable[[], None]]:
    """End the sandbox processes that applications of other tests have left; those of later ones are new."""
    with shared_sandboxes() as end:
        yield end


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """The client's package: its import takes 2 s, which every process would spend that collects the tests."""
    return pytest.importorskip("anthropic", reason="anthropic's client is not installed")


@pytest.fixture
def app() -> Iterator[App]:
    """The application over a scripted engine; in the end every request must have been accounted for."""
    made = make_app()
    yield made
    check_accounts(made)


@pytest.fixture
def speech() -> Iterator[App]:
    """The same with a model that reads audio, in which "Hello." is said."""
    made = speech_app(ids(" Hello."))
    yield made
    check_accounts(made)


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests set huggingface_hub offline, for `transformers`; here its clients talk to this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def no_ray_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes Ray's settings from the environment for one test."""
    monkeypatch.setattr(os, "environ", {name: v for name, v in os.environ.items() if not name.startswith("RAY_")})
    return monkeypatch
