"""The loop of a worker process: receives requests from its parent, and answers them in a confined process.

A message is a length of 4 bytes (big-endian), then JSON, then optionally a NUL and bytes. Standard input is a socket.
A lasting worker (`serve`) confines itself and answers on this socket. A forking worker (`serve_forking`) confines a
forked copy of itself for each request, so that no request affects the next one. Each request has its own socket: the
worker receives it on standard input, and sends back how the process of the request ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from triptych.model.system.stacks import print_stacks_on_signal
from triptych.service.sandbox import confinement

READY = b"R"
LENGTH = struct.Struct(">I")
STATUS = struct.Struct(">i")  # an exit code, or the negative number of a signal
_TRIAL_MEMORY = 1 << 32
_PART = 1 << 20  # bytes received at a time

# From a request and its bytes to a reply and its bytes.
Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


def serve(answer: Answer, memory: int) -> None:
    """Confine this process to `memory` bytes and answer requests until the parent closes."""
    print_stacks_on_signal()
    channel = socket.socket(fileno=0)
    confinement.confine(memory)
    channel.sendall(READY)
    while _serve_one(channel, answer):
        pass


def serve_forking(answer: Answer, memory: Callable[[dict[str, Any]], int]) -> None:
    """Answer each request in its own process, confined to `memory(request)` bytes, until the parent closes."""
    print_stacks_on_signal()
    channel = socket.socket(fileno=0)
    gc.freeze()
    trial = _fork(channel, None, answer, lambda _: _TRIAL_MEMORY)
    if _wait(trial):  # a process cannot be confined here, so answer nothing
        return
    channel.sendall(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not data:
            return
        child = _fork(channel, descriptors[0], answer, memory)
        os.close(descriptors[0])
        channel.sendall(STATUS.pack(_wait(child)))


def _fork(channel: socket.socket, request: int | None, answer: Answer, memory: Callable[[dict[str, Any]], int]) -> int:
    """Fork a process that answers the request on the socket `request`; without one it only confines itself."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        confinement.end_with_parent(parent)
        if request is None:
            confinement.confine(memory({}))
        else:
            os.dup2(request, channel.fileno())  # replaces the socket to the parent
            os.close(request)
            _serve_one(channel, answer, lambda received: confinement.confine(memory(received)))
        code = 0
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve_one(
    channel: socket.socket, answer: Answer, prepare: Callable[[dict[str, Any]], None] = lambda _: None
) -> bool:
    """Receive a request, call `prepare`, and answer; return False if the other side has closed."""
    header = _receive(channel, LENGTH.size)
    if len(header) < LENGTH.size:
        return False
    message, _, data = _receive(channel, LENGTH.unpack(header)[0]).partition(b"\0")
    request = json.loads(message)
    prepare(request)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # without a handler, the signal ends the process
    reply, bytes_of_reply = answer(request, data)
    signal.setitimer(signal.ITIMER_REAL, 0)
    head = json.dumps(reply).encode() + (b"\0" if bytes_of_reply else b"")
    channel.sendall(LENGTH.pack(len(head) + len(bytes_of_reply)) + head)
    channel.sendall(bytes_of_reply)
    return True


def _receive(channel: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or fewer if the other side has closed."""
    data = bytearray()
    while len(data) < size and (part := channel.recv(min(size - len(data), _PART))):
        data += part
    return bytes(data)
