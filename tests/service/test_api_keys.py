"""Keys from a file: read again when it changes, kept when it breaks, never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.service.support import ask, make_app
from triptych.model.errors import ConfigError
from triptych.service.settings import api_keys
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.service_settings import ServiceSettings


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_CHECK_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who\nalpha\n\n  beta  \n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def good(ring: KeyRing, *names: str) -> list[bool]:
    return [ring.find(name.encode()) is not None for name in names]


def test_a_file_holds_a_key_a_line_beside_those_of_the_settings(file: Path) -> None:
    ring = KeyRing(("gamma",), str(file))
    assert good(ring, "alpha", "beta", "gamma", "# who", "", "delta") == [True, True, True, False, False, False]


def test_changes_count_without_a_restart(file: Path) -> None:
    ring = KeyRing((), str(file))
    file.write_text("beta\ndelta\n")
    assert good(ring, "alpha", "beta", "delta") == [False, True, True]
    other = file.with_name("other")  # as a mounted secret changes: by another file in its place
    other.write_text("epsilon\n")
    os.replace(other, file)
    assert good(ring, "beta", "epsilon") == [False, True]


@pytest.mark.parametrize("broken", ["", "# none\n", "two words\n", "schlüssel\n", None])
def test_a_broken_file_opens_nothing_and_locks_nobody_out(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing((), str(file))
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    for _ in range(3):
        assert good(ring, "alpha", "", "two words", "two") == [True, False, False, False]
    assert len(caplog.records) == 1  # not one with every request
    file.write_text("zeta\n")
    assert good(ring, "alpha", "zeta") == [False, True]
    assert "zeta" not in caplog.text and "schl" not in caplog.text and "two words" not in caplog.text


def test_at_the_start_a_broken_file_is_an_error_that_names_the_line(file: Path, tmp_path: Path) -> None:
    file.write_text("fine\nnot fine\n")
    with pytest.raises(ConfigError, match=r"line 2 of api_key_file .*keys must be printable ASCII") as error:
        KeyRing((), str(file))
    assert "not fine" not in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing((), str(tmp_path / "absent"))


def test_without_keys_none_is_needed() -> None:
    assert KeyRing.of(ServiceSettings()) is None
    assert ask(make_app(), "GET", "/info").status_code == 200


def test_keys_of_either_kind_are_asked_for(file: Path) -> None:
    for settings in (ServiceSettings(api_keys=("alpha",)), ServiceSettings(api_key_file=str(file))):
        ring = KeyRing.of(settings)
        assert settings.asks_for_key and ring is not None
        assert good(ring, "alpha", "delta") == [True, False]
        assert ask(make_app(settings=settings), "GET", "/info").status_code == 401


def test_the_service_follows_its_file(file: Path) -> None:
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    assert ask(app, "GET", "/info").status_code == 401
    assert ask(app, "GET", "/livez").status_code == 200
    assert ask(app, "GET", "/info", headers=bearer("alpha")).status_code == 200
    file.write_text("new\n")
    assert ask(app, "GET", "/info", headers=bearer("alpha")).status_code == 401
    assert ask(app, "GET", "/info", headers=bearer("new")).status_code == 200


def test_processes_of_one_secret_name_the_holder_of_a_key_alike() -> None:
    key, other = api_keys.digest(b"alpha"), api_keys.digest(b"beta")
    ours, same, strange = api_keys.Tenants(b"secret"), api_keys.Tenants(b"secret"), api_keys.Tenants()
    assert ours.name(key) == same.name(key) != ours.name(other)
    assert strange.name(key) not in (ours.name(key), api_keys.Tenants().name(key))
