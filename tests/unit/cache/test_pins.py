from __future__ import annotations

import math

import pytest

from firstlight.cache import BlockTable, KVCache
from tests.unit.scheduler.drive import Drive, ids_alone, request

SIZE = 4


def computed(kv: KVCache, tokens: list[int]) -> BlockTable:
    """The table of a request that has computed `tokens` and is still open."""
    table = kv.table("r", b"")
    kv.adopt(table, tokens, kv.peek(table, tokens))
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens))
    return table


def num_hit(kv: KVCache, tokens: list[int]) -> int:
    return len(kv.peek(kv.table("probe", b""), tokens))


def fill(kv: KVCache) -> None:
    """Uses every block that is free."""
    other = kv.table("other", b"")
    assert kv.grow(other, kv.num_free * SIZE)
    kv.check([other])
    kv.release(other)


def test_pinned_blocks_outlive_pressure_until_their_time_ends() -> None:
    kv = KVCache(8, SIZE, b"w", max_pinned=4)
    tokens = list(range(17))
    table = computed(kv, tokens)
    assert kv.pin(table, 13, 10.0) == 12
    kv.release(table)
    fill(kv)
    assert num_hit(kv, tokens) == 3
    kv.expire_pins(9.9)
    fill(kv)
    assert num_hit(kv, tokens) == 3
    kv.expire_pins(10.0)
    assert kv.num_pinned == 0
    fill(kv)
    assert num_hit(kv, tokens) == 0
    kv.check([])


def test_pins_of_one_tenant_leave_room_for_another_s() -> None:
    kv = KVCache(24, SIZE, b"w", max_pinned=8)
    table = computed(kv, list(range(16)))
    assert kv.pin(table, 16, 10.0, b"greedy") == 2 * SIZE
    assert kv.pin(table, 16, 10.0, b"greedy") == 2 * SIZE
    other = computed(kv, list(range(20, 36)))
    assert kv.pin(other, 16, 10.0, b"greedy") == 0
    assert kv.pin(other, 16, 10.0, b"modest") == 2 * SIZE
    assert kv.pin(other, 16, math.inf) == 4 * SIZE
    kv.expire_pins(10.0)
    third = computed(kv, list(range(40, 56)))
    assert kv.pin(third, 16, 20.0, b"greedy") == 2 * SIZE
    for one in (table, other, third):
        kv.release(one)
    kv.check([])


def test_pin_beyond_the_quota_keeps_the_beginning() -> None:
    kv = KVCache(8, SIZE, b"w", max_pinned=2)
    table = computed(kv, list(range(16)))
    assert kv.pin(table, 16, math.inf) == 2 * SIZE
    kv.release(table)
    assert kv.stats().pinned_blocks == 2
    kv.check([])


def test_pin_of_the_same_prefix_again_takes_no_more_quota_and_the_longer_time_stands() -> None:
    kv = KVCache(8, SIZE, b"w", max_pinned=2)
    table = computed(kv, list(range(9)))
    assert kv.pin(table, 8, 20.0) == kv.pin(table, 8, 5.0) == 8
    kv.expire_pins(10.0)
    assert kv.num_pinned == 2
    kv.expire_pins(20.0)
    assert kv.num_pinned == 0


def test_pin_without_a_prefix_cache_pins_nothing() -> None:
    kv = KVCache(8, SIZE, b"w", max_pinned=2, prefix_cache=False)
    table = kv.table("r", b"")
    assert kv.grow(table, 8)
    assert kv.pin(table, 8, 5.0) == 0


def test_pinned_request_is_hit_after_traffic_that_fills_the_pool() -> None:
    drive = Drive(num_blocks=12, max_pinned=4)
    drive.add(request("pinned", range(16), 2, pins=[(16, 100.0)]))
    drive.finish()
    assert drive.reports["pinned"].pinned_tokens == 16
    for i in range(6):
        drive.add(request(f"r{i}", [i] * 20, 8))
    drive.finish()
    drive.add(request("again", [*range(16), 1], 2))
    drive.finish()
    assert drive.reports["again"].hit_tokens == 16
    drive.clock.advance(200.0)
    for i in range(6):
        drive.add(request(f"s{i}", [20 + i] * 20, 8))
    drive.finish()
    drive.add(request("late", [*range(16), 1], 2))
    drive.finish()
    assert drive.reports["late"].hit_tokens == 0


@pytest.mark.parametrize("num_prompt", [20, 31])
def test_only_request_takes_the_room_of_pins_rather_than_wait_for_ever(num_prompt: int) -> None:
    drive = Drive(num_blocks=8, max_pinned=6, max_step_tokens=64)
    drive.add(request("pinned", range(24), 1, pins=[(24, None)]))
    drive.finish()
    large = request("large", [7] * num_prompt, 12)
    drive.add(large)
    drive.finish()
    assert drive.ids("large") == ids_alone(large, 32)
    assert drive.scheduler.cache.stats().pins_yielded == 1
