"""The process of a rank from 1 on: it holds its shard of one model, and runs rank 0's steps and calls with it.

A step is one message of integers. Each rank builds the same inputs from it, or replays the same graph; the host does
not wait for its device. Rank 0 starts `python -m triptych.model.engine.rank_main SOCKET RENDEZVOUS RING RANK SIZE`. The
process ends when its socket closes, so it never outlives rank 0, even within a collective operation. It ends on an
exception too, which rank 0 detects.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from triptych.model.attention.selection import select_backend, select_layers
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.sharding import Shard
from triptych.model.engine.execution.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder, recorded
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.kernel_checks import use_torch
from triptych.model.engine.warmup import compile_own_kernels
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.parallel.group import Group
from triptych.model.parallel.messages import (
    Answer,
    Call,
    Load,
    Message,
    Pools,
    Record,
    Step,
    dtype_of,
    receive_tensors,
    unpack_arguments,
)
from triptych.model.parallel.step_ring import RingReader
from triptych.model.system.background_work import finish
from triptych.model.system.child_process import FrameSocket, ignore_signals
from triptych.model.system.devices import add_in_float32
from triptych.model.system.log_lines import log_as_parent
from triptych.model.system.stacks import print_stacks_on_signal

logger = logging.getLogger(__name__)


class RankWorker:
    """Executes rank 0's messages on one rank."""

    def __init__(self, frames: FrameSocket, rendezvous: int, ring: int, shard: Shard) -> None:
        """`rendezvous` and `ring` are descriptors of memory that all ranks share."""
        self._frames = frames
        self._ring = RingReader(ring, shard.rank - 1, shard.size - 1)
        self._rendezvous = rendezvous
        self._shard = shard
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._group: Group | None = None
        self._model: Transformer | None = None
        self._cache: KVCache | None = None
        self._program: StepProgram | None = None

    def run(self) -> None:
        """Execute messages until rank 0 ends; then raise `EOFError`."""
        while True:
            message = self._decoder.decode(self._frames.receive())
            if isinstance(message, Step):
                self._step(message)
            elif isinstance(message, Call):
                self._call(message)
            elif isinstance(message, Record):
                self._record(message)
            elif isinstance(message, Pools):
                self._make_pools(message)
            else:
                self._load(message)

    def _load(self, load: Load) -> None:
        checkpoint = read_checkpoint(Path(load.path), pickle=load.pickle, pictures=False)
        checkpoint = replace(checkpoint, config=checkpoint.config.stretched(load.max_model_len))
        device, dtype = torch.device(load.device), dtype_of(load.dtype)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            add_in_float32()
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._shard.size))
        group = Group(self._shard, device)
        use_torch(load.faults)
        found = select_backend(device, dtype, load.attention_backend, load.faults)
        selection = select_layers(found, self._shard.config(checkpoint.config), dtype, dtype)
        linear = LinearFactory(
            dtype,
            device,
            quantization=load.quantization,
            fp8=load.fp8,
            integers=load.integers,
            collective=group,
            faults=load.faults,
        )
        self._model = load_model(checkpoint, selection.backend, linear)
        self._group = group
        if device.type == "cuda":
            finish(compile_own_kernels(self._model))
        self._answer()
        group.connect(self._rendezvous)
        self._answer(*(torch.cuda.mem_get_info(device) if device.type == "cuda" else ()))

    def _make_pools(self, pools: Pools) -> None:
        assert self._group is not None and self._model is not None and self._model.decoder is not None
        config, device = self._model.decoder.config, self._group.device
        dtype = dtype_of(pools.dtype)
        self._cache = KVCache(config, pools.num_pages, pools.block_size, dtype, device, pools.num_states)
        self._program = StepProgram(self._model, self._cache, group=self._group)
        self._answer()

    def _record(self, sizes: Record) -> None:
        """Record decode steps and answer whether it worked; rank 0 uses them if all ranks could."""
        assert self._model is not None and self._cache is not None and self._program is not None
        graphs = DecodeGraphs(
            self._model,
            self._cache,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            record=self._recorder(self._cache.device),
        )
        self._program.graphs, failure = recorded(graphs)
        self._answer(failure=failure)

    @torch.inference_mode()
    def _step(self, step: Step) -> None:
        assert self._program is not None and self._group is not None
        plan = StepPlan.of(step, self._ring.read(step.row, pinned=self._group.device.type == "cuda"))
        hidden, _ = self._program.run(plan, None)
        for _ in self._program.prompt_logits(plan, hidden):
            pass  # rank 0 scores the prompts; this rank computes its part of the vocabulary

    @torch.inference_mode()
    def _call(self, call: Call) -> None:
        model, cache, group = self._model, self._cache, self._group
        assert model is not None and group is not None
        arguments: list[Any] = unpack_arguments(call, receive_tensors(call, group), group.device)
        if call.name == "decode":
            inputs, uses_cache, cross = arguments
            model.decode(inputs, cache if uses_cache else None, cross)
        elif call.name == "encode":
            model.encode(*arguments)
        elif call.name == "logits":
            model.logits(*arguments)
        else:
            model.masked_logits(*arguments)

    def _recorder(self, device: torch.device) -> Recorder:
        return CudaRecorder(device, collective=True)

    def _answer(self, free: int = 0, total: int = 0, failure: str = "") -> None:
        self._frames.send(msgspec.msgpack.encode(Answer(free, total, failure)))


def _exit_on_close(connection: socket.socket) -> None:
    """Wait until the other end of the socket is closed, then end this process at once."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Run the rank. The process exits without cleanup: with unfinished collectives that would hang or abort."""
    ignore_signals()
    print_stacks_on_signal()
    descriptor, rendezvous, ring, rank, size = map(int, sys.argv[1:])
    log_as_parent(rank=rank)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_exit_on_close, args=(connection,), daemon=True).start()
    try:
        RankWorker(FrameSocket(connection), rendezvous, ring, Shard(rank, size)).run()
    except EOFError:
        os._exit(0)
    except BaseException:
        logger.exception("this rank broke")
        os._exit(1)


if __name__ == "__main__":
    main()
