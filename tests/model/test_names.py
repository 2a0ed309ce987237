"""What a name of a model means: an embedded model, a path, or a model of the Hub in one of the ways people write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.model import names
from triptych.model.checkpoint import hub, hub_names
from triptych.model.checkpoint.hub_names import HubName
from triptych.model.checkpoint.progress import describe
from triptych.model.errors import ConfigError
from triptych.model.pretrained import embedded_models

HUB = {
    "google-t5/t5-small": "hf:google-t5/t5-small",
    "hf:org/name": "hf:org/name",
    "hf://org/name": "hf:org/name",
    "org/name@v1.0": "hf:org/name@v1.0",
    "org/name@refs/pr/3": "hf:org/name@refs/pr/3",
    "org/name:Q4_K_M": "hf:org/name:Q4_K_M",
    "hf:org/name:Q4_K_M@main": "hf:org/name:Q4_K_M@main",
    "org/name/file.gguf": "hf:org/name:file.gguf",
    "org/name/Q8_0/file-Q8_0-00001-of-00002.gguf": "hf:org/name:Q8_0/file-Q8_0-00001-of-00002.gguf",
    "hf:org/name:file.gguf@abc": "hf:org/name:file.gguf@abc",
    "https://huggingface.co/org/name": "hf:org/name",
    "https://huggingface.co/org/name/": "hf:org/name",
    "http://www.huggingface.co/org/name?library=transformers#usage": "hf:org/name",
    "https://huggingface.co/org/name/tree/main": "hf:org/name",
    "https://huggingface.co/org/name/tree/v2": "hf:org/name@v2",
    "https://huggingface.co/org/name/tree/refs%2Fpr%2F3": "hf:org/name@refs/pr/3",
    "https://huggingface.co/org/name/commit/abc123": "hf:org/name@abc123",
    "https://huggingface.co/org/name/blob/main/config.json": "hf:org/name",
    "https://huggingface.co/org/name/blob/main/x.Q4_0.gguf": "hf:org/name:x.Q4_0.gguf",
    "https://huggingface.co/org/name/resolve/main/a/x.gguf?download=true": "hf:org/name:a/x.gguf",
    "https://huggingface.co/org/name/resolve/refs/pr/1/x.gguf": "hf:org/name:x.gguf@refs/pr/1",
    "huggingface.co/org/name": "hf:org/name",
    "hf.co/org/name:Q4_K_M": "hf:org/name:Q4_K_M",
    "https://hf.co/org/name:IQ4_XS": "hf:org/name:IQ4_XS",
}
NOT_HUB = {
    "hf:name": "expected ORGANISATION/NAME",
    "hf:../../etc/passwd": "expected ORGANISATION/NAME",
    "hf:org/../x": "expected ORGANISATION/NAME",
    "https://example.com/org/name": "expected an address of huggingface.co, found the host 'example.com'",
    "https://huggingface.co.example.com/org/name": "found the host 'huggingface.co.example.com'",
    "https://huggingface.co/datasets/org/name": "expected the page of a model, found one of datasets",
    "https://huggingface.co/": "found no repository in the address",
    "https://huggingface.co/org": "found no repository in the address",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("text", "expected"), HUB.items())
def test_names_and_addresses_of_the_hub(text: str, expected: str) -> None:
    assert names.locate(text) == expected == names.checked(text)
    assert names.locate(expected) == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("text", "message"), NOT_HUB.items())
def test_what_is_no_name_of_the_hub_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        names.locate(text)
    assert message in str(error.value) and text in str(error.value)


def test_an_own_hub_has_addresses_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    assert names.locate("https://hub.example.com/org/name/tree/main") == "hf:org/name"


def test_a_name_is_an_embedded_model_even_if_a_folder_has_it(here: Path) -> None:
    (here / "code").mkdir()
    assert names.locate("code") == str(embedded_models()["code"])
    assert names.hides_folder("code") and not names.hides_folder("./code")
    assert names.locate("./code") == "./code"
    for name in ("assistant", "speech"):
        assert (Path(names.checked(name)) / "config.json").is_file() and names.model_name(name) == name


def test_a_folder_here_is_no_model_of_the_hub(here: Path) -> None:
    (here / "org" / "name").mkdir(parents=True)
    assert names.locate("org/name") == "org/name"
    with pytest.raises(ConfigError, match=r"org/nane: no such folder; for the model of the Hub give hf:org/nane"):
        names.checked("org/nane")
    assert names.locate("hf:org/nane") == "hf:org/nane"
    assert names.locate("~/x") == str(Path.home() / "x")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cod", "cod: no such folder; did you mean the embedded model code?"),
        ("nothing", "nothing: no such folder; expected a Hugging Face checkpoint folder"),
        ("/no/such", "/no/such: no such folder"),
        ("./org/name", "./org/name: no such folder; expected"),
    ],
)
def test_a_path_that_is_no_model_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        names.checked(text)
    assert str(error.value).startswith(message)


def test_models_are_served_by_the_last_part_of_their_names() -> None:
    found = [names.model_name(text) for text in ("code", "org/name:Q4_K_M", "org/name/a/x-00001-of-00002.gguf", "/a/b")]
    assert found == ["code", "name", "x", "b"]
    assert hub_names.parse("org/name:Q8_0@v1") == HubName("org/name", "v1", "Q8_0")


FILES = (
    *("README.md", "mmproj-F16.gguf", "imatrix.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf"),
    *("m-IQ4_XS.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"),
)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("m-IQ4_XS.gguf", "m-IQ4_XS.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_its_number_format(selector: str, expected: str) -> None:
    assert hub.choose("hf:org/name", FILES, selector) == expected


@pytest.mark.parametrize(
    ("files", "selector", "message"),
    [
        (FILES, "Q4_K", "3 GGUF models are Q4_K; give one after a colon: Q4_K_M, Q4_K_S, UD-Q4_K_XL"),
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "Q4_0", "2 GGUF models are Q4_0; give one after a colon: a-Q4_0.gguf, b-Q4_0"),
        (("a-Q8_0.gguf", "a-F16.gguf"), "", "has several GGUF models; give one after a colon: F16, Q8_0"),
        (("README.md", "mmproj-F16.gguf"), "F16", "has no GGUF model"),
        (FILES, "no.gguf", "no GGUF model no.gguf"),
    ],
)
def test_without_one_gguf_file_what_is_there_is_listed(files: tuple[str, ...], selector: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        hub.choose("hf:org/name", files, selector)
    assert message in str(error.value)


def test_all_parts_of_a_model_belong_to_its_first() -> None:
    parts = [f"a/m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert hub.all_parts(parts[0]) == parts
    assert hub.all_parts("m.gguf") == ["m.gguf"]
    assert hub.choose("hf:org/name", ["m.gguf"], "") == "m.gguf"


def test_progress_has_bytes_rate_and_what_remains() -> None:
    assert describe(250e6, 1_000e6, 10.0, 50e6) == "250 of 1,000 MB downloaded, 5.0 MB/s, 2:30 left"
    assert describe(0, 1_000e6, 0.0, 0) == "0 of 1,000 MB downloaded"
