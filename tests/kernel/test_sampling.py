"""Sampling against a float64 oracle written here, vector path against scalar path, noise against chance."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import firstlight.backend.cpu._native as _native

F32_MAX = float(np.finfo(np.float32).max)
INF = math.inf


@dataclass(frozen=True)
class Params:
    """What a row is sampled with. Defaults: the plain softmax at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    output_index: int = 0
    num_logprobs: int = -1
    bias: dict[int, float] = field(default_factory=dict)
    history: tuple[int, ...] = ()
    num_prompt: int = 0
    mask: tuple[int, ...] | None = None
    """Allowed ids."""


class Sampled(NamedTuple):
    token: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


def sample(logits: np.ndarray, p: Params, *, scalar: bool = False) -> Sampled:
    return Sampled(
        *_native.sample_row(
            logits,
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            min_p=p.min_p,
            presence=p.presence,
            frequency=p.frequency,
            repetition=p.repetition,
            seed=p.seed,
            output_index=p.output_index,
            num_logprobs=p.num_logprobs,
            bias_ids=np.array(list(p.bias), dtype=np.int32),
            bias_values=np.array(list(p.bias.values()), dtype=np.float32),
            history=np.array(p.history, dtype=np.int32),
            num_prompt=p.num_prompt,
            scalar=scalar,
            mask=None if p.mask is None else mask_of(p.mask, len(logits)),
        )
    )


