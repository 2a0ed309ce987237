"""Events from bytes that are split anywhere."""

from __future__ import annotations

import pytest

from triptych.loadtest.generator.client import EventParser

STREAM = (
    b"\xef\xbb\xbf: hello\n\ndata: one\r\n\r\ndata:two\rdata:  three\r\r"
    + "event: x\ndata: é€😀\nid: 4\n\n:\ndata\n\nnothing: here\n\ndata: [DONE]\n\ndata: unfinished\n".encode()
)
EVENTS = [b"one", b"two\n three", "é€😀".encode(), b"", b"[DONE]"]


def test_whole() -> None:
    assert EventParser().feed(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_in_chunks(size: int) -> None:
    parser = EventParser()
    assert [e for at in range(0, len(STREAM), size) for e in parser.feed(STREAM[at : at + size])] == EVENTS


def test_split_anywhere() -> None:
    for at in range(len(STREAM)):
        parser = EventParser()
        assert parser.feed(STREAM[:at]) + parser.feed(b"") + parser.feed(STREAM[at:]) == EVENTS, at


def test_an_event_comes_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [b"x"]
    assert parser.feed(b"data: y\r\n\r") == [b"y"]
    assert parser.feed(b"\ndata: z\n\n") == [b"z"]
