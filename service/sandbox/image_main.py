"""The process that decodes image files, which its parent can kill: `python -m service.sandbox.image_main`.

A decoder is a program in C that reads bytes of a stranger, and a file of 100 KB may have 32 million pixels. Here the
kernel limits time (an alarm ends the process), memory, open files and their size, and the environment is empty.

Messages are those of `service.sandbox.audio_main`. A request `{processing, most_pixels, all_pixels, seconds}` with a
file gets `{"pixels"}`, how many it has, and those that the model reads; or `{"error", "message"}` without bytes, the
error being refused or memory.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
from typing import Any

from PIL import Image

from model.media.images import MAX_PIXELS, ImageError, ImageProcessing, num_pixels

READY = b"R"
_LENGTH = struct.Struct(">I")
_MEMORY = (1 << 30) + 16 * MAX_PIXELS  # address space: libraries, most of which is never used, and two copies or three
_FILES = 16
_PART = 1 << 20  # bytes received at a time


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a reply and the pixels."""
    try:
        found = num_pixels(data)
        if found > request["most_pixels"]:
            message = f"the images of a request have more than {request['all_pixels']:,} pixels (max_image_pixels)"
            return {"error": "refused", "message": message}, b""
        return {"pixels": found}, ImageProcessing(**request["processing"]).prepare(data)
    except ImageError as error:
        return {"error": "refused", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory", "message": "decoding the image takes too much memory"}, b""


def _confine() -> None:
    for kind, bound in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
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
    Image.preinit()  # before files may no longer be opened
    _confine()
    channel.sendall(READY)
    while len(header := _take(channel, _LENGTH.size)) == _LENGTH.size:
        message, _, data = _take(channel, _LENGTH.unpack(header)[0]).partition(b"\0")
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # without a handler, the signal ends the process
        reply, pixels = answer(request, data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        head = json.dumps(reply).encode() + b"\0"
        channel.sendall(_LENGTH.pack(len(head) + len(pixels)) + head)
        channel.sendall(pixels)


if __name__ == "__main__":
    main()