def mask_of(allowed: tuple[int, ...], vocab: int) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def row(values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def bits(result: Sampled) -> tuple[int, bytes, list[int], bytes]:
    return result.token, row(result.logprob).tobytes(), result.top_ids, row(result.top_logprobs).tobytes()


# The oracle: float64, full sorts, no shortcut in common with the code under test.


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 from its paper: `[4, n]` counters to `[4, n]` words, as uint64 below 2^32."""
    c = counter.astype(np.uint64)
    k0, k1 = key
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = np.stack([(b >> half) ^ c[1] ^ np.uint64(k0), b & low, (a >> half) ^ c[3] ^ np.uint64(k1), a & low])
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def oracle_noise(seed: int, output_index: int, num_ids: int) -> np.ndarray:
    ids = np.arange(num_ids)
    place = ids // 32 * 8 + ids % 8
    zeros = np.zeros_like(ids)
    words = philox(np.stack([place, zeros + output_index, zeros, zeros]), (seed & 0xFFFFFFFF, seed >> 32))
    word = words[ids % 32 // 8, ids].astype(np.float64)
    return -np.log(-np.log1p(-(word + 0.5) / 2**32))


def cleaned(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(np.isnan(x), np.float32(-INF), np.minimum(x, np.float32(F32_MAX))))


def oracle_adjusted(logits: np.ndarray, p: Params) -> np.ndarray:
    """Logits after bias and penalties, in float32 as the contract's order of operations has it."""
    x = cleaned(logits)
    with np.errstate(all="ignore"):
        for token, value in p.bias.items():
            if 0 <= token < len(x):
                x[token] = cleaned(x[token] + np.float32(value))
        inside = [t if 0 <= t < len(x) else -1 for t in p.history]
        for token in set(inside) - {-1}:
            r = np.float32(p.repetition)
            x[token] = cleaned(x[token] / r if x[token] > 0 else x[token] * r)
            count = inside[p.num_prompt :].count(token)
            if count:
                penalty = np.float32(p.presence) + np.float32(p.frequency) * np.float32(count)
                x[token] = cleaned(x[token] - penalty)
    return x


class Kept(NamedTuple):
    mask: np.ndarray
    scaled: np.ndarray


def oracle_kept(x: np.ndarray, p: Params, slack: float = 0.0) -> Kept:
    """What the filters keep. `slack` widens (or, negative, narrows) the thresholds by that share."""
    with np.errstate(all="ignore"):
        scaled = (x.astype(np.float64) - float(x.max())) / float(np.float32(p.temperature))
    order = np.lexsort((np.arange(len(x)), -x.astype(np.float64)))
    if 0 < p.top_k < len(x):
        order = order[: p.top_k]
    if p.top_p < 1:
        mass = np.exp(scaled[order])
        target = max(float(np.float32(p.top_p)), 0.0) + slack
        order = order[: int(np.searchsorted(np.cumsum(mass) / mass.sum(), target)) + 1]
    mask = np.zeros(len(x), dtype=bool)
    mask[order] = True
    if p.min_p > 0:
        mask &= scaled >= min(math.log(np.float32(p.min_p)) - 10 * slack, 0.0)
    return Kept(mask, scaled)


def oracle_token(logits: np.ndarray, p: Params) -> int | None:
    """The token, or None where float32 and float64 may differ with right: near a threshold, or near a tie."""
    x = oracle_adjusted(logits, p)
    if x.max() == -INF:
        return 0
    if not p.temperature > 0:
        return int(np.argmax(x))
    noise = oracle_noise(p.seed, p.output_index, len(x))
    best = set()
    for slack in (-2e-6, 2e-6):
        kept = oracle_kept(x, p, slack)
        score = np.where(kept.mask, kept.scaled + noise, -INF)
        best.add(int(np.argmax(score)))
        if len(x) > 1 and score.max() - np.partition(score, -2)[-2] < 1e-4:
            return None
    return best.pop() if len(best) == 1 else None


def oracle_logprobs(logits: np.ndarray) -> np.ndarray:
    x = cleaned(logits).astype(np.float64)
    return np.asarray(x - x.max() - np.log(np.exp(x - x.max()).sum()))


def chi_square_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean under the null hypothesis."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# Random rows and parameters.


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    vocab = draw(st.one_of(st.integers(1, 70), st.integers(1, 700), st.sampled_from([4096, 4097, 9001])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["plain", "wide", "ties", "constant", "peaked", "huge", "broken"]))
    x = rng.normal(size=vocab) * {"wide": 30.0, "huge": 1e38, "constant": 0.0}.get(kind, 3.0)
    if kind == "ties":
        x = np.round(x)
    if kind == "peaked":
        x[rng.integers(vocab)] += 40
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    if kind == "broken":
        values = row([np.nan, -INF, INF, F32_MAX, -F32_MAX, -0.0, 1e-42])
        where = rng.random(vocab) < draw(st.sampled_from([0.1, 0.9, 1.0]))
        out[where] = rng.choice(values, size=int(where.sum()))
    return out


@st.composite
def params_for(draw: st.DrawFn, vocab: int) -> Params:
    ids = st.integers(-2, vocab + 1)
    history = draw(st.one_of(st.just([]), st.lists(ids, max_size=30)))
    return Params(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.7, 100.0, 1e-38])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.95, 0.5, 1e-6, 0.0])),
        top_k=draw(st.one_of(st.just(0), st.integers(-1, 60), st.integers(1, vocab + 1))),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-3, 0.3, 1.0])),
        presence=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency=draw(st.sampled_from([0.0, 0.25, -1.0])),
        repetition=draw(st.sampled_from([1.0, 1.3, 0.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        output_index=draw(st.integers(0, 2**32 - 1)),
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 5, 20, vocab + 2])),
        bias=draw(st.dictionaries(ids, st.sampled_from([1.0, -3.5, 100.0, -100.0, INF, -INF, math.nan]), max_size=5)),
        history=tuple(history),
        num_prompt=draw(st.integers(0, len(history))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Params]:
    logits = draw(rows())
    return logits, draw(params_for(len(logits)))


@settings(deadline=None, max_examples=250, print_blob=True)
@given(cases())
def test_sample_any_row_equals_scalar_to_the_bit_and_restores_it(case: tuple[np.ndarray, Params]) -> None:
    logits, p = case
    before = logits.tobytes()
    fast = sample(logits, p)
    assert logits.tobytes() == before
    assert bits(fast) == bits(sample(logits, p, scalar=True))
    assert logits.tobytes() == before
    assert 0 <= fast.token < len(logits)


@settings(deadline=None, max_examples=250, print_blob=True)
@given(cases())
def test_sample_any_row_equals_oracle(case: tuple[np.ndarray, Params]) -> None:
    logits, p = case
    expected = oracle_token(logits, p)
    if expected is not None:
        assert sample(logits, p).token == expected


