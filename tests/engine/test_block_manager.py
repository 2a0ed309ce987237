"""The block manager: every block is free, cached, or in as many tables as its reference count says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scripted import request
from triptych.model.config.cache import PoolSize
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.sequence import BlockTable, SequenceState


def sequence(prompt: int, source: int = 0) -> SequenceState:
    return SequenceState.of(request("r", prompt, source=source), 0, 0, ())


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 40), st.integers(1, 40), st.integers(0, 40))
def test_can_allocate_is_exact(size: int, blocks: int, prompt: int, source: int) -> None:
    manager, one = BlockManager([PoolSize(blocks)], size), sequence(prompt, source)
    needed = -(-prompt // size) + -(-source // size)
    assert manager.can_allocate(one, prompt) == (needed <= blocks)
    if needed <= blocks:
        manager.allocate(one, prompt)
        assert len(one.tables[0]) + len(one.source_tables[0]) == needed
        manager.check_invariants([one])
        manager.free(one)
        manager.free(one)
    assert manager.num_free == blocks
    manager.check_invariants([one])


def test_can_allocate_has_no_side_effect() -> None:
    manager, one = BlockManager([PoolSize(4)], 4), sequence(10, 3)
    assert manager.can_allocate(one, 10)
    assert (manager.num_free, one.tables, one.source_tables) == (4, [[]], [[]])


def test_tables_grow_only_at_block_borders_and_the_source_is_placed_once() -> None:
    manager, one = BlockManager([PoolSize(10)], 4), sequence(4, 5)
    sizes = []
    for _ in range(6):
        manager.allocate(one, 1)
        one.num_computed_tokens += 1
        sizes.append((len(one.tables[0]), len(one.source_tables[0])))
    assert sizes == [(1, 2)] * 4 + [(2, 2)] * 2


def test_slots_follow_the_table() -> None:
    assert BlockManager([PoolSize(9)], 4).slots([7, 2, 5], 2, 10) == [30, 31, 8, 9, 10, 11, 20, 21]


@given(st.lists(st.tuples(st.sampled_from(["extend", "set", "cut", "pop", "del", "clear", "look"]), st.integers(0, 9))))
def test_the_row_of_a_table_is_the_list(changes: list[tuple[str, int]]) -> None:
    table, plain = BlockTable([3, 1]), [3, 1]
    for change, number in changes:
        at = number % len(plain) if plain else 0
        for one in (table, plain):
            if change == "extend":
                one.extend(range(number))
            elif change == "set" and one:
                one[at - len(one) * (number % 2)] = 100 + number
            elif change == "cut":
                one[at:] = range(number)
            elif change == "pop" and one:
                one.pop()
            elif change == "del":
                del one[at:]
            elif change == "clear":
                one.clear()
        if change == "look":
            assert table.row.tolist() == plain
    assert table.row.tolist() == plain == table


class CountingTable(BlockTable):
    """A block table that counts the blocks it converts."""

    converted = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.converted += len(found) if isinstance(key, slice) else 0
        return found


def test_long_table_converts_only_new_blocks() -> None:
    table = CountingTable()
    table.extend(range(1000))
    for block in range(500):
        table.append(block)
        assert len(table.row) == len(table)
    assert table.converted == 1500


@pytest.mark.parametrize("fault", ["lost", "shared", "twice free"])
def test_control_check_invariants_finds_errors(fault: str) -> None:
    manager, one, other = BlockManager([PoolSize(8)], 4), sequence(8), sequence(8)
    manager.allocate(one, 8)
    manager.allocate(other, 8)
    manager.check_invariants([one, other])
    if fault == "lost":
        one.tables[0].pop()
    elif fault == "shared":
        one.tables[0][0] = other.tables[0][0]
    else:
        manager.free(SequenceState.of(one.request, 0, 0, ()))
        manager.pools[0]._free.append(one.tables[0][0])
    with pytest.raises(AssertionError, match=r"lost or doubled|a count is wrong"):
        manager.check_invariants([one, other])
