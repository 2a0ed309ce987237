"""Rows of integers that pass a ring in shared memory arrive unchanged, and a full ring waits for its slowest reader."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych.model.errors import EngineDeadError
from triptych.model.parallel import step_ring
from triptych.model.parallel.step_ring import MOST, Place, RingReader, StepRing

READERS = 3
INTEGERS = 100  # that the ring holds


@pytest.fixture
def ring() -> Iterator[StepRing]:
    ring = StepRing(READERS, 4 * INTEGERS)
    yield ring
    ring.close()


def readers(ring: StepRing) -> list[RingReader]:
    return [RingReader(ring.descriptor, at, READERS) for at in range(READERS)]


def row(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, MOST, (size,), generator=generator)


def test_every_rank_reads_every_row_while_others_are_behind() -> None:
    """Check random lengths, over and over the ring's end; a rank may have several rows left to read."""
    ring, chance = StepRing(READERS, 4 * INTEGERS), random.Random(7)
    waiting: list[list[tuple[Place | bytes, Tensor]]] = [[] for _ in range(READERS)]
    ends = readers(ring)

    def read_one(at: int) -> None:
        place, expected = waiting[at].pop(0)
        assert torch.equal(ends[at].read(place), expected)

    def slowest_reads() -> None:
        read_one(max(range(READERS), key=lambda at: len(waiting[at])))

    for number in range(1000):
        sent = row(chance.choice([0, 1, 7, 30, 50, 51, 99, INTEGERS]), number)
        place = ring.write(sent, 60.0, slowest_reads)
        for queue in waiting:
            queue.append((place, sent))
        for at in range(READERS):
            while waiting[at] and chance.random() < 0.5:
                read_one(at)
    ring.close()


def test_a_row_that_is_longer_than_the_ring_travels_in_the_message(ring: StepRing) -> None:
    sent = row(INTEGERS + 1, 1)
    place = ring.write(sent, 0.0)
    assert isinstance(place, bytes) and len(place) == 4 * len(sent)
    assert all(torch.equal(one.read(place), sent) for one in readers(ring))


def test_rows_use_the_same_memory_while_all_are_read_at_once(ring: StepRing) -> None:
    for number in range(5):
        place = ring.write(row(30, number), 0.0)
        assert not isinstance(place, bytes) and place[0] % INTEGERS == 0
        for one in readers(ring):
            one.read(place)


def test_a_full_ring_waits_no_longer_than_it_may(ring: StepRing) -> None:
    first, *others = readers(ring)
    places = [ring.write(row(50, number), 0.0) for number in range(2)]
    for one in (*others, *others):
        one.read(places[0])
    with pytest.raises(TimeoutError):
        ring.write(row(1, 3), 0.05)  # the first rank has read nothing
    first.read(places[0])
    assert ring.write(row(50, 4), 0.0) == (100, 50)


def test_a_rank_that_ends_while_the_ring_is_full_is_noticed_at_once(ring: StepRing) -> None:
    def check() -> None:
        raise EngineDeadError("rank 1 of m ended by signal SIGKILL")

    ring.write(row(INTEGERS, 1), 0.0)
    with pytest.raises(EngineDeadError, match="rank 1 of m ended"):
        ring.write(row(1, 2), 60.0, check)


def test_another_process_reads_what_is_written(ring: StepRing) -> None:
    sent = row(60, 5)
    place = ring.write(sent, 0.0)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(RingReader(ring.descriptor, 1, READERS).read(place), sent) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [int(count) for count in ring._counts] == [0, 60, 0]


def test_only_written_memory_is_taken() -> None:
    ring = StepRing(7)
    ring.write(row(1000, 1), 0.0)
    assert os.fstat(ring.descriptor).st_size > step_ring.RING_BYTES
    assert os.fstat(ring.descriptor).st_blocks * 512 < 64 << 10
    ring.close()
