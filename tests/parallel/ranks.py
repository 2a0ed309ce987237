"""Ranks as threads of the test, in a real group."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from model.attention.sdpa import SdpaBackend
from model.checkpoint.folder import read_checkpoint
from model.config.sharding import Shard
from model.linear.factory import LinearFactory
from model.network.transformer import Transformer
from model.network.weights import load_model
from model.parallel.group import Group
from tests.model.checkpoints import CPU, saved

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
