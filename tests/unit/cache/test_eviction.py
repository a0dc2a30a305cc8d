from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cache import POLICIES, BlockPool, BlockTable, KVCache, make_policy

SIZE = 2


def cache(num_blocks: int, policy: str) -> KVCache:
    return KVCache(num_blocks, SIZE, b"weights", policy=make_policy(policy, num_blocks))


def prompt(conversation: int, num_blocks: int) -> list[int]:
    """Full blocks that only this conversation has, and one token to compute."""
    return [conversation] * (num_blocks * SIZE) + [0]


def serve(kv: KVCache, tokens: list[int]) -> int:
    """Has one request come, compute and end; how many blocks it found."""
    table = kv.table("r", b"")
    hits = kv.peek(table, tokens)
    kv.adopt(table, tokens, hits)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens))
    kv.release(table)
    kv.check([])
    return len(hits)


def has(kv: KVCache, tokens: list[int]) -> int:
    return len(kv.peek(kv.table("probe", b""), tokens))


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_evicts_the_end_of_a_prompt_before_its_beginning(policy: str) -> None:
    kv = cache(8, policy)
    serve(kv, prompt(1, 6))
    serve(kv, prompt(2, 4))
    assert has(kv, prompt(1, 6)) == 3
    assert has(kv, prompt(2, 4)) == 4


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_policy_random_history_keeps_every_invariant(policy: str, data: st.DataObject) -> None:
    """Requests overlap, share beginnings and end early; the audit runs after each change."""
    kv = cache(data.draw(st.integers(2, 10)), policy)
    tables = {}
    for i in range(data.draw(st.integers(1, 30))):
        if tables and data.draw(st.booleans()):
            kv.release(tables.pop(data.draw(st.sampled_from(sorted(tables)))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            table = tables[str(i)] = kv.table(str(i), b"")
            hits = kv.peek(table, tokens)
            if data.draw(st.booleans()):
                kv.awaits(table)
                if data.draw(st.booleans()):
                    continue  # it leaves the queue later, without having been served
            kv.adopt(table, tokens, hits)
            if kv.grow(table, len(tokens)):
                kv.publish(table, tokens, data.draw(st.integers(0, len(tokens))))
        kv.check(tables.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_what_is_cached_can_be_found_from_its_beginning(policy: str) -> None:
    rng = random.Random(3)
    kv = cache(40, policy)
    prompts = [[1] * rng.choice([0, 4]) + [rng.randrange(2, 12)] * rng.randrange(2, 20) + [0] for _ in range(300)]
    for tokens in prompts:
        serve(kv, tokens)
    found = {block for tokens in prompts for block in kv.peek(kv.table("probe", b""), [*tokens, 0])}
    assert len(found) == kv.stats().cached_blocks


def queue(kv: KVCache, owner: str, tokens: list[int]) -> BlockTable:
    """Has a request wait for its turn."""
    table = kv.table(owner, b"")
    kv.peek(table, tokens)
    kv.awaits(table)
    return table


def test_conversation_spares_what_the_queue_will_use_and_no_longer() -> None:
    kv = cache(7, "conversation")
    for conversation in (1, 2, 3):
        serve(kv, prompt(conversation, 2))
    waiting = [queue(kv, owner, prompt(1, 2)) for owner in ("first", "second")]
    for conversation in range(4, 8):
        serve(kv, prompt(conversation, 2))
        assert has(kv, prompt(1, 2)) == 2
    kv.release(waiting.pop())
    serve(kv, prompt(8, 2))
    assert has(kv, prompt(1, 2)) == 2
    kv.release(waiting.pop())
    for conversation in range(9, 12):
        serve(kv, prompt(conversation, 2))
    assert has(kv, prompt(1, 2)) == 0


def test_conversation_evicts_what_the_queue_will_use_where_there_is_nothing_else() -> None:
    kv = cache(7, "conversation")
    for conversation in (1, 2, 3):
        serve(kv, prompt(conversation, 2))
    waiting = [queue(kv, str(conversation), prompt(conversation, 2)) for conversation in (1, 2, 3)]
    table = kv.table("r", b"")
    kv.adopt(table, prompt(4, 3), [])
    assert kv.grow(table, 4 * SIZE)
    kv.check([table, *waiting])
    assert sum(has(kv, prompt(conversation, 2)) for conversation in (1, 2, 3)) == 3


def test_lru_keeps_what_was_used_last() -> None:
    kv = cache(6, "lru")
    for conversation in (1, 2, 1, 3):
        serve(kv, prompt(conversation, 2))
    serve(kv, prompt(4, 1))
    assert [has(kv, prompt(c, 2)) for c in (1, 2, 3)] == [2, 0, 2]


def test_lfu_keeps_what_was_used_often_even_before_it_was_evicted() -> None:
    kv = cache(5, "lfu")
    for conversation in (1, 1, 2, 3, 4, 2):
        serve(kv, prompt(conversation, 1))
    for conversation in range(10, 15):
        serve(kv, prompt(conversation, 2))
    assert [has(kv, prompt(c, 1)) for c in (1, 2, 3, 4)] == [1, 1, 0, 0]


def test_gdsf_old_favourites_give_way_in_time() -> None:
    kv = cache(4, "gdsf")
    for conversation in (1, 1, 1):
        serve(kv, prompt(conversation, 1))
    serve(kv, prompt(2, 2))
    serve(kv, prompt(3, 2))
    assert has(kv, prompt(1, 1)) == 1
    for conversation in range(10, 30):
        serve(kv, prompt(conversation, 2))
    assert has(kv, prompt(1, 1)) == 0


def test_s3fifo_a_scan_of_one_off_blocks_does_not_push_out_what_is_used_again() -> None:
    kv = cache(20, "s3fifo")
    for conversation in (1, 2, 1, 2):
        serve(kv, prompt(conversation, 3))
    for conversation in range(10, 60):
        serve(kv, prompt(conversation, 1))
    assert [has(kv, prompt(c, 3)) for c in (1, 2)] == [3, 3]


def hit_share(policy: str, prompts: list[list[int]], num_blocks: int) -> float:
    kv = cache(num_blocks, policy)
    return sum(serve(kv, tokens) for tokens in prompts) / sum(len(tokens) // SIZE for tokens in prompts)


def turns_among_one_off_prompts() -> list[list[int]]:
    """Conversations that grow by a block a turn and return after 12 requests, four of five prompts never return."""
    rng = random.Random(5)
    due: dict[int, list[int]] = {}
    prompts = []
    for i in range(3000):
        tokens = due.pop(i, None)
        if tokens is None:
            tokens = prompt(100 + i, 4)
        if len(tokens) > 4 * SIZE + 1 or rng.random() < 0.2:
            after = i + 12 + rng.randrange(3)
            if len(tokens) < 12 * SIZE and after not in due:
                due[after] = tokens[:-1] + [50 + i] * SIZE + [0]
        prompts.append(tokens)
    return prompts


def test_conversation_learns_who_returns() -> None:
    prompts = turns_among_one_off_prompts()
    rivals = [hit_share(policy, prompts, 36) for policy in POLICIES if policy != "conversation"]
    assert hit_share("conversation", prompts, 36) > 1.2 * max(rivals)


def test_conversation_follows_recency_where_recency_wins() -> None:
    """Every prompt is used three times in a row of eight, and never again: what was used often is dead."""
    prompts = [prompt(2 + 8 * (i // 24) + i % 8, 3) for i in range(3000)]
    assert hit_share("conversation", prompts, 30) >= 0.97 * hit_share("lru", prompts, 30)


def test_evicted_block_held_elsewhere_under_its_own_key_is_not_offered() -> None:
    """Two requests compute the same blocks at the same time; the first copy is freed while the other goes on."""
    pool = BlockPool(4, 1)
    first, second = pool.allocate(1) or [], pool.allocate(2) or []
    assert pool.name(first[0], b"a")
    assert not pool.name(second[0], b"a")
    assert pool.name(second[1], b"b", b"a")
    pool.release(first)
    pool.check([second])
    assert pool.allocate(2) is not None
    assert pool.find(b"a") is None
    assert pool.find(b"b") == second[1]