FILTERS = [
    Params(),
    Params(temperature=0.6),
    Params(top_k=50),
    Params(top_k=2500),
    Params(top_p=0.95),
    Params(top_p=0.3),
    Params(min_p=0.02),
    Params(temperature=1.5, top_k=200, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_sample_vocabulary_sized_row_equals_oracle(filters: Params) -> None:
    rng = np.random.default_rng(5)
    clear = 0
    for i in range(12):
        logits = row(rng.normal(size=49152) * 2.2)
        logits[rng.integers(49152, size=20)] += 8
        p = replace(filters, seed=2**63 + i, output_index=i)
        expected = oracle_token(logits, p)
        if expected is not None:
            clear += 1
            assert sample(logits, p).token == expected
    assert clear >= 10


@pytest.mark.parametrize(
    "filters",
    [
        Params(),
        Params(temperature=0.5),
        Params(temperature=2.0),
        Params(top_k=4),
        Params(top_p=0.8),
        Params(min_p=0.15),
        Params(top_k=9, top_p=0.9, min_p=0.1),
        Params(
            bias={0: 1.5, 7: -1.0},
            history=(3, 3, 5, 5, 5, 8),
            num_prompt=1,
            presence=0.4,
            frequency=0.2,
            repetition=1.2,
        ),
    ],
)
def test_sample_many_output_indices_has_the_exact_distribution(filters: Params) -> None:
    logits = row([1.2, 0.3, -0.5, 2.0, 1.9, 0.0, -2.0, 0.9, 1.1, -0.1, 0.6, 1.5, 0.2])
    draws = 12_000
    counts = np.zeros(len(logits))
    for i in range(draws):
        counts[sample(logits, replace(filters, seed=99, output_index=i)).token] += 1
    kept = oracle_kept(oracle_adjusted(logits, filters), filters)
    mass = np.where(kept.mask, np.exp(kept.scaled), 0.0)
    assert not counts[~kept.mask].any()
    assert abs(chi_square_z(counts[kept.mask], draws * mass[kept.mask] / mass.sum())) < 4


def test_sample_filtered_agrees_with_unfiltered_wherever_its_token_is_kept() -> None:
    rng = np.random.default_rng(1)
    logits = row(rng.normal(size=500) * 2)
    top = set(np.argsort(-logits)[:40].tolist())
    agreed = 0
    for i in range(200):
        token = sample(logits, Params(output_index=i)).token
        if token in top:
            agreed += 1
            assert sample(logits, Params(output_index=i, top_k=40)).token == token
    assert agreed > 50


def test_sample_near_equals_far_apart_equal_scalar_at_every_index() -> None:
    logits = np.full(
        40, -INF, dtype=np.float32
    )  # each alone among its eight neighbours: the bound on its noise decides
    logits[[0, 8, 39]] = [0.0, 0.3, 0.1]
    for i in range(3000):
        p = Params(output_index=i)
        assert sample(logits, p).token == sample(logits, p, scalar=True).token


@pytest.mark.parametrize("filters", [Params(top_k=3), Params(top_p=0.046)])
def test_sample_logits_one_ulp_apart_are_still_ordered(filters: Params) -> None:
    logits = (1 + np.random.default_rng(2).permutation(64) * 2.0**-23).astype(np.float32)
    best = set(np.argsort(-logits)[:3].tolist())  # top_p: three of 64 almost equal shares
    assert {sample(logits, replace(filters, output_index=i)).token for i in range(200)} == best


# Noise.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with the generator
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_oracle_philox_known_counter_gives_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(np.array(counter, dtype=np.uint64)[:, None], key)[:, 0].tolist() == list(words)


def noise(seed: int, output_index: int, num_ids: int, *, scalar: bool = False) -> np.ndarray:
    out = np.empty(num_ids, dtype=np.float32)
    _native.gumbel_noise(out, seed=seed, output_index=output_index, scalar=scalar)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("output_index", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("num_ids", [1, 31, 33, 40_003])
def test_noise_any_seed_equals_oracle_and_scalar(seed: int, output_index: int, num_ids: int) -> None:
    fast = noise(seed, output_index, num_ids)
    assert fast.tobytes() == noise(seed, output_index, num_ids, scalar=True).tobytes()
    np.testing.assert_allclose(fast, oracle_noise(seed, output_index, num_ids), rtol=4e-7, atol=4e-7)


def uniform(seed: int, output_index: int, num_ids: int) -> np.ndarray:
    return np.exp(-np.exp(-noise(seed, output_index, num_ids).astype(np.float64)))


def pair_z(a: np.ndarray, b: np.ndarray) -> float:
    counts = np.histogram2d(a, b, bins=24, range=((0, 1), (0, 1)))[0]
    return chi_square_z(counts, np.full_like(counts, a.size / counts.size))


def test_noise_over_ids_and_indices_is_uniform() -> None:
    u = np.concatenate([uniform(11, i, 100_000) for i in range(10)])
    counts = np.histogram(u, bins=1000, range=(0, 1))[0]
    assert abs(chi_square_z(counts, np.full(1000, u.size / 1000))) < 4
    tail = np.histogram(u, bins=100, range=(0.999, 1))[0]  # where the winners are
    assert abs(chi_square_z(tail, np.full(100, u.size * 1e-5))) < 4


@pytest.mark.parametrize("step", [1, 7, 8, 24, 32, 256])
def test_noise_of_neighbouring_ids_is_independent(step: int) -> None:
    u = uniform(12, 3, 400_000)
    assert abs(pair_z(u[:-step], u[step:])) < 4


@pytest.mark.parametrize("other", [(5, 1), (5, 2), (5, 2**31), (4, 0), (7, 0), (5 + 2**32, 0), (5 + 2**63, 0), (0, 5)])
def test_noise_of_neighbouring_indices_and_seeds_is_independent(other: tuple[int, int]) -> None:
    assert abs(pair_z(uniform(5, 0, 400_000), uniform(*other, 400_000))) < 4


# Log-probabilities.


@pytest.mark.parametrize("vocab", [1, 2, 9, 257, 4097, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 50.0])
def test_logprobs_any_row_equal_float64_log_softmax(vocab: int, scale: float) -> None:
    logits = row(np.random.default_rng(vocab).normal(size=vocab) * scale)
    result = sample(logits, Params(temperature=0.0, num_logprobs=20))
    expected = oracle_logprobs(logits)
    order = np.lexsort((np.arange(vocab), -logits.astype(np.float64)))[:20]
    assert result.token == order[0]
    assert result.top_ids[: len(order)] == order.tolist()
    np.testing.assert_allclose(result.top_logprobs[: len(order)], expected[order], rtol=1e-6, atol=3e-6)
    assert result.logprob == result.top_logprobs[0]
    assert result.top_ids[len(order) :] == [-1] * (20 - len(order))
    assert result.top_logprobs[len(order) :] == [-INF] * (20 - len(order))


def test_logprobs_with_every_adjustment_are_those_of_the_raw_row() -> None:
    logits = row(np.random.default_rng(3).normal(size=300) * 3)
    adjusted = Params(
        temperature=0.3, top_k=3, bias={17: 100.0}, history=(5, 6, 17), num_prompt=1, presence=1.0, repetition=2.0
    )
    result = sample(logits, replace(adjusted, num_logprobs=5))
    expected = oracle_logprobs(logits)
    assert result.token == 17
    assert result.logprob == pytest.approx(expected[17], abs=3e-6)
    np.testing.assert_allclose(result.top_logprobs, np.sort(expected)[::-1][:5], atol=3e-6)


def test_logprobs_off_gives_nan_and_zero_gives_the_tokens_own() -> None:
    logits = row([0.0, 1.0])
    assert math.isnan(sample(logits, Params()).logprob)
    own = sample(logits, Params(temperature=0.0, num_logprobs=0))
    assert own.logprob == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)
    assert (own.top_ids, own.top_logprobs) == ([], [])


def test_logprobs_of_impossible_ids_are_minus_infinity_lowest_id_first() -> None:
    result = sample(row([-INF, 2.0, np.nan, -INF, 1.0]), Params(temperature=0.0, num_logprobs=4))
    assert result.top_ids == [1, 4, 0, 2]
    assert result.top_logprobs[2:] == [-INF, -INF]


# Edges.


@pytest.mark.parametrize("value", [-INF, math.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_row_without_finite_logits_gives_token_zero(value: float, temperature: float) -> None:
    p = Params(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1, num_logprobs=2)
    result = sample(np.full(77, value, dtype=np.float32), p)
    assert result == (0, -INF, [0, 1], [-INF, -INF])


def test_sample_every_id_forbidden_by_bias_gives_token_zero_with_its_raw_logprob() -> None:
    result = sample(row([0.0, 0.0]), Params(bias={0: -INF, 1: -INF}, num_logprobs=0))
    assert result.token == 0
    assert result.logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_sample_vocabulary_of_one_gives_it_with_logprob_zero() -> None:
    for logit in (0.0, -500.0, F32_MAX, INF):
        result = sample(row([logit]), Params(top_p=0.1, top_k=1, min_p=1.0, num_logprobs=1))
        assert result == (0, 0.0, [0], [0.0])


@pytest.mark.parametrize(
    "only_best", [Params(top_k=1), Params(top_p=0.0), Params(top_p=1e-9), Params(min_p=1.0), Params(temperature=0.0)]
)
def test_sample_filter_that_keeps_one_gives_the_best_at_every_index(only_best: Params) -> None:
    logits = row(np.random.default_rng(8).normal(size=1001))
    tokens = {sample(logits, replace(only_best, output_index=i)).token for i in range(40)}
    assert tokens == {int(np.argmax(logits))}


@pytest.mark.parametrize("best", [0, 7, 31, 255, 256, 511, 999])
def test_sample_greedy_tie_gives_lowest_id(best: int) -> None:
    logits = np.full(1000, -1.0, dtype=np.float32)
    logits[best:] = 3.0
    logits[0] = 3.0 if best == 0 else np.nan
    assert sample(logits, Params(temperature=0.0)).token == best


@pytest.mark.parametrize("filters", [Params(top_k=3), Params(top_p=0.3)])
def test_sample_tie_at_the_boundary_keeps_lowest_ids(filters: Params) -> None:
    logits = np.zeros(10, dtype=np.float32)  # top_p 0.3 of ten equal ids needs three; 0.3 in float32 is just above
    filters = replace(filters, top_p=min(filters.top_p, 1.0) - (0.01 if filters.top_p < 1 else 0))
    tokens = {sample(logits, replace(filters, output_index=i)).token for i in range(300)}
    assert tokens == {0, 1, 2}


def test_sample_min_p_one_keeps_every_tie_of_the_best() -> None:
    logits = row([1.0, 2.0, 2.0, 0.0, 2.0])
    tokens = {sample(logits, Params(min_p=1.0, output_index=i)).token for i in range(200)}
    assert tokens == {1, 2, 4}


def test_sample_top_p_renormalises_over_what_top_k_left() -> None:
    logits = row(np.log([0.3, 0.25, 0.25, 0.2]))  # top_k 2 leaves shares .545 and .455
    for top_p, expected in ((0.5, {0}), (0.6, {0, 1})):
        p = Params(top_k=2, top_p=top_p)
        assert {sample(logits, replace(p, output_index=i)).token for i in range(200)} == expected


def test_sample_bias_forces_and_forbids() -> None:
    logits = row(np.random.default_rng(4).normal(size=100))
    best = int(np.argmax(logits))
    for i in range(50):
        assert sample(logits, Params(bias={42: 100.0}, output_index=i)).token == 42
        assert sample(logits, Params(bias={best: -INF}, output_index=i)).token != best


@pytest.mark.parametrize(
    ("p", "token"),
    [
        (Params(presence=0.5), 0),  # nothing in the history yet
        (Params(presence=0.5, history=(0,), num_prompt=1), 0),  # only in the prompt
        (Params(presence=0.5, history=(1, 0), num_prompt=1), 1),
        (Params(presence=0.15, history=(0, 0, 0, 0), num_prompt=0), 0),  # once, however often
        (Params(frequency=0.15, history=(0,), num_prompt=0), 0),
        (Params(frequency=0.15, history=(0, 0), num_prompt=0), 1),  # per occurrence
        (Params(repetition=1.2, history=(0,), num_prompt=1), 1),  # prompt included
        (Params(repetition=1.05, history=(0, 0, 0, 0), num_prompt=2), 0),  # once, however often
    ],
)
def test_sample_penalty_follows_its_rule(p: Params, token: int) -> None:
    assert sample(row([2.0, 1.8, -1.0]), replace(p, temperature=0.0)).token == token


def test_sample_repetition_penalty_pushes_negative_logits_down() -> None:
    p = Params(temperature=0.0, repetition=1.5, history=(0,), num_prompt=1)
    assert sample(row([-1.0, -1.2]), p).token == 1


def test_sample_bias_comes_before_repetition_penalty() -> None:
    p = Params(temperature=0.0, bias={0: 2.0}, repetition=2.0, history=(0,), num_prompt=1)
    assert sample(row([1.0, 1.6]), p).token == 1  # (1 + 2) / 2 < 1.6 < 1 / 2 + 2


def test_sample_from_several_threads_equals_one() -> None:
    logits = row(np.random.default_rng(6).normal(size=20_000))
    work = [Params(output_index=i, top_p=0.9, num_logprobs=3, repetition=1.1, history=(1, 2, i)) for i in range(64)]

    def one(p: Params) -> tuple[int, bytes, list[int], bytes]:
        return bits(sample(logits.copy(), p))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, work)) == [one(p) for p in work]


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.zeros(0, dtype=np.float32), ValueError),
        (np.zeros(4, dtype=np.float64), TypeError),
        (np.zeros((2, 2), dtype=np.float32), TypeError),
        (np.zeros(8, dtype=np.float32)[::2], TypeError),
    ],
)
def test_sample_logits_of_wrong_form_are_refused(logits: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error):
        sample(logits, Params())


