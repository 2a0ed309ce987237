"""The process that test-compiles grammars, which its parent can kill: `python -m service.sandbox.grammar_main`.

The grammar library limits most of a grammar's cost, but not all: `multipleOf: 1000003` takes seconds and hundreds of
megabytes. Here the kernel limits time (an alarm ends the process) and memory. A grammar that compiles is then matched
against a few random one-byte tokens, so that most grammars that are too expensive to match are refused before a request
is accepted.

Messages on standard input, a socket, are a length of 4 bytes (big-endian) and JSON, in both directions. A request
`{grammar, seconds}` gets one reply, `{}` or `{"error", "message"}`.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import socket
import struct

from model.errors import GrammarError
from model.text.grammar_matcher import Vocabulary, compile_grammar
from model.text.token_bytes import TokenBytes

READY = b"R"
_LENGTH = struct.Struct(">I")
_MEMORY = 512 << 20
_TRIAL_TOKENS = 64
_TRIALS = 4
_MESSAGE = 480
_SPECIAL, _ANY_SPECIAL = re.compile(r"<\[\d+\]>"), 256  # a special token by its id


def try_grammar(grammar: str, vocabulary: Vocabulary) -> dict[str, str]:
    """Return an empty dictionary, or an `error` (refused) with its reason."""
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


def _take(channel: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or fewer if the other side has closed."""
    data = bytearray()
    while len(data) < size and (part := channel.recv(size - len(data))):
        data += part
    return bytes(data)


def main() -> None:
    """Answer requests until the other side closes."""
    channel = socket.socket(fileno=0)
    single = (*(bytes([byte]) for byte in range(256)), b"")  # the last stands for all special tokens
    vocabulary = Vocabulary(TokenBytes(single, single))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel.sendall(READY)
    while len(header := _take(channel, _LENGTH.size)) == _LENGTH.size:
        request = json.loads(_take(channel, _LENGTH.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # without a handler, the signal ends the process
        grammar = _SPECIAL.sub(f"<[{_ANY_SPECIAL}]>", request["grammar"])
        reply = json.dumps(try_grammar(grammar, vocabulary)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(_LENGTH.pack(len(reply)) + reply)


if __name__ == "__main__":
    main()
