"""Files in JSON: the forms of base64 and of data URLs that all routes take, and what is none."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from tests.service.speech import asked
from tests.service.support import App
from triptych.service.core.coded_files import file_bytes
from triptych.service.core.errors import ApiError

DATA = bytes(range(256))
CODED = base64.b64encode(DATA).decode()
LARGE = bytes(1_000_001)  # of more characters than are decoded at a time


@pytest.mark.parametrize(
    "made",
    [
        "{}",
        "data:image/png;base64,{}",
        "DATA:;BASE64,{}",
        "\n data:image/png;charset=x;base64,{}\n",
        "data:image/png;base64,{quoted}",
    ],
)
def test_forms_of_files(made: str) -> None:
    assert file_bytes(made.format(CODED, quoted=quote(CODED, safe="")), "url", "invalid_image") == DATA


def test_lines_of_base64_may_be_broken_anywhere() -> None:
    coded = base64.encodebytes(LARGE).decode()
    assert file_bytes(coded, "audio", "invalid_audio") == LARGE
    assert file_bytes(coded.replace("\n", "\r\n"), "audio", "invalid_audio") == LARGE
    assert file_bytes(base64.b64encode(LARGE).decode(), "audio", "invalid_audio") == LARGE


@pytest.mark.parametrize("more", ["=", "==", "=\n="])
def test_padding_that_is_not_needed_is_taken(more: str) -> None:
    """Some programs write two signs at the end of everything."""
    assert file_bytes(base64.b64encode(LARGE[:999_999]).decode() + more, "url", "invalid_image") == LARGE[:999_999]


@pytest.mark.parametrize(
    "made",
    [
        *(
            "data:,A",
            "data:image/png,A",
            "data:base64,AAAA",
            "%41AAA",
            "data:;base64,%zz",
            "AAA",
            "A",
            "AA==AAAA",
            "AA===",
            "AAAA===",
            "AAAA=A",
        ),
        *("https://a.b/c.png", "é" * 4, "A" * (1 << 20) + "AA==AAAA", "A" * ((1 << 20) - 4) + "AA==AAAA"),
    ],
    ids=lambda made: made[-30:],
)
def test_what_is_no_file(made: str) -> None:
    with pytest.raises(ApiError, match=r"^url") as refused:
        file_bytes(made, "url", "invalid_image")
    assert refused.value.code == "invalid_image"


@pytest.mark.parametrize("made", ["data:audio/wav;base64,{}", "{}\n", "data:;base64,{quoted}"])
def test_sound_comes_in_the_same_forms(made: str, speech: App) -> None:
    coded = base64.encodebytes(b"0.5").decode()
    reply = asked(speech, audio=made.format(coded, quoted=quote(coded.strip(), safe="")))
    assert reply.status_code == 200, reply.text
