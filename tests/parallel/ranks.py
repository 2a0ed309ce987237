"""Ranks as threads of the test, in a real group."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tests.model.checkpoints import CPU, saved
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.sharding import Shard
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model
from triptych.model.parallel.group import Group

Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Return the result of every rank's `work`; all must make the same calls on the group."""
    rendezvous = os.memfd_create("ranks")

    def run(rank: int) -> Result:
        group = Group(Shard(rank, size), CPU)
        group.connect(rendezvous)
        try:
            return work(group)
        finally:
            group.close()

    try:
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(run, range(size)))
    finally:
        os.close(rendezvous)


def load_rank(kind: str, group: Group) -> Transformer:
    checkpoint = read_checkpoint(saved(kind).path)
    return load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group))