# Masks.


@st.composite
def masked_cases(draw: st.DrawFn) -> tuple[np.ndarray, Params]:
    logits = draw(rows())
    p = draw(params_for(len(logits)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 0.99, 1.0]))
    allowed = np.nonzero(rng.random(len(logits)) < share)[0].tolist()
    return logits, replace(p, mask=tuple(allowed or [int(rng.integers(len(logits)))]))


@settings(max_examples=200, deadline=None)
@given(case=masked_cases())
def test_mask_gives_what_minus_infinity_gives_and_leaves_the_row_alone(case: tuple[np.ndarray, Params]) -> None:
    logits, p = case
    before = logits.tobytes()
    got = sample(logits, p)
    assert logits.tobytes() == before
    assert bits(got) == bits(sample(logits, p, scalar=True))
    assert p.mask is not None
    assert got.token in p.mask
    blocked = np.full_like(logits, -INF)
    blocked[list(p.mask)] = logits[list(p.mask)]
    unmasked = replace(p, mask=None)
    if oracle_adjusted(blocked, unmasked).max() > -INF:
        assert got.token == sample(blocked, unmasked).token
        free = sample(logits, unmasked)
        assert (got.top_ids, row(got.top_logprobs).tobytes()) == (free.top_ids, row(free.top_logprobs).tobytes())


