"""The process that checks kernels: `python -m triptych.model.kernel_check.child FD`.

The socket FD gives the device and the checks, and takes one JSON object when the process is ready, then one for each
check. A kernel that reads or writes where it must not ends this process, or makes the device unusable
for it: the last object then has `last`, and the parent has another process do the rest. A loop without end is the
parent's to find. The process ends when the socket closes.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading

import torch

from triptych.model.kernel_check.check import Check, WrongNumbersError
from triptych.model.kernel_check.codec import decode
from triptych.model.system.child_process import FrameSocket, ignore_signals
from triptych.model.system.fallbacks import summary

MEMORY = "out of memory"  # the reason if the device has too little
_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def main() -> None:
    """Run the checks. The process exits without cleanup, which might wait for a broken kernel."""
    ignore_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_on_close, args=(connection,), daemon=True).start()
    try:
        _serve(FrameSocket(connection))
    except (EOFError, OSError):
        os._exit(1)
    os._exit(0)


def _serve(frames: FrameSocket) -> None:
    device, checks = torch.device(frames.receive().decode()), decode(frames.receive())
    _send(frames, {"ready": failure_of_device(device)})
    for check in checks:
        reason = run_check(check, device)
        last = bool(reason and failure_of_device(device))
        _send(frames, {"reason": reason, "last": last})
        if last:
            return


def run_check(check: Check, device: torch.device) -> str:
    """Return why a check fails; empty: it passes."""
    try:
        with torch.inference_mode():
            check.run(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except WrongNumbersError as error:
        return str(error)
    except Exception as error:  # of a compiler, of CUDA, of Triton
        return MEMORY if _is_memory(error) else f"{type(error).__name__}: {summary(error)}"[:200]
    return ""


def failure_of_device(device: torch.device) -> str:
    """Return why the device does not compute; empty: it does. After an illegal access every call of a process fails."""
    try:
        total = torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        return MEMORY if _is_memory(error) else summary(error)
    return "" if total == 2 else "it adds wrong"


def _is_memory(error: Exception) -> bool:
    """Whether an error means that the device has too little memory: torch's, CUDA's and Triton's, or cuBLAS's."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _MEMORY_TEXTS)


def _send(frames: FrameSocket, message: dict[str, object]) -> None:
    frames.send(json.dumps(message).encode())


def _exit_on_close(connection: socket.socket) -> None:
    """Wait until the other end of the socket is closed, then end this process at once."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
