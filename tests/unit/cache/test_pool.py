from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cache import BlockPool


def test_allocate_more_than_free_answers_none_and_takes_nothing() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check([held])


def test_release_keeps_key_until_block_is_reused() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1) or []
    assert pool.name(block, b"key")
    pool.release([block])
    assert pool.find(b"key") == block
    pool.allocate(2)
    assert pool.find(b"key") is None
    assert pool.num_evictions == 1


def test_allocate_reuses_unnamed_blocks_before_named_ones() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3) or []
    pool.name(blocks[0], b"a")
    pool.release(blocks)
    pool.allocate(2)
    assert pool.find(b"a") == blocks[0]


def test_allocate_reuses_longest_freed_named_block_first() -> None:
    pool = BlockPool(3, 4)
    first, second, third = pool.allocate(3) or []
    for block, key in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.name(block, key)
    pool.release([second])
    pool.release([first, third])
    assert pool.allocate(1) == [second]
    assert pool.allocate(2) == [first, third]


def test_locked_block_is_not_reused() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1) or []
    pool.name(block, b"key")
    pool.release([block])
    pool.lock([block])
    assert pool.allocate(2) is None
    pool.check([[block]])


def test_second_block_with_a_key_stays_unnamed() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2) or []
    assert pool.name(first, b"key")
    assert not pool.name(second, b"key")
    assert pool.key(second) is None
    pool.check([[first], [second]])


def test_release_of_a_free_block_is_caught() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release([0])


def test_check_names_a_leaked_block() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1) or []
    with pytest.raises(AssertionError, match=f"block {block} counts 1 references, tables hold 0"):
        pool.check([])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pool_random_history_keeps_every_invariant(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 8), label="blocks"), 4)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40), label="steps")):
        action = data.draw(st.sampled_from(["allocate", "release", "name", "share"]))
        if action == "allocate":
            num = data.draw(st.integers(0, 4))
            free_before = pool.num_free
            blocks = pool.allocate(num)
            assert (blocks is None) == (num > free_before)
            tables += [blocks] if blocks else []
        elif tables and action == "release":
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif tables and action == "name":
            block = data.draw(st.sampled_from(data.draw(st.sampled_from(tables))))
            if pool.key(block) is None:
                pool.name(block, data.draw(st.sampled_from([b"a", b"b", b"c", b"d"])))
        elif action == "share":
            block_or_none = pool.find(data.draw(st.sampled_from([b"a", b"b", b"c", b"d"])))
            if block_or_none is not None:
                pool.lock([block_or_none])
                tables.append([block_or_none])
        pool.check(tables)
