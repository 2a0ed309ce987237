"""Packs the weights of one model for an engine process that maps them: `python -m triptych.model.pack FD`.

The socket FD gives a `PackOrder`, and takes a `PackReply` with the file. The process ends when the socket closes.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from functools import partial

import msgspec
import torch

from triptych.model.api.messages import FailureKind
from triptych.model.checkpoint.folder import errors_about
from triptych.model.engine.network_plan import plan_network
from triptych.model.engine.packing import PackOrder, PackReply, packed_weights
from triptych.model.errors import ConfigError
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.system.child_process import FrameSocket, ignore_signals
from triptych.model.system.log_lines import log_as_parent

logger = logging.getLogger(__name__)


def main() -> None:
    """Pack what is ordered."""
    ignore_signals()
    connection = socket.socket(fileno=int(sys.argv[1]))
    frames = FrameSocket(connection)
    order = msgspec.msgpack.decode(frames.receive(), type=PackOrder)
    if order.idle:
        _yield_to_others()
    log_as_parent(order.log_level)
    torch.set_num_threads(order.threads)
    packed: PackedWeights | None = None
    try:
        packed = packed_weights(plan_network(order.spec), order.part)
        assert packed is not None, "only models on a CPU are packed"
        threading.Thread(target=partial(_exit_on_close, connection, packed), daemon=True).start()
        with errors_about(""):
            file = packed.pack(order.threads)
    except ConfigError as error:
        reply = PackReply(failure=FailureKind.CONFIG, message=str(error))
    except MemoryError:
        reply = PackReply(failure=FailureKind.MEMORY, message="out of memory")
    except Exception as error:
        logger.exception("the weights of %s could not be packed", order.spec.name)
        reply = PackReply(failure=FailureKind.ERROR, message=f"{type(error).__name__}; the log says why")
    else:
        reply = PackReply(packed.outcome)
    with suppress(EOFError, OSError):
        frames.send(msgspec.msgpack.encode(reply))
        if reply.failure is None:
            socket.send_fds(connection, [b"\0"], [file])
    os._exit(0)  # without giving gigabytes back piece by piece


def _yield_to_others() -> None:
    """Compute only while nothing else wants a processor."""
    with suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _exit_on_close(connection: socket.socket, packed: PackedWeights) -> None:
    """End this process when the other end of the socket is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    if packed.cache is not None:
        packed.cache.discard_unfinished(os.getpid())
    os._exit(1)


if __name__ == "__main__":
    main()