def test_mask_of_every_id_gives_the_bits_of_no_mask() -> None:
    rng = np.random.default_rng(3)
    for vocab in (1, 31, 32, 33, 4097):
        logits = rng.normal(size=vocab).astype(np.float32)
        for p in (Params(temperature=0, num_logprobs=3), Params(top_p=0.9, top_k=40, num_logprobs=0, bias={0: 1.5})):
            assert bits(sample(logits, replace(p, mask=tuple(range(vocab))))) == bits(sample(logits, p))


def test_mask_where_the_model_gives_no_chance_takes_its_lowest_id() -> None:
    logits = row([0.0, -INF, np.nan, 1.0])
    assert sample(logits, Params(mask=(1, 2))).token == 1
    assert sample(logits, Params(mask=(3, 2), bias={3: -INF})).token == 2


def test_mask_of_a_wrong_width_is_refused() -> None:
    logits = row([0.0] * 33)
    args = {name: getattr(Params(), name) for name in ("temperature", "top_p", "top_k", "min_p", "presence")}
    args |= {name: getattr(Params(), name) for name in ("frequency", "repetition", "seed", "output_index")}
    none = np.zeros(0, np.int32)
    args |= {"num_logprobs": -1, "bias_ids": none, "bias_values": none.astype(np.float32), "history": none}
    with pytest.raises(ValueError, match="mask"):
        _native.sample_row(logits, **args, num_prompt=0, scalar=False, mask=np.zeros(1, np.uint32))
