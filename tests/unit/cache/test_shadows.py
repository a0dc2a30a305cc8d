from __future__ import annotations

import random

import pytest

from firstlight.cache import KVCache, make_policy
from firstlight.cache.leader import Leader
from firstlight.cache.reuse import ReuseShadow
from firstlight.cache.shadows import GdsfShadow, LfuShadow, LruShadow, S3FifoShadow, Shadow, serve
from firstlight.cache.tails import PromptTails

NUM_BLOCKS = 60


def shadow(policy: str) -> Shadow:
    made: dict[str, Shadow] = {
        "lru": LruShadow(),
        "lfu": LfuShadow(NUM_BLOCKS),
        "gdsf": GdsfShadow(),
        "s3fifo": S3FifoShadow(NUM_BLOCKS),
        "reuse": ReuseShadow(NUM_BLOCKS),
    }
    return made[policy]


def conversations() -> list[list[int]]:
    """Block ids of prompts: some begin alike, some go on from an earlier one."""
    rng = random.Random(7)
    prompts: list[list[int]] = []
    for i in range(1500):
        if prompts and rng.random() < 0.5:
            earlier = prompts[-rng.randrange(1, min(30, len(prompts) + 1))]
            prompts.append([*earlier[: rng.randrange(len(earlier) + 1)], 2 * i, 2 * i + 1][-16:])
        else:
            prompts.append(
                [*range(-1 - rng.randrange(3), 0), *(2 * i + 10_000 * k for k in range(rng.randrange(1, 12)))]
            )
    return prompts


def cached_hits(policy: str, prompts: list[list[int]]) -> list[int]:
    """What the engine's cache finds of each prompt."""
    kv = KVCache(NUM_BLOCKS, 1, b"", policy=make_policy(policy, NUM_BLOCKS))
    hits = []
    for prompt in prompts:
        tokens = [*(block + 100 for block in prompt), 0]
        table = kv.table("r", b"")
        found = kv.peek(table, tokens)
        hits.append(len(found))
        kv.adopt(table, tokens, found)
        assert kv.grow(table, len(prompt))
        kv.publish(table, tokens, len(prompt))
        kv.release(table)
    return hits


def keys_of(prompt: list[int]) -> list[bytes]:
    """Chained, as the cache's are."""
    return [repr(prompt[: i + 1]).encode() for i in range(len(prompt))]


@pytest.mark.parametrize("policy", ["lru", "lfu", "gdsf"])
def test_shadow_finds_in_every_prompt_what_the_cache_finds(policy: str) -> None:
    prompts = conversations()
    one = shadow(policy)
    assert [serve(one, NUM_BLOCKS, keys_of(prompt))[0] for prompt in prompts] == cached_hits(policy, prompts)


def test_s3fifo_shadow_finds_about_what_the_cache_finds() -> None:
    """It passes over blocks that may not go in another order."""
    prompts = conversations()
    one = shadow("s3fifo")
    found = sum(serve(one, NUM_BLOCKS, keys_of(prompt))[0] for prompt in prompts)
    assert found == pytest.approx(sum(cached_hits("s3fifo", prompts)), rel=0.03)


@pytest.mark.parametrize("policy", ["lru", "lfu", "gdsf", "s3fifo", "reuse"])
def test_shadow_keeps_whole_prefixes_and_no_more_than_fits(policy: str) -> None:
    one = shadow(policy)
    for prompt in conversations():
        keys = keys_of(prompt)
        before = set(one.kept)
        hits, evicted = serve(one, NUM_BLOCKS, keys)
        assert hits == len(before & set(keys))
        assert set(one.kept) == (before | set(keys)) - set(evicted)
        assert len(one.kept) <= NUM_BLOCKS


def test_shadow_of_a_prompt_that_does_not_fit_is_untouched() -> None:
    one = shadow("lru")
    serve(one, NUM_BLOCKS, [b"a"])
    assert serve(one, NUM_BLOCKS, keys_of(list(range(NUM_BLOCKS + 1)))) == (0, [])
    assert list(one.kept) == [b"a"]


def test_leader_stays_after_one_lucky_prompt_and_yields_to_a_steady_rival() -> None:
    leader = Leader([2.5] * 3)
    assert not leader.score([0, 100, 0])
    assert leader.index == 0
    changed = [leader.score([1, 1, 3]) for _ in range(50)]
    assert leader.index == 2
    assert sum(changed) == 1


def test_leader_what_a_rival_lost_before_it_began_to_win_does_not_hold_it_back() -> None:
    leader = Leader([2.5] * 2)
    for _ in range(1000):
        leader.score([3, 1])
    for _ in range(10):
        leader.score([1, 3])
    assert leader.index == 1


def test_leader_asks_more_of_a_rival_with_more_deviations() -> None:
    leader = Leader([2.5, 4.0])
    won = [leader.score([1, 2]) for _ in range(20)]
    assert won.index(True) == 16  # the first n with n > 4 * sqrt(n)


def test_leader_forgets_what_is_long_past() -> None:
    leader = Leader([2.5] * 2)
    for _ in range(3000):
        leader.score([3, 1])
    for _ in range(3000):
        leader.score([1, 3])
    assert leader.index == 1


def test_tails_are_spare_where_only_what_is_before_them_comes_again() -> None:
    tails = PromptTails()
    judged = [tails.is_spare([b"%d" % turn for turn in range(num)] + [b"end %d" % num]) for num in range(2, 40)]
    assert not any(judged[:8])
    assert all(judged[10:])


def test_tails_are_not_spare_where_prompts_go_on_from_them() -> None:
    tails = PromptTails()
    assert not any(tails.is_spare([b"%d" % turn for turn in range(num)]) for num in range(1, 40))
