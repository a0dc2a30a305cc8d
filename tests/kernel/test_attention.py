"""Paged attention: scalar twin and any grouping to the bit, a float64 oracle, and slots that nobody may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.backend.cpu import _native
from tests.kernel.layouts import EVERY_SET, EVERY_VECTOR_SET, F32, F64, bits

Ints = npt.NDArray[np.int32]
SPLIT = _native.KEYS_PER_SPLIT
SEEDS = st.integers(0, 2**32 - 1)
HALF_MAX = 65504.0


@dataclass(frozen=True)
class Paged:
    """A KV cache of random blocks over `num_keys` random keys. k and v are `[num_keys, kv_heads, head_dim]`."""

    cache: npt.NDArray[np.uint16]
    table: Ints
    block_size: int
    k: F32
    v: F32


def elements(kv_heads: int, dim: int, block_size: int) -> int:
    return 2 * kv_heads * dim * block_size


def write(kernels: str, paged: Paged, key: int, k: F32, v: F32) -> None:
    block, slot = int(paged.table[key // paged.block_size]), key % paged.block_size
    _native.kernel_write_kv(kernels, paged.cache, paged.block_size, block, slot, k, v)


def paged(rng: np.random.Generator, num_keys: int, *, kv_heads: int = 2, dim: int = 32, block_size: int = 16) -> Paged:
    """Blocks in random order, none adjacent by design; all memory holds old finite values first."""
    num_blocks = -(-num_keys // block_size)
    table = rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
    cache = old_values(rng, (num_blocks + 3, elements(kv_heads, dim, block_size)))
    k, v = (rng.standard_normal((num_keys, kv_heads, dim)).astype(np.float32) for _ in range(2))
    made = Paged(cache, table, block_size, k, v)
    for key in range(num_keys):
        write("avx2", made, key, k[key], v[key])
    return made


def old_values(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.uint16]:
    """Any finite float16, of any size: what another request may have left in a slot."""
    values = rng.integers(0, 65536, shape).astype(np.uint16)
    return np.where(values & 0x7C00 == 0x7C00, values ^ 0x4000, values).astype(np.uint16)


def attend_split(
    kernels: str, kv: Paged, q: F32, first: Ints, limit: Ints, *, head: int, split: int, cap: float = 0.0
) -> F32:
    """`[rows, head_dim + 2]`: o, m, l of one split."""
    result = np.full((len(q), q.shape[1] + 2), np.nan, np.float32)
    kv_heads = kv.k.shape[1]
    _native.kernel_attend(
        kernels, kv.cache, kv_heads, kv.block_size, q, first, limit, kv.table, head, split, cap, result
    )
    return result


def attend(
    kernels: str, kv: Paged, q: F32, first: Ints, limit: Ints, *, head: int = 0, cap: float = 0.0
) -> tuple[F32, F32]:
    """All splits merged in ascending order: (out `[rows, head_dim]`, running `[rows, head_dim + 2]`)."""
    running = np.zeros((len(q), q.shape[1] + 2), np.float32)
    out = np.full_like(q, np.nan)
    for split in range(-(-int(limit.max()) // SPLIT)):
        part = attend_split(kernels, kv, q, first, limit, head=head, split=split, cap=cap)
        _native.kernel_merge(kernels, running, part)
    for row in range(len(q)):
        _native.kernel_finish(running[row], out[row])
    return out, running


def oracle(kv: Paged, q: F32, first: Ints, limit: Ints, *, head: int = 0, cap: float = 0.0) -> F64:
    """Plain softmax attention in float64 over K and V as float16 holds them."""
    k, v = (part[:, head].astype(np.float16).astype(np.float64) for part in (kv.k, kv.v))
    scores = q.astype(np.float64) @ k.T
    if cap > 0:
        scores = cap * np.tanh(scores / cap)
    key = np.arange(len(k))[None, :]
    scores[(key < first[:, None]) | (key >= limit[:, None])] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def queries(
    rng: np.random.Generator, rows: int, dim: int, num_keys: int, window: int = 0, heads: int = 1
) -> tuple[F32, Ints, Ints]:
    """`rows` query rows, `heads` of each token, at ascending random positions; some look sharply, some do not."""
    q = (rng.standard_normal((rows, dim)) * rng.uniform(0.02, 0.6, (rows, 1))).astype(np.float32)
    tokens = np.sort(rng.integers(1, num_keys + 1, -(-rows // heads)))
    limit = np.repeat(tokens, heads)[:rows].astype(np.int32)
    first = np.maximum(0, limit - window).astype(np.int32) if window else np.zeros(rows, np.int32)
    return q, first, limit


@EVERY_VECTOR_SET
@given(
    seed=SEEDS,
    rows=st.integers(1, 20),
    heads=st.sampled_from([1, 2, 3, 4, 7, 8]),
    num_keys=st.integers(1, 3 * SPLIT + 20),
    dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 64]),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    cap=st.sampled_from([0.0, 0.0, 5.0, 50.0]),
)
@settings(max_examples=80, deadline=None)
def test_attention_any_shape_gives_the_scalar_bits(
    kernels: str, seed: int, rows: int, heads: int, num_keys: int, dim: int, block_size: int, window: int, cap: float
) -> None:
    rng = np.random.default_rng(seed)
    kv = paged(rng, num_keys, kv_heads=2, dim=dim, block_size=block_size)
    q, first, limit = queries(rng, rows, dim, num_keys, window, heads)
    head = int(rng.integers(0, 2))
    scalar, scalar_running = attend("scalar", kv, q, first, limit, head=head, cap=cap)
    vector, vector_running = attend(kernels, kv, q, first, limit, head=head, cap=cap)
    assert bits(scalar) == bits(vector)
    np.testing.assert_array_equal(scalar_running, vector_running)  # a zero's sign may differ until the end


@EVERY_SET
@given(seed=SEEDS, rows=st.integers(1, 30), num_keys=st.integers(1, 2 * SPLIT + 9), data=st.data())
@settings(max_examples=30, deadline=None)
def test_attention_row_in_any_company_gives_the_bits_it_has_alone(
    kernels: str, seed: int, rows: int, num_keys: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    window = data.draw(st.sampled_from([0, 1, 17, 130]))
    dim = data.draw(st.sampled_from([16, 64, 112]))
    kv = paged(rng, num_keys, kv_heads=1, dim=dim)
    q, first, limit = queries(rng, rows, dim, num_keys, window)
    together, _ = attend(kernels, kv, q, first, limit)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))  # any order, repeats too
    again, _ = attend(kernels, kv, q[chosen], first[chosen], limit[chosen])
    assert bits(again) == bits(together[chosen])
    one = chosen[:1]
    assert bits(attend(kernels, kv, q[one], first[one], limit[one])[0]) == bits(together[one])


@EVERY_SET
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (200, 5.0), (0, 50.0)])
def test_attention_is_softmax_over_the_visible_keys(kernels: str, dim: int, window: int, cap: float) -> None:
    rng = np.random.default_rng(dim + window)
    kv = paged(rng, 401, kv_heads=2, dim=dim, block_size=32)
    q, first, limit = queries(rng, 9, dim, 401, window)
    for head in (0, 1):
        out, _ = attend(kernels, kv, q, first, limit, head=head, cap=cap)
        # Scores reach about 30, so their float32 rounding moves a weight by a few parts in a million.
        np.testing.assert_allclose(out, oracle(kv, q, first, limit, head=head, cap=cap), atol=2e-5)


@EVERY_SET
@given(seed=SEEDS, num_keys=st.integers(1, 300), rows=st.sampled_from([1, 5, 14]), window=st.sampled_from([0, 20]))
@settings(max_examples=25, deadline=None)
def test_attention_slots_out_of_sight_never_change_a_bit(
    kernels: str, seed: int, num_keys: int, rows: int, window: int
) -> None:
    """Whatever finite values other requests left in the last block, in other blocks or before the window."""
    rng = np.random.default_rng(seed)
    kv = paged(rng, num_keys, kv_heads=1, dim=32)
    q, first, limit = queries(rng, rows, 32, num_keys, window)
    before, _ = attend(kernels, kv, q, first, limit)
    kv.cache[:] = old_values(rng, kv.cache.shape)
    for key in range(int(first.min()), int(limit.max())):
        write(kernels, kv, key, kv.k[key], kv.v[key])
    assert bits(attend(kernels, kv, q, first, limit)[0]) == bits(before)


@EVERY_SET
def test_attention_table_order_does_not_matter(kernels: str) -> None:
    rng = np.random.default_rng(2)
    kv = paged(rng, 200, kv_heads=2, dim=64)
    q, first, limit = queries(rng, 13, 64, 200)
    wanted, _ = attend(kernels, kv, q, first, limit, head=1)
    order = rng.permutation(len(kv.cache))
    cache, table = np.empty_like(kv.cache), order[kv.table].astype(np.int32)
    cache[order] = kv.cache
    moved = Paged(cache, table, kv.block_size, kv.k, kv.v)
    assert bits(attend(kernels, moved, q, first, limit, head=1)[0]) == bits(wanted)


@EVERY_SET
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_attention_block_size_does_not_matter(kernels: str, block_size: int) -> None:
    q, first, limit = queries(np.random.default_rng(3), 13, 64, 300)
    small, large = (paged(np.random.default_rng(4), 300, dim=64, block_size=size) for size in (16, block_size))
    large = Paged(large.cache, large.table, block_size, small.k, small.v)
    for key in range(300):
        write(kernels, large, key, small.k[key], small.v[key])
    assert bits(attend(kernels, large, q, first, limit)[0]) == bits(attend(kernels, small, q, first, limit)[0])


@EVERY_SET
def test_attention_row_that_sees_no_key_gives_zero(kernels: str) -> None:
    kv = paged(np.random.default_rng(5), 40, kv_heads=1, dim=16)
    q = np.ones((3, 16), np.float32)
    limit = np.array([0, 20, 40], np.int32)
    first = np.array([0, 20, 0], np.int32)
    out, running = attend(kernels, kv, q, first, limit)
    assert not out[:2].any()
    assert not running[:2, -1].any()
    assert out[2].any()


@EVERY_SET
def test_attention_query_with_nan_leaves_its_neighbours_alone(kernels: str) -> None:
    rng = np.random.default_rng(6)
    kv = paged(rng, 150, kv_heads=1, dim=32)
    q, first, limit = queries(rng, 8, 32, 150)
    wanted, _ = attend(kernels, kv, q, first, limit)
    for odd in (np.nan, np.inf, 3e38):
        q[4, 7] = odd
        out, _ = attend(kernels, kv, q, first, limit)
        assert bits(np.delete(out, 4, axis=0)) == bits(np.delete(wanted, 4, axis=0))
        np.testing.assert_array_equal(out[4], attend("scalar", kv, q, first, limit)[0][4])


# Merging


@EVERY_SET
def test_merge_folds_splits_in_the_stated_order(kernels: str) -> None:
    """running * exp(running m - m) + part * exp(part m - m); parts without keys change nothing."""
    rng = np.random.default_rng(8)
    parts = rng.standard_normal((4, 34)).astype(np.float32)
    parts[:, 33] = np.abs(parts[:, 33]) + 0.5
    empty = np.zeros(34, np.float32)
    empty[32] = -np.inf
    running = np.full(34, 7, np.float32)
    running[33] = 0.0
    wide = None
    for part in (empty, parts[0], empty, parts[1], parts[2], empty, parts[3]):
        _native.kernel_merge(kernels, running[None], part[None])
    for part in parts.astype(np.float64):
        if wide is None:
            wide = part
            continue
        m = max(wide[32], part[32])
        scaled = wide * np.exp(wide[32] - m) + part * np.exp(part[32] - m)
        scaled[32] = m
        wide = scaled
    np.testing.assert_allclose(running, wide, rtol=1e-5, atol=1e-6)
    out = np.empty(32, np.float32)
    _native.kernel_finish(running, out)
    assert bits(out) == bits(running[:32] * (np.float32(1) / running[33]) + np.float32(0))


@EVERY_VECTOR_SET
@given(seed=SEEDS, rows=st.integers(1, 40), dim=st.sampled_from([16, 64, 80]), spread=st.sampled_from([0, 3, 200]))
@settings(max_examples=40, deadline=None)
def test_merge_any_parts_give_the_scalar_bits(kernels: str, seed: int, rows: int, dim: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    running, part = rng.standard_normal((2, rows, dim + 2)).astype(np.float32)
    part[:, dim] += rng.uniform(-spread, spread, rows).astype(np.float32)
    for side in (running, part):
        side[:, dim + 1] = rng.choice([0.0, 0.5, 30.0], rows)
        side[side[:, dim + 1] == 0, dim] = -np.inf
    results = []
    for each in ("scalar", kernels):
        results.append(running.copy())
        _native.kernel_merge(each, results[-1], part)
    assert bits(results[0]) == bits(results[1])


# Writing


@given(seed=SEEDS, dim=st.sampled_from([16, 48, 128]), heads=st.integers(1, 4), block_size=st.sampled_from([16, 64]))
@settings(max_examples=25, deadline=None)
def test_write_kv_any_value_gives_the_scalar_bits_in_its_slot_alone(
    seed: int, dim: int, heads: int, block_size: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, (2, heads, dim), dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.standard_normal((2, heads, dim)).astype(np.float32)
    k, v = np.where(rng.random(values.shape) < 0.3, values, near)
    before = old_values(rng, (3, elements(heads, dim, block_size)))
    slot = int(rng.integers(0, block_size))
    caches = []
    for kernels in ("scalar", "avx2"):
        caches.append(before.copy())
        _native.kernel_write_kv(kernels, caches[-1], block_size, 1, slot, k, v)
    assert bits(caches[0]) == bits(caches[1])
    keys, held = caches[1][1].reshape(2, heads, -1)
    slots = keys.reshape(heads, dim, block_size)[:, :, slot], held.reshape(heads, block_size, dim)[:, slot]
    for got, given_ in zip(slots, (k, v), strict=True):
        clamped = np.clip(np.where(np.isnan(given_), np.float32(HALF_MAX), given_), -HALF_MAX, HALF_MAX)
        assert bits(got) == bits(clamped.astype(np.float16).view(np.uint16))


@EVERY_SET
def test_write_kv_leaves_every_other_slot_as_it_was(kernels: str) -> None:
    cache = np.full((2, elements(2, 16, 32)), 0x1234, np.uint16)
    ones = np.ones((2, 16), np.float32)
    _native.kernel_write_kv(kernels, cache, 32, 1, 5, ones, ones)
    assert np.count_nonzero(cache != 0x1234) == 2 * 2 * 16
    assert (cache[0] == 0x1234).all()


@EVERY_SET
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30, 65519.0, 65520.0])
def test_write_kv_what_float16_cannot_hold_is_clamped_to_finite(kernels: str, odd: float) -> None:
    cache = np.zeros((1, elements(1, 16, 16)), np.uint16)
    k = np.full((1, 16), odd, np.float32)
    _native.kernel_write_kv(kernels, cache, 16, 0, 3, k, k)
    written = cache.view(np.float16)[cache != 0].astype(np.float64)
    assert written.tolist() == [-HALF_MAX if odd < 0 else HALF_MAX] * 32


@EVERY_SET
def test_write_kv_rounds_every_float16_boundary_to_even(kernels: str) -> None:
    """All float16 values and the midpoints between neighbours, denormals among them."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = np.concatenate([half[:-1], (half[:-1] + half[1:]) / 2])
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), -values])
    values = np.pad(values, (0, -len(values) % 1024)).reshape(-1, 1, 1024)
    for chunk in values:
        cache = np.zeros((1, elements(1, 1024, 16)), np.uint16)
        _native.kernel_write_kv(kernels, cache, 16, 0, 0, chunk, chunk)
        assert bits(cache[0, 16 * 1024 : 17 * 1024]) == bits(chunk.astype(np.float16))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"table": np.array([0, 9], np.int32)}, "block id"),
        ({"limit": np.array([33], np.int32)}, "limit"),
        ({"first": np.array([-1], np.int32)}, "first"),
        ({"kv_head": 1}, "kv_head"),
        ({"split": -1}, "split"),
        ({"block_size": 24}, "block_size"),
        ({"result": np.zeros((1, 16), np.float32)}, "result"),
    ],
)
def test_attention_wrong_arguments_are_refused(change: dict[str, Any], named: str) -> None:
    kv = paged(np.random.default_rng(0), 32, kv_heads=1, dim=16)
    fine = {
        "kernels": "avx2",
        "cache": kv.cache,
        "num_kv_heads": 1,
        "block_size": 16,
        "q": np.zeros((1, 16), np.float32),
        "first": np.zeros(1, np.int32),
        "limit": np.ones(1, np.int32),
        "table": kv.table,
        "kv_head": 0,
        "split": 0,
        "soft_cap": 0.0,
        "result": np.zeros((1, 18), np.float32),
    }
    _native.kernel_attend(**fine)
    with pytest.raises(ValueError, match=named):
        _native.kernel_attend(**fine | change)
