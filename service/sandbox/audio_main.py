"""The process that decodes audio files, which its parent can kill: `python -m service.sandbox.audio_main`.

A decoder is a large program in C that reads bytes of a stranger, and a small file may decode to days of silence. Here
the kernel limits time (an alarm ends the process), memory, open files and their size, and the environment is empty.

Messages on standard input, a socket, are a length of 4 bytes (big-endian), JSON, a NUL and bytes. A request
`{sampling_rate, limits, seconds}` with a file gets one reply: `{}` with mono samples in float32 (little-endian), or
`{"error", "message"}` without bytes; the error is refused (by `AudioError`) or memory.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import signal
import socket
import struct
from typing import Any

from model.media.audio_file import AudioError, AudioLimits, decode_audio

READY = b"R"
_LENGTH = struct.Struct(">I")
_LIBRARIES = 1 << 30  # address space of the interpreter and the decoders' libraries, most of which is never used
_FILES = 16
_PART = 1 << 20  # bytes received at a time


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, str], bytes]:
    """Return a reply and the samples."""
    try:
        samples = decode_audio(data, request["sampling_rate"], AudioLimits(**request["limits"]))
    except AudioError as error:
        return {"error": "refused", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory", "message": "decoding the audio takes too much memory"}, b""
    return {}, samples.astype("<f4", copy=False).tobytes()


def _confine(request: dict[str, Any]) -> None:
    """Limit memory to what the largest allowed file and its samples take, three times over."""
    limits = AudioLimits(**request["limits"])
    memory = _LIBRARIES + 3 * (limits.file_bytes + 4 * int(limits.seconds * request["sampling_rate"]))
    for kind, bound in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (bound, bound))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))


def _take(channel: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or fewer if the other side has closed."""
    data = bytearray()
    while len(data) < size and (part := channel.recv(min(size - len(data), _PART))):
        data += part
    return bytes(data)


def main() -> None:
    """Answer requests until the other side closes."""
    channel = socket.socket(fileno=0)
    for library in ("soundfile", "av"):  # before files may no longer be opened
        if importlib.util.find_spec(library) is not None:
            importlib.import_module(library)
    channel.sendall(READY)
    confined = False
    while len(header := _take(channel, _LENGTH.size)) == _LENGTH.size:
        _serve(channel, _LENGTH.unpack(header)[0], confine=not confined)
        confined = True


def _serve(channel: socket.socket, size: int, *, confine: bool) -> None:
    """Answer a request of `size` bytes; nothing of it is kept while the process waits for the next one."""
    message, _, data = _take(channel, size).partition(b"\0")
    request = json.loads(message)
    if confine:
        _confine(request)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # without a handler, the signal ends the process
    reply, samples = answer(request, data)
    signal.setitimer(signal.ITIMER_REAL, 0)
    head = json.dumps(reply).encode() + b"\0"
    channel.sendall(_LENGTH.pack(len(head) + len(samples)))
    channel.sendall(head)
    channel.sendall(samples)


if __name__ == "__main__":
    main()
