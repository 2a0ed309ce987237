"""What is sent, and which replies the standards ask for (RFC 9110, RFC 9112)."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = b"gen"
JSON = b'{"model": "' + MODEL + b'", "prompt": "a", "max_tokens": 2}'
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
_TYPE = b"Content-Type: application/json\r\n"


@dataclass(frozen=True)
class Case:
    """Segments, the statuses of all replies, and whether the connection is kept after them."""

    name: str
    segments: tuple[bytes, ...]
    statuses: tuple[int, ...]
    kept: bool = True
    methods: tuple[bytes, ...] = ()  # of the requests, where one is a HEAD
    direct: bool = False  # a proxy answers otherwise, and may
    unfinished: bool = False  # a body does not come whole: a proxy that reads bodies first waits for it


def get(path: bytes = b"/livez", *lines: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join((method + b" " + path + b" HTTP/" + version, b"Host: x", *lines, b"", b""))


def post(*lines: bytes, body: bytes = JSON, chunked: bool = False, version: bytes = b"1.1") -> bytes:
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = b"\r\n".join((b"POST /generate HTTP/" + version, b"Host: x", *lines, framing, _TYPE + b"\r\n"))
    return head + (chunks(body) if chunked else body)


def chunks(body: bytes, size: int = 7, trailer: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


def halves(data: bytes) -> tuple[bytes, ...]:
    """Split after the head, and in the middle of the body."""
    head = data.index(b"\r\n\r\n") + 4
    middle = (head + len(data)) // 2
    return data[:head], data[head:middle], data[middle:]


def _upgrades() -> list[Case]:
    cases = []
    for offer in (b"h2c", b"websocket", b"WebSocket, h2c", b"TLS/1.0", b"foo/2"):
        name = offer.decode().lower()
        lines = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + offer, b"HTTP2-Settings: AAMAAABkAAQAAP__")
        for chunked in (False, True):
            kind = "chunked" if chunked else "length"
            sent = post(*lines, chunked=chunked)
            cases += [
                Case(f"upgrade {name}, {kind}", (sent,), (200,)),
                Case(f"upgrade {name}, {kind}, in segments", halves(sent), (200,)),
                Case(f"upgrade {name}, {kind}, then another", (sent + sent,), (200, 200)),
                Case(f"upgrade {name}, {kind}, smuggled", (post(*lines, body=SMUGGLED, chunked=chunked),), (400,)),
            ]
        cases += [
            Case(f"upgrade {name}, no body", (get(b"/livez", *lines),), (200,)),
            Case(f"upgrade {name}, no body, then another", (get(b"/livez", *lines) + get(),), (200, 200)),
            Case(f"upgrade {name}, close", (get(b"/livez", b"Connection: Upgrade, close", lines[1]),), (200,), False),
        ]
    body = get(b"/livez", b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: %d" % len(SMUGGLED)) + SMUGGLED
    every = tuple(bytes((byte,)) for byte in post(b"Connection: upgrade", b"Upgrade: h2c", chunked=True))
    websocket = (b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    return [
        *cases,
        Case("upgrade, GET with a body", (body,), (200,)),
        Case("upgrade, GET with a body, in segments", halves(body), (200,)),
        Case("upgrade, byte by byte", every, (200,)),
        Case("websocket handshake", (get(b"/livez", *websocket, key),), (200,)),
        Case("upgrade without Connection", (post(b"Upgrade: h2c"),), (200,)),
        Case("upgrade in HTTP/1.0", (get(b"/livez", *websocket, key, version=b"1.0"),), (200,), False),
        Case("CONNECT", (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n" + SMUGGLED,), (501,), False, direct=True),
        Case("CONNECT, path", (b"CONNECT /livez HTTP/1.1\r\nHost: x\r\n\r\n",), (501,), False, direct=True),
    ]


def _framing() -> list[Case]:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\n" + _TYPE

    def broken(name: str, rest: bytes, status: int = 400) -> Case:
        return Case(name, (head + rest,), (status,), False, direct=True)

    coded = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return [
        Case("chunks", (post(chunked=True),), (200,)),
        Case("chunk extension", (coded + b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON),), (200,)),
        Case("chunks, coding in capitals", (post(chunked=True).replace(b": chunked", b": Chunked"),), (200,)),
        Case("chunks, space after the coding", (post(chunked=True).replace(b": chunked", b": chunked "),), (200,)),
        Case("a large body in segments", halves(post(body=b" " * 300_000 + JSON)), (200,)),
        broken("unknown coding", b"Transfer-Encoding: xchunked\r\n\r\n" + chunks(JSON), 501),
        broken("gzip, chunked", b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(JSON), 501),
        broken("gzip, chunked in two fields", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        broken("identity", b"Transfer-Encoding: identity\r\n\r\n", 501),
        broken("chunked, gzip", b"Transfer-Encoding: chunked, gzip\r\n\r\n" + chunks(JSON)),
        broken("chunked twice", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(JSON)),
        broken("length and chunks", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(JSON)),
        broken("chunks and length", b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + chunks(JSON)),
        broken("two lengths", b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + JSON),
        broken("list of lengths", b"Content-Length: 5, 6\r\n\r\n" + JSON),
        broken("signed length", b"Content-Length: +5\r\n\r\n" + JSON),
        broken("negative length", b"Content-Length: -1\r\n\r\n"),
        broken("length in hex", b"Content-Length: 0x10\r\n\r\n" + JSON),
        broken("huge length", b"Content-Length: 99999999999999999999999\r\n\r\n"),
        broken("chunk of size -1", b"Transfer-Encoding: chunked\r\n\r\n-1\r\n"),
        broken("chunk in 0x", b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n"),
        broken("chunk too long", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n"),
        broken("chunk of 2**64", b"Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n"),
        broken("chunk ended by LF", b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n"),
        Case("broken chunk in a later segment", (coded + b"2\r\n{}\r\n", b"zz\r\n"), (400,), False, direct=True),
        broken("space before the colon", b"Content-Length : 2\r\n\r\n{}"),
        broken("folded header", b"Content-Length: 2\r\nX: a\r\n b\r\n\r\n{}"),
        broken("bare CR", b"X: a\rContent-Length: 2\r\n\r\n{}"),
        broken("NUL in a value", b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}"),
        broken("no name", b": a\r\n\r\n"),
        Case("no HTTP", (b"\x16\x03\x01\x00\xa5\x01\r\n\r\n",), (400,), False, direct=True),
        Case("HTTP/0.9", (b"GET /livez\r\n\r\n",), (505,), False, direct=True),
        Case("HTTP/2 preface", (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), (400,), False, direct=True),
        Case("HTTP/2.0", (get(version=b"2.0"),), (505,), False, direct=True),
        Case("HTTP/1.2", (get(version=b"1.2"),), (400,), False, direct=True),
        Case("chunks in HTTP/1.0", (post(chunked=True, version=b"1.0"),), (400,), False, direct=True),
        Case("good, then broken", (get() + b"\x16\x03\r\n\r\n",), (200, 400), False, direct=True),
        Case("good POST, then broken", (post() + b"GET / HTTP/1.1\r\n\r\n",), (200, 400), False, direct=True),
        Case(
            "two good, then broken",
            (get() + post() + b"GET bad HTTP/1.1\r\n\r\n" + get(),),
            (200, 200, 400),
            False,
            direct=True,
        ),
    ]


def _targets() -> list[Case]:
    def line(target: bytes, host: bytes = b"Host: x\r\n", version: bytes = b"1.1") -> tuple[bytes]:
        return (b"GET " + target + b" HTTP/" + version + b"\r\n" + host + b"\r\n",)

    return [
        Case("absolute target", line(b"http://x/livez"), (200,)),
        Case("absolute target, port, query", line(b"HTTP://x:8000/livez?a=b"), (200,), direct=True),
        Case("absolute target, https", line(b"https://x/livez"), (200,), direct=True),
        Case("absolute target, no path", line(b"http://x"), (200,)),
        Case("absolute target, another host", line(b"http://y/livez"), (200,), direct=True),
        Case("absolute target, POST", (post().replace(b" /generate", b" http://x/generate"),), (200,)),
        Case("absolute target, user", line(b"http://a@x/livez"), (400,), False, direct=True),
        Case("absolute target, another scheme", line(b"ftp://x/livez"), (400,), False, direct=True),
        Case("target without a path", line(b"livez"), (400,), False, direct=True),
        Case("authority target", line(b"x:80"), (400,), False, direct=True),
        Case("asterisk with GET", line(b"*"), (400,), False, direct=True),
        Case("target with a fragment", line(b"/livez#a"), (400,), False, direct=True),
        Case("target beyond ASCII", line(b"/livez\xff"), (400,), False, direct=True),
        Case("empty target", line(b""), (400,), False, direct=True),
        Case("no Host", line(b"/livez", b""), (400,), False, direct=True),
        Case("two Hosts", line(b"/livez", b"Host: x\r\nHost: x\r\n"), (400,), False, direct=True),
        Case("two Hosts apart", line(b"/livez", b"Host: x\r\nA: b\r\nhost: y\r\n"), (400,), False, direct=True),
        Case("Host with a path", line(b"/livez", b"Host: x/y\r\n"), (400,), False, direct=True),
        Case("Host with a space", line(b"/livez", b"Host: x y\r\n"), (400,), False, direct=True),
        Case("Host with a user", line(b"/livez", b"Host: a@x\r\n"), (400,), False, direct=True),
        Case("Host with a bad port", line(b"/livez", b"Host: x:8a\r\n"), (400,), False, direct=True),
        Case("empty Host", line(b"/livez", b"Host:\r\n"), (200,), direct=True),
        Case("space after Host", line(b"/livez", b"Host: x \t\r\n"), (200,), direct=True),
        Case("Host is an IPv6 address", line(b"/livez", b"Host: [::1]:8000\r\n"), (200,)),
        Case("no Host in HTTP/1.0", line(b"/livez", b"", b"1.0"), (200,), False, direct=True),
        Case("two Hosts in HTTP/1.0", line(b"/livez", b"Host: x\r\nHost: y\r\n", b"1.0"), (400,), False, direct=True),
        Case("absolute target, no Host", line(b"http://x/livez", b""), (400,), False, direct=True),
    ]


def _connections() -> list[Case]:
    expect = post(b"Expect: 100-continue").replace(b" /generate", b" /nowhere").removesuffix(JSON)
    return [
        Case("plain", (get(),), (200,)),
        Case("three at once", (get() + post() + get(b"/nowhere"),), (200, 200, 404)),
        Case("three in segments", (get() + post()[:-5], post()[-5:] + get()[:9], get()[9:]), (200, 200, 200)),
        Case("close", (get(b"/livez", b"Connection: close"),), (200,), False),
        Case("close, then another", (get(b"/livez", b"Connection: close") + get(),), (200,), False),
        Case("HTTP/1.0", (get(version=b"1.0"),), (200,), False),
        Case("HTTP/1.0, POST", (post(version=b"1.0"),), (200,), False),
        Case("HTTP/1.0, then another", (get(version=b"1.0") + get(),), (200,), False),
        Case("empty lines before", (b"\r\n" + get(),), (200,)),
        Case("byte by byte", tuple(bytes((byte,)) for byte in post()), (200,)),
        Case("HEAD", (get(method=b"HEAD") + get(),), (200, 200), methods=(b"HEAD", b"GET")),
        Case("HEAD without Host", (b"HEAD /livez HTTP/1.1\r\n\r\n",), (400,), False, (b"HEAD",), direct=True),
        Case(
            "HEAD with a broken body",
            (get(b"/livez", b"Transfer-Encoding: chunked", method=b"HEAD") + b"zz\r\n",),
            (400,),
            False,
            (b"HEAD",),
            direct=True,
        ),
        Case("HEAD of another route", (get(b"/generate", method=b"HEAD"),), (405,), methods=(b"HEAD",)),
        Case("gzip", (post(b"Content-Encoding: gzip", body=b"\x1f\x8b"),), (415,)),
        Case("identity, then br", (post(b"Content-Encoding: identity", b"Content-Encoding: br"),), (415,)),
        Case("identity coding of the body", (post(b"Content-Encoding: identity"),), (200,)),
        Case("expect", (post(b"Expect: 100-continue"),), (200,)),
        Case("expect, no body", (get(b"/livez", b"Expect: 100-continue"),), (200,)),
        Case("expect, empty body", (post(b"Expect: 100-continue", body=b""),), (400,)),
        Case("expect, refused", (expect, JSON), (404,), False, direct=True),
        Case("expect, refused, no body, then another", (expect, get()), (404,), False, unfinished=True),
        Case(
            "expect more, refused", (expect.replace(b"continue", b"continue, x"), get()), (404,), False, unfinished=True
        ),
        Case("expect, refused, with its body", (expect + JSON,), (404,)),
        Case("expect in HTTP/1.0", (post(b"Expect: 100-continue", version=b"1.0"),), (200,), False),
        Case("unknown method", (b"BREW /livez HTTP/1.1\r\nHost: x\r\n\r\n",), (400,), False, direct=True),
    ]


OTHER_PROTOCOLS = frozenset({"HTTP/0.9", "HTTP/2 preface"})  # that a proxy may speak
CASES = (*_upgrades(), *_framing(), *_targets(), *_connections())
