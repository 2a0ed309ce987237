"""The process that test-compiles grammars: `python -m triptych.service.sandbox.grammar_main`.

The grammar library limits most of a grammar's cost, but not all: `multipleOf: 1000003` takes seconds and hundreds of
megabytes. So each grammar gets its own process, which `triptych.service.sandbox.worker_main` confines and the kernel
kills at the time limit. A grammar that compiles is then matched against a few random one-byte tokens. So most grammars
that are too expensive to match are refused before a request is accepted.

A request `{grammar, seconds}` gets one reply, `{}` or `{"error", "message"}`.
"""

from __future__ import annotations

import random
import re
from typing import Any

from triptych.model.errors import GrammarError
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes
from triptych.service.sandbox import worker_main

_MEMORY = 512 << 20
_TRIAL_TOKENS = 64
_TRIALS = 4
_MESSAGE = 480
_SPECIAL, _ANY_SPECIAL = re.compile(r"<\[\d+\]>"), 256  # a special token; the id that stands for all of them


def try_grammar(grammar: str, vocabulary: Vocabulary) -> dict[str, str]:
    """Compile and match a grammar; return an empty dictionary, or `error` (refused) and `message`."""
    try:
        start = compile_grammar(grammar, vocabulary)
        for trial in range(_TRIALS):
            matcher, generator = start.fork(), random.Random(trial)
            for _ in range(_TRIAL_TOKENS):
                if matcher.is_exhausted:
                    break
                matcher.accept(int(generator.choice(matcher.tokens.nonzero()[0])))
            if matcher.is_exhausted and not matcher.is_complete:
                raise GrammarError(matcher.failure)
    except GrammarError as error:
        return {"error": "refused", "message": str(error)[:_MESSAGE]}
    return {}


def main() -> None:
    """Answer requests until the other side closes."""
    single = (*(bytes([byte]) for byte in range(256)), b"")  # the last token stands for all special tokens
    vocabulary = Vocabulary(TokenBytes(single, single))
    try_grammar('start: "a"', vocabulary)  # makes the library load its files before the process is confined

    def answer(request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        return dict(try_grammar(_SPECIAL.sub(f"<[{_ANY_SPECIAL}]>", request["grammar"]), vocabulary)), b""

    worker_main.serve_forking(answer, lambda _: _MEMORY)


if __name__ == "__main__":
    main()
