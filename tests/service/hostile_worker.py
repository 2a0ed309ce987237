"""A sandbox worker with hostile code: `python -m tests.service.hostile_worker MODE USER [none]`.

It tries every way out of the sandbox and answers which ones were open. MODE is `lasting` or `forking`; with
`none` it runs as on a kernel without Landlock and seccomp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych.service.sandbox import confinement, worker_main

LIBC = ctypes.CDLL(None, use_errno=True)
KERNEL_ALONE = {"signal", "parent's memory by call", "exec", "trace", "stat"}  # resource limits do not prevent these


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def ways(front: int) -> dict[str, Callable[[], Any]]:
    buffer = ctypes.create_string_buffer(8)
    piece = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    pieces = ctypes.byref(piece)
    return {
        "parent's environment": lambda: Path(f"/proc/{front}/environ").read_bytes(),
        "parent's memory": lambda: os.open(f"/proc/{front}/mem", os.O_RDONLY),
        "parent's memory by call": lambda: checked(LIBC.process_vm_readv(front, pieces, 1, pieces, 1, 0)),
        "own environment": lambda: Path("/proc/self/environ").read_bytes(),
        "file": lambda: Path("/etc/passwd").read_bytes(),
        "folder": lambda: os.listdir("/"),
        "new file": lambda: os.open("/tmp/triptych-hostile", os.O_CREAT | os.O_WRONLY),
        "memory file": lambda: os.memfd_create("x"),
        "TCP": lambda: socket.socket().connect(("127.0.0.1", 9)),
        "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "socket pair": socket.socketpair,
        "pipe": os.pipe,
        "fork": lambda: os.fork() or os._exit(0),
        "program": lambda: subprocess.run(["/bin/true"]),
        "shell": lambda: checked(-os.system("true")),
        "signal": lambda: os.kill(front, 0),
        "trace": lambda: checked(LIBC.ptrace(16, front, 0, 0)),
        "more files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        "more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
        "stat": lambda: os.stat("/etc/passwd"),
        "exec": lambda: os.execv("/nowhere", ["x"]),
    }


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    if request.get("write"):  # a later request would read it as its reply
        os.write(0, b"\0\0\0\2{}" * 3)
    if request.get("stay"):
        signal.setitimer(signal.ITIMER_REAL, 0)
        while True:
            pass
    if request.get("huge"):
        os.write(0, b"\xff\xff\xff\xff")
    if request.get("garbage"):
        os.write(0, b"\0\0\0\1[")
        os._exit(0)
    found = {}
    for name, way in ways(request["front"]).items():
        try:
            way()
        except (OSError, ValueError) as error:
            if name == "exec" and isinstance(error, FileNotFoundError):  # the call itself was made
                found[name] = "open"
        else:
            found[name] = "open"
    descriptors = [number for number in range(64) if _is_open(number)]
    names = sorted(os.environ.keys() - {"PYTHONPATH", "LC_CTYPE", "OMP_WAIT_POLICY"})
    return {"open": sorted(found), "descriptors": descriptors, "environment": names}, b""


def _is_open(number: int) -> bool:
    try:
        os.lseek(number, 0, os.SEEK_CUR)
    except OSError as error:
        return error.errno == errno.ESPIPE  # a socket
    return True


def main() -> None:
    mode, user, *without = sys.argv[1:]
    if os.geteuid() == 0 and user != "0":
        os.setresuid(int(user), int(user), int(user))
    if without:
        confinement.support = lambda: confinement.Support(0, False)
    if mode == "lasting":
        worker_main.serve(answer, 1 << 32)
    else:
        worker_main.serve_forking(answer, lambda _: 1 << 32)


if __name__ == "__main__":
    main()
