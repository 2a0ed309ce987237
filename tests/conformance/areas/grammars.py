"""Grammars in GBNF that llama.cpp publishes: they compile, and accept the texts that they are for and no others."""

from __future__ import annotations

import random
from pathlib import Path

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from triptych.model.text.grammar import written_grammar
from triptych.model.text.grammar_matcher import Matcher, Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes

_BYTES = (*(bytes([byte]) for byte in range(256)), b"")
_VOCABULARY = Vocabulary(TokenBytes(_BYTES, _BYTES))
# Texts that a grammar accepts, and texts that it does not.
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "arithmetic": (["1+2=3\n", "(a+12)*b=x\n1=1\n"], ["1+2", "=\n"]),
    "chess": (["1. e4 e5\n2. Nf3 Nc6\n"], ["1. e9 e5\n", "e4"]),
    "english": (["Hello, world. It is 5 o'clock!"], ["é"]),
    "japanese": (["これは日本語です。"], ["abc"]),
    "json": (['{"a": [1, 2.5e3, "x\\n", null, true]}'], ['{"a": }', "[1"]),
    "json_arr": (["[\n1,\n2]"], ["{}"]),
    "list": (["- one\n- two\n"], ["one\n"]),
}


def run(report: Report, packages: Packages) -> None:
    folder = packages.sdist("llama-cpp-python") / "vendor" / "llama.cpp" / "grammars"
    for path in sorted(folder.glob("*.gbnf")):
        _check(report, path)


def _check(report: Report, path: Path) -> None:
    name = path.stem
    try:
        start = compile_grammar(written_grammar(path.read_text(encoding="utf-8")), _VOCABULARY)
    except ValueError as error:
        report.fails(name, str(error))
        return
    report.passes(name)
    right, wrong = TEXTS.get(name, ([], []))
    for text in right:
        report.check(f"{name}: {text!r}", _accepts(start, text), "is not accepted")
    for text in wrong:
        report.check(f"{name}: not {text!r}", not _accepts(start, text), "is accepted")
    for seed in range(4):
        report.check(f"{name}: random text {seed}", _goes_on(start, random.Random(seed)), "cannot go on")


def _accepts(start: Matcher, text: str) -> bool:
    matcher = start.fork()
    for byte in text.encode():
        if not matcher.tokens[byte]:
            return False
        matcher.accept(byte)
    return matcher.is_complete


def _goes_on(start: Matcher, draw: random.Random) -> bool:
    """Whether 500 random bytes can follow each other, or fewer that end a text."""
    matcher = start.fork()
    for _ in range(500):
        if matcher.is_exhausted:
            return matcher.is_complete
        matcher.accept(int(draw.choice(matcher.tokens.nonzero()[0])))
    return True
