from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cache import KVCache, PrefixChain, PrefixIndex
from firstlight.cache.pool import BlockPool

SIZE = 4


def cache(num_blocks: int = 16, **options: bool) -> KVCache:
    return KVCache(num_blocks, SIZE, b"weights", **options)


def computed(kv: KVCache, tokens: list[int], salt: bytes = b"", owner: str = "first") -> None:
    """Has a request compute `tokens` and end."""
    table = kv.table(owner, salt)
    kv.adopt(table, tokens, kv.peek(table, tokens))
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens))
    kv.release(table)
    kv.check([])


def num_hit_tokens(kv: KVCache, tokens: list[int], salt: bytes = b"") -> int:
    return len(kv.peek(kv.table("probe", salt), tokens)) * SIZE


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_peek_whole_prompt_cached_leaves_a_token_to_compute(num_tokens: int, hit: int) -> None:
    kv = cache()
    tokens = list(range(16))
    computed(kv, tokens)
    assert num_hit_tokens(kv, tokens[:num_tokens]) == hit


def test_peek_partial_block_is_never_shared() -> None:
    kv = cache()
    computed(kv, [1, 2, 3, 4, 5, 6])
    assert num_hit_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_peek_same_block_behind_another_prefix_is_a_miss() -> None:
    kv = cache()
    computed(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    assert num_hit_tokens(kv, [9, 2, 3, 4, 5, 6, 7, 8, 0]) == 0
    assert num_hit_tokens(kv, [5, 6, 7, 8, 0]) == 0


def test_peek_other_salt_is_a_miss() -> None:
    kv = cache()
    computed(kv, list(range(8)), salt=b"alice")
    assert num_hit_tokens(kv, list(range(9)), salt=b"bob") == 0
    assert num_hit_tokens(kv, list(range(9)), salt=b"alice") == 8


def test_chain_other_weights_or_salt_split_differently_gives_other_keys() -> None:
    roots = []
    for fingerprint, salt in ((b"a", b"bc"), (b"ab", b"c"), (b"abc", b"")):
        chain = PrefixIndex(BlockPool(2, SIZE), fingerprint).chain(salt)
        chain.extend([1, 2, 3, 4], 1)
        roots.append(chain.keys[0])
    assert len(set(roots)) == 3


def test_match_equal_key_of_other_tokens_is_a_miss() -> None:
    pool = BlockPool(2, SIZE)
    index = PrefixIndex(pool, b"w")
    (block,) = pool.allocate(1) or []
    chain = index.chain(b"")
    chain.extend([1, 2, 3, 4], 1)
    index.insert(chain, 0, block, "first")
    forged = PrefixChain(b"", SIZE)
    forged.keys, forged.contents = list(chain.keys), [b"other tokens"]
    assert index.match(chain, 1) == [block]
    assert index.match(forged, 1) == []


def test_prefix_cache_off_shares_nothing() -> None:
    kv = cache(prefix_cache=False)
    computed(kv, list(range(8)))
    assert num_hit_tokens(kv, list(range(9))) == 0
    assert kv.stats().cached_blocks == 0


def test_grow_beyond_pool_answers_false_and_takes_nothing() -> None:
    kv = cache(2)
    table = kv.table("r", b"")
    assert kv.grow(table, 8)
    assert not kv.grow(table, 9)
    assert len(table.blocks) == 2
    kv.check([table])


def test_num_needed_counts_hits_that_nobody_holds() -> None:
    kv = cache(6)
    tokens = list(range(12))
    computed(kv, tokens)
    table, holder = kv.table("r", b""), kv.table("holder", b"")
    hits = kv.peek(table, tokens)
    assert len(hits) == 2
    assert kv.num_needed(hits, 13) == 4
    kv.adopt(holder, tokens, hits)
    assert kv.num_needed(hits, 13) == 2


def test_adopted_blocks_outlive_pressure_while_held() -> None:
    kv = cache(3)
    computed(kv, list(range(8)))
    holder, other = kv.table("holder", b""), kv.table("other", b"")
    tokens = list(range(9))
    assert kv.adopt(holder, tokens, kv.peek(holder, tokens)) == 8
    assert kv.grow(other, 4)
    assert not kv.grow(other, 5)
    kv.check([holder, other])


def test_release_evicts_the_end_of_a_prompt_before_its_beginning() -> None:
    kv = cache(4)
    computed(kv, list(range(16)))
    other = kv.table("other", b"")
    assert kv.grow(other, 2 * SIZE)
    assert num_hit_tokens(kv, list(range(16))) == 8


def test_trim_gives_back_blocks_behind_the_verified_tokens() -> None:
    kv = cache(4)
    table = kv.table("r", b"")
    kv.grow(table, 13)
    kv.trim(table, 5)
    assert len(table.blocks) == 2
    assert kv.num_free == 2
    kv.check([table])


def test_claimant_names_who_computes_a_block_until_it_is_published_or_given_up() -> None:
    kv = cache()
    tokens = list(range(12))
    table, waiting = kv.table("first", b""), kv.table("second", b"")
    kv.adopt(table, tokens, kv.peek(table, tokens))
    hits = kv.peek(waiting, tokens)
    key = kv.first_missing_key(waiting, len(hits))
    assert key is not None
    assert kv.claimant(key) == "first"
    kv.grow(table, 4)
    kv.publish(table, tokens, 4)
    assert kv.claimant(key) is None
    second_key = kv.first_missing_key(waiting, 1)
    assert second_key is not None
    assert kv.claimant(second_key) == "first"
    kv.release(table)
    assert kv.claimant(second_key) is None
    kv.check([])


def test_stats_count_lookups_hits_and_evictions() -> None:
    kv = cache(4)
    computed(kv, list(range(8)))
    computed(kv, list(range(9)))
    computed(kv, list(range(100, 116)))
    stats = kv.stats()
    assert (stats.lookups, stats.hits) == (3, 1)
    assert (stats.lookup_tokens, stats.hit_tokens) == (8 + 9 + 16, 8)
    assert stats.evictions == 2
    assert stats.hit_tokens_by_tier == {"device": 8}
    assert stats.evictions_by_reason == {"room": 2, "ahead": 0, "audit": 0}
    assert stats.free_blocks == 4


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_cache_random_history_never_hits_other_tokens(data: st.DataObject) -> None:
    """Every hit must be a block that was published for exactly these tokens and has not been reused since."""
    kv = KVCache(data.draw(st.integers(2, 10)), 2, b"w")
    contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    tables = []
    for i in range(data.draw(st.integers(1, 25))):
        if tables and data.draw(st.booleans()):
            kv.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
            kv.check(tables)
            continue
        salt = data.draw(st.sampled_from([b"", b"s"]))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        table = kv.table(str(i), salt)
        hits = kv.peek(table, tokens)
        for place, block in enumerate(hits):
            assert contents[block] == (salt, tuple(tokens[: 2 * (place + 1)]))
        tables.append(table)
        start = kv.adopt(table, tokens, hits)
        if kv.grow(table, len(tokens)):
            for place in range(start // 2, len(table.blocks)):
                contents[table.blocks[place]] = (salt, tuple(tokens[: 2 * (place + 1)]))
            kv.publish(table, tokens, len(tokens))
        kv.check(tables)


def declared(kv: KVCache, tokens: list[int], salt: bytes) -> int:
    """Hit tokens of a tenant's request, which it then computes."""
    num = num_hit_tokens(kv, tokens, salt)
    computed(kv, tokens, salt)
    return num


def test_declared_prefix_is_shared_by_all_tenants_and_what_follows_is_not() -> None:
    prefix = list(range(10))
    kv = KVCache(32, SIZE, b"w", declared=[[99] * 9, prefix])
    tokens = [*prefix, *range(20, 30)]
    assert declared(kv, tokens, b"alice") == 0
    assert declared(kv, tokens, b"bob") == 8
    assert declared(kv, tokens, b"bob") == 16
    assert declared(kv, [*prefix[:4], 50, 51, 52, 53, 54], b"carol") == 4
    assert declared(kv, [1, *tokens], b"alice") == declared(kv, [1, *tokens], b"bob") == 0


def test_declared_prefixes_leave_keys_of_unsalted_requests_alone() -> None:
    keys = []
    for prefixes in ([], [list(range(8))], [list(range(6))]):
        chain = PrefixIndex(BlockPool(2, SIZE), b"w", prefixes).chain(b"")
        chain.extend(list(range(12)), 3)
        keys.append(chain.keys)
    assert keys[0] == keys[1] == keys[2]


def first_miss(kv: KVCache, tokens: list[int]) -> tuple[int, str] | None:
    table = kv.table("probe", b"")
    miss = kv.miss(table, len(kv.peek(table, tokens)))
    return None if miss is None else (miss.first_token, miss.reason)


def test_miss_names_the_first_token_that_no_cached_prompt_has() -> None:
    kv = cache(8)
    computed(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    computed(kv, [1, 2, 3, 4, 5, 9, 9, 9, 9])
    assert first_miss(kv, [1, 2, 3, 4, 5, 6, 7, 8, 0]) is None
    assert first_miss(kv, [1, 2, 3, 4, 5, 6, 0, 8, 0]) == (6, "diverged")
    assert first_miss(kv, [1, 2, 3, 4, 0, 6, 7, 8, 0]) == (4, "diverged")
    assert first_miss(kv, [0, 2, 3, 4, 5]) == (0, "diverged")
    assert first_miss(kv, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]) == (8, "not_cached")


def test_miss_of_an_evicted_block_says_so() -> None:
    kv = cache(4)
    computed(kv, list(range(16)))
    other = kv.table("other", b"")
    assert kv.grow(other, 2 * SIZE)
    assert first_miss(kv, list(range(17))) == (8, "evicted")
    kv.release(other)
    computed(kv, list(range(16)))
    assert first_miss(kv, list(range(16))) is None
    kv.check([])


def rest_hit(kv: KVCache, tokens: list[int], salt: bytes) -> int:
    """Tokens that are copied from the most similar block behind the full hits."""
    table = kv.table("probe", salt)
    kv.adopt(table, tokens, kv.peek(table, tokens))
    copied = kv.adopt_rest(table, tokens)
    kv.release(table)
    return 0 if copied is None else copied[0]


def ended(kv: KVCache, tokens: list[int], salt: bytes) -> None:
    """Has a request compute `tokens` and end."""
    table = kv.table("first", salt)
    kv.adopt(table, tokens, kv.peek(table, tokens))
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens))
    kv.publish_rest(table, tokens, len(tokens))
    kv.release(table)
    kv.check([])


def test_rest_of_an_ended_request_is_copied_up_to_the_first_other_token() -> None:
    kv = cache(32)
    ended(kv, [1, 2, 3, 4, 5, 6, 7], b"")
    assert rest_hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9], b"") == 3
    assert rest_hit(kv, [1, 2, 3, 4, 5, 6, 0, 8, 9], b"") == 2
    assert rest_hit(kv, [1, 2, 3, 4, 5, 6], b"") == 1, "a token is left to compute"
    assert rest_hit(kv, [1, 2, 3, 4, 9], b"") == 0


@pytest.mark.parametrize("prefix", [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5]])
def test_rest_is_the_tenants_own_wherever_a_declared_prefix_ends(prefix: list[int]) -> None:
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 8, 7]):
        kv = KVCache(32, SIZE, b"w", declared=[prefix] if prefix else [])
        ended(kv, tokens, b"alice")
        longer = [*tokens, 30, 31, 32]
        assert rest_hit(kv, longer, b"bob") == 0
        assert rest_hit(kv, longer, b"alice") == 3
