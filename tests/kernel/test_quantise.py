"""Quantising activations: all kernel sets to the bit, and how far a number may move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.layouts import EVERY_SET, EVERY_VECTOR_SET, Acts, bits, quantise, random_rows, tiles, untile

TOP = {"int8": 127, "int16": 32767}
ACTS = sorted(TOP)


def rows_with_odd_values(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Rows with zeros, ties, denormals, huge and infinite values and NaN thrown in."""
    x = random_rows(rows, cols, rng)
    odd = np.array([0.0, -0.0, 1e-45, -1e-40, 1e-30, 9.9e-31, 3e38, -3e38, np.inf, -np.inf, np.nan, 0.5], np.float32)
    at = rng.random(x.shape) < 0.02
    x[at] = rng.choice(odd, int(at.sum()))
    return x


def same(a: Acts, b: Acts) -> bool:
    return all(bits(x) == bits(y) for x, y in ((a.q, b.q), (a.scale, b.scale), (a.sums, b.sums)))


@EVERY_VECTOR_SET
@pytest.mark.parametrize("act", ACTS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), groups=st.sampled_from([1, 2, 3, 5, 18, 65, 130]))
@settings(max_examples=40, deadline=None)
def test_quantise_any_input_gives_the_scalar_bits(kernels: str, act: str, seed: int, rows: int, groups: int) -> None:
    x = rows_with_odd_values(np.random.default_rng(seed), rows, groups * 32)
    vector, scalar = (untile(quantise(each, act, x), act, *x.shape, kernels=each) for each in (kernels, "scalar"))
    assert same(vector, scalar)


@EVERY_VECTOR_SET
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 30), groups=st.integers(1, 6))
@settings(max_examples=10, deadline=None)
def test_quantise_float_activations_are_laid_out_alike(kernels: str, seed: int, rows: int, groups: int) -> None:
    x = rows_with_odd_values(np.random.default_rng(seed), rows, groups * 32)
    assert bits(quantise(kernels, "float", x)) == bits(quantise("scalar", "float", x))


@EVERY_VECTOR_SET
@pytest.mark.parametrize("act", ACTS)
def test_quantise_largest_magnitude_of_either_sign_gives_the_scalar_bits(kernels: str, act: str) -> None:
    """max * (top / max) may round to just past top: all sets must then agree, and stay symmetric."""
    largest = np.random.default_rng(5).uniform(0.5, 1.0, 4096).astype(np.float32)
    for sign in (1, -1):
        x = np.zeros((64, 64 * 32), np.float32)
        x[:, ::32] = sign * largest.reshape(64, 64)
        scalar, vector = (untile(quantise(k, act, x), act, *x.shape, kernels=k) for k in ("scalar", kernels))
        assert same(scalar, vector)
        assert set(vector.q[:, ::32].ravel().tolist()) == {sign * TOP[act]}


@EVERY_SET
@pytest.mark.parametrize("act", ACTS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 20), groups=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_quantise_moves_no_value_by_more_than_half_a_step(
    kernels: str, act: str, seed: int, rows: int, groups: int
) -> None:
    x = random_rows(rows, groups * 32, np.random.default_rng(seed))
    acts = untile(quantise(kernels, act, x), act, *x.shape, kernels=kernels)
    largest = np.abs(x).reshape(rows, groups, 32).max(axis=2).astype(np.float64)
    np.testing.assert_allclose(acts.scale, largest / TOP[act], rtol=2**-23)
    step = np.repeat(acts.scale.astype(np.float64), 32, axis=1)
    assert np.all(np.abs(acts.values() - x) <= step * (0.5 + TOP[act] * 2**-22))
    parts = acts.q.reshape(rows, acts.sums.shape[1], -1).sum(axis=2, dtype=np.int64).astype(np.float32)
    scale = np.repeat(acts.scale, acts.sums.shape[1] // groups, axis=1)
    assert bits(acts.sums) == bits(scale * parts)


@EVERY_VECTOR_SET
@pytest.mark.parametrize("act", [*ACTS, "float"])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 30), data=st.data())
@settings(max_examples=20, deadline=None)
def test_quantise_row_alone_gives_the_bits_it_has_among_others(
    kernels: str, act: str, seed: int, rows: int, data: st.DataObject
) -> None:
    x = rows_with_odd_values(np.random.default_rng(seed), rows, 96)
    row = data.draw(st.integers(0, rows - 1))
    together = quantise(kernels, act, x)
    if act == "float":
        together, alone = together.view(np.float32), quantise(kernels, act, x[row : row + 1]).view(np.float32)
        assert bits(untile_floats(together, rows, 96)[row]) == bits(alone)
        return
    many, one = (
        untile(memory, act, num, 96, kernels=kernels)
        for memory, num in ((together, rows), (quantise(kernels, act, x[row : row + 1]), 1))
    )
    for part in ("q", "scale", "sums"):
        assert bits(getattr(many, part)[row]) == bits(getattr(one, part)[0])


def untile_floats(flat: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """`[rows, cols]` out of tiles that hold x[k][t]."""
    parts = [flat[first * cols : (first + n) * cols].reshape(cols, n).T for first, n in tiles(rows)]
    return np.concatenate(parts)


@EVERY_SET
@pytest.mark.parametrize("act", ACTS)
def test_quantise_zero_and_tiny_groups_are_zero(kernels: str, act: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, :32] = 9e-31
    x[2, :32] = 1e-45
    acts = untile(quantise(kernels, act, x), act, 3, 64)
    assert not acts.q.any()
    assert not acts.scale.any()
    assert not acts.sums.any()
