"""Maps the packed weights of networks on a CPU; a child process packs them first if the cache lacks them.

    engine process                                   python -m triptych.model.pack
    plan_network, PackedWeights -- PackOrder ---->   plan_network, PackedWeights.pack
    receive, map <------ PackReply and the file --

The child ends when its socket closes. While other models are served it has the lowest priority. A small model is packed
in the engine process, which takes less time than starting another one.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from triptych.model.api.engine_config import AUTO_CACHE, EngineConfig
from triptych.model.api.messages import FailureKind, ModelSpec
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.engine.network_plan import NetworkPlan
from triptych.model.errors import CheckpointError, ConfigError, EngineDeadError
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import Work, in_thread
from triptych.model.system.cache_folders import user_cache
from triptych.model.system.child_process import FrameSocket, describe_exit, start_child

SMALL_BYTES = 16 << 20  # weights up to this size are packed in the engine process
AUTO_CACHE_BYTES = 32 << 30  # of all files in the user's cache
_END_SECONDS = 1.0  # for a child to end by itself

logger = logging.getLogger(__name__)


class Part(StrEnum):
    """A network of a spec."""

    MODEL = "model"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class PackOrder:
    """The message to the child: the weights to pack, and how."""

    spec: ModelSpec
    part: Part
    threads: int
    idle: bool  # compute only while nothing else wants a processor
    log_level: int


@dataclass(frozen=True, slots=True)
class PackReply:
    """The child's reply to an order; the descriptor of the file comes with it."""

    outcome: str = ""
    failure: FailureKind | None = None
    message: str = ""


def packed_weights(plan: NetworkPlan, part: Part) -> PackedWeights | None:
    """Plan the packed weights of a network; None if it is not on a CPU, or split over ranks.

    Raises `ConfigError` if others can write to the cache.
    """
    engine = plan.spec.engine
    if plan.device.type != "cpu" or engine.tensor_parallel_size > 1:
        return None
    if part is Part.MODEL:
        return PackedWeights(open_cache(engine), plan.checkpoint, plan.selection.backend, plan.linear)
    assert plan.draft is not None
    return PackedWeights(open_cache(engine), plan.draft.checkpoint, plan.draft.selection.backend, plan.draft.linear)


def open_cache(engine: EngineConfig) -> WeightsCache | None:
    """Return the weights cache of the settings; None if there is none or the user's cache cannot be used."""
    if engine.weights_cache is None:
        return None
    if engine.weights_cache != AUTO_CACHE:
        return WeightsCache(Path(engine.weights_cache), engine.weights_cache_size)
    try:
        return WeightsCache(user_cache() / "weights", engine.weights_cache_size or AUTO_CACHE_BYTES)
    except (ConfigError, RuntimeError) as error:  # RuntimeError: there is no home directory
        logger.info("packed weights are not kept: %s", error)
        return None


def load_packed(packed: PackedWeights, spec: ModelSpec, part: Part, *, idle: bool) -> Work[Transformer]:
    """Return a network with its weights; with `idle` they are packed at the lowest priority.

    Raises `ConfigError`, `MemoryError`, `EngineDeadError`.
    """
    yield from in_thread(packed.read_ahead)
    if not packed.is_found and packed.size <= SMALL_BYTES:
        return packed.load()
    if not packed.is_found:
        threads = max(1, torch.get_num_threads() // 2) if idle else torch.get_num_threads()
        order = PackOrder(spec, part, threads, idle, logging.getLogger().getEffectiveLevel())
        child = _Child(order, packed)
        kept = "" if packed.cache is None else ", once"
        logger.info("%s: packing %.2f GB of weights for this CPU%s", spec.name, packed.size / 1e9, kept)
        yield from in_thread(child.run, child.stop, computes=True)
        if not packed.is_found:
            raise CheckpointError("the packed weights cannot be read back")
    return packed.map()


class _Child:
    """A process that packs weights."""

    def __init__(self, order: PackOrder, packed: PackedWeights) -> None:
        self._order = order
        self._packed = packed
        self._connection, self._other = socket.socketpair()

    def stop(self) -> None:
        """Make a running child end soon."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Have the weights packed."""
        with self._connection, self._other:
            process = start_child("triptych.model.pack", self._other.fileno(), descriptors=[self._other.fileno()])
            try:
                self._other.close()
                self._receive(process)
            finally:
                process.kill()
                process.wait()
                if self._packed.cache is not None:
                    self._packed.cache.discard_unfinished(process.pid)

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        import msgspec  # not needed on a machine that packs nothing

        frames, file = FrameSocket(self._connection), -1
        try:
            frames.send(msgspec.msgpack.encode(self._order))
            reply = msgspec.msgpack.decode(frames.receive(), type=PackReply)
            if reply.failure is None:
                (file,) = socket.recv_fds(self._connection, 1, 1)[1]
        except (EOFError, OSError, ValueError):
            why = _how_it_ends(process)
            raise EngineDeadError(
                f"{self._order.spec.name}: the process that packs its weights ended {why}"
                + (": there may be too little memory" if "SIGKILL" in why else "")
            ) from None
        if reply.failure is None:
            try:
                self._packed.receive(file, reply.outcome)
            finally:
                os.close(file)
            self._packed.read_ahead()
            return
        if reply.failure is FailureKind.CONFIG:
            raise CheckpointError(reply.message)
        if reply.failure is FailureKind.MEMORY:
            raise MemoryError(reply.message)
        raise EngineDeadError(f"{self._order.spec.name}: its weights could not be packed: {reply.message}")


def _how_it_ends(process: subprocess.Popen[bytes]) -> str:
    try:
        return describe_exit(process.wait(_END_SECONDS))
    except subprocess.TimeoutExpired:
        return "its connection"


def weights_cache_use(plan: NetworkPlan, packed: PackedWeights | None) -> str:
    """Return how the weights cache was used; empty without a cache."""
    if packed is not None:
        return packed.outcome
    if plan.spec.engine.weights_cache in (None, AUTO_CACHE):
        return ""
    reason = "the model is split over ranks" if plan.device.type == "cpu" else f"weights are on {plan.device}"
    return f"not used: {reason}"
