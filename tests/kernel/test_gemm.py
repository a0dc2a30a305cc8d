"""Matrix products over every layout: scalar twin to the bit, rows alone to the bit, a float64 oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.layouts import (
    EVERY_SET,
    EVERY_VECTOR_SET,
    F32,
    F64,
    QUANTISED,
    VARIANTS,
    Variant,
    bits,
    exact,
    gemm,
    quantise,
    random_rows,
    random_weight,
    untile,
)

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=str)
SHAPES = {
    "seed": st.integers(0, 2**32 - 1),
    "rows": st.integers(1, 70),
    "units": st.one_of(st.integers(1, 8), st.sampled_from([18, 48])),
    "num": st.one_of(st.integers(1, 20), st.sampled_from([47, 48, 70])),
}


def cols_of(variant: Variant, units: int, rng: np.random.Generator) -> int:
    """Quantised layouts need whole groups; the others any width."""
    return units * 32 if variant.group else max(1, units * 32 - int(rng.integers(0, 40)))


def seen(variant: Variant, x: F32) -> F64:
    """The activations as the product sees them."""
    if variant.act == "float":
        return x.astype(np.float64)
    return untile(quantise("scalar", variant.act, x), variant.act, *x.shape).values()


@EVERY_VECTOR_SET
@EVERY_VARIANT
@given(**SHAPES, has_bias=st.booleans(), accumulate=st.booleans())
@settings(max_examples=25, deadline=None)
def test_gemm_any_shape_gives_the_scalar_bits(
    kernels: str, variant: Variant, seed: int, rows: int, units: int, num: int, has_bias: bool, accumulate: bool
) -> None:
    rng = np.random.default_rng(seed)
    cols = cols_of(variant, units, rng)
    _, weight = random_weight(variant, rows, cols, rng)
    x, start = random_rows(num, cols, rng), random_rows(num, rows + 3, rng)
    bias = rng.standard_normal(rows).astype(np.float32) if has_bias else None
    scalar, vector = (
        gemm(each, weight, x, bias=bias, accumulate=accumulate, y=start.copy()) for each in ("scalar", kernels)
    )
    assert bits(scalar) == bits(vector)
    assert bits(vector[:, rows:]) == bits(start[:, rows:]), "wrote past the weight's rows"


@EVERY_VECTOR_SET
@EVERY_VARIANT
@given(**SHAPES, data=st.data())
@settings(max_examples=20, deadline=None)
def test_gemm_rows_in_any_company_give_the_bits_they_have_alone(
    kernels: str, variant: Variant, seed: int, rows: int, units: int, num: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    cols = cols_of(variant, units, rng)
    _, weight = random_weight(variant, rows, cols, rng)
    x = random_rows(num, cols, rng)
    together = gemm(kernels, weight, x)
    begin = data.draw(st.integers(0, num - 1))
    end = data.draw(st.integers(begin + 1, num))
    assert bits(gemm(kernels, weight, x[begin:end])) == bits(together[begin:end])
    assert bits(gemm(kernels, weight, x[begin : begin + 1])) == bits(together[begin : begin + 1])


@EVERY_VARIANT
@EVERY_SET
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 6, 7, 13, 70])
def test_gemm_is_the_product_of_what_was_stored(variant: Variant, kernels: str, num: int) -> None:
    """Against float64 over the dequantised numbers: only float32's own rounding may differ."""
    rng = np.random.default_rng(num)
    rows, cols = 43, 160
    matrix, weight = random_weight(variant, rows, cols, rng)
    x, bias, start = random_rows(num, cols, rng), random_rows(1, rows, rng)[0], random_rows(num, rows, rng)
    w, a = exact(matrix), seen(variant, x)
    plain = gemm(kernels, weight, x)
    # Each of at most 2 * cols roundings is below half an ulp of the largest partial sum. A min multiplies a sum of
    # activations, so its terms are bounded with the scale's and not with the value's.
    size = np.abs(a) @ magnitude(matrix, w).T
    assert np.all(np.abs(plain - a @ w.T) <= size * cols * 2**-24)
    full = gemm(kernels, weight, x, bias=bias, accumulate=True, y=start.copy())
    assert bits(full) == bits(start + (plain + bias))


def magnitude(matrix: object, w: F64) -> F64:
    """|scale * code| + |min| of each weight."""
    mins = getattr(matrix, "mins", None)
    if mins is None:
        return np.abs(w)
    wide = np.repeat(mins.astype(np.float64), matrix.group, axis=1)  # type: ignore[attr-defined]
    return np.abs(w - wide) + np.abs(wide)


@EVERY_VECTOR_SET
@pytest.mark.parametrize("variant", QUANTISED, ids=str)
@pytest.mark.parametrize("num", [1, 6, 20])
def test_gemm_stays_within_the_error_of_quantised_activations(kernels: str, variant: Variant, num: int) -> None:
    """Half a step per activation at worst, and about its root-mean-square on the whole."""
    rng = np.random.default_rng(num)
    matrix, weight = random_weight(variant, 64, 512, rng)
    x = random_rows(num, 512, rng)
    w = exact(matrix)
    error = np.abs(gemm(kernels, weight, x) - x.astype(np.float64) @ w.T)
    top = {"int8": 127, "int16": 32767}[variant.act]
    step = np.repeat(np.abs(x).reshape(num, -1, 32).max(axis=2), 32, axis=1).astype(np.float64) / top
    rounding = (np.abs(x) + step) @ magnitude(matrix, w).T * 512 * 2**-24
    assert np.all(error <= step / 2 @ np.abs(w).T + rounding)
    expected = np.sqrt(step**2 / 12 @ (w**2).T)
    assert np.mean(error) < np.mean(expected + rounding)
    if variant.act == "int8":
        assert np.mean(error) > 0.5 * np.mean(expected), "activations are not quantised at all"


@EVERY_VECTOR_SET
@EVERY_VARIANT
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 90), num=st.integers(1, 14), data=st.data())
@settings(max_examples=15, deadline=None)
def test_gemm_any_cut_into_row_blocks_gives_the_same_bits(
    kernels: str, variant: Variant, seed: int, rows: int, num: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    _, weight = random_weight(variant, rows, 64, rng)
    x, bias = random_rows(num, 64, rng), random_rows(1, rows, rng)[0]
    whole = gemm(kernels, weight, x, bias=bias)
    blocks = -(-rows // 8)
    cuts = sorted({0, blocks, *data.draw(st.lists(st.integers(0, blocks), max_size=4))})
    parts = np.full_like(whole, np.nan)
    for begin, end in itertools.pairwise(cuts):
        gemm(kernels, weight, x, bias=bias, y=parts, span=(begin, end))
        assert np.isnan(parts[:, end * 8 :]).all(), "wrote past its row blocks"
    assert bits(parts) == bits(whole)


@EVERY_SET
@pytest.mark.parametrize("act", ["int8", "int16"])
@pytest.mark.parametrize("num", [1, 4, 6])
def test_gemm_extreme_codes_do_not_overflow_an_integer_sum(kernels: str, act: str, num: int) -> None:
    """The largest codes against the largest activations, of either sign: the sums are exact."""
    from firstlight.models.layouts import QuantCodes
    from firstlight.models.pack import pack

    cols, ones = 64, np.ones((8, 2), np.float32)
    codes = np.full((8, cols), 15, np.uint8) if act == "int8" else np.full((8, cols), -128, np.int8)
    matrix = (
        QuantCodes("nibble", 32, codes, ones, ones * 0) if act == "int8" else QuantCodes("byte", 32, codes, ones, None)
    )
    for sign in (1.0, -1.0):
        x = np.full((num, cols), sign, np.float32)
        expected = np.full((num, 8), sign * cols * float(codes[0, 0]), np.float32)
        np.testing.assert_allclose(gemm(kernels, pack(matrix), x), expected, rtol=2**-21)


@EVERY_VECTOR_SET
@EVERY_VARIANT
@pytest.mark.parametrize("num", [3, 9])
def test_gemm_row_with_nan_or_infinity_leaves_its_neighbours_alone(kernels: str, variant: Variant, num: int) -> None:
    rng = np.random.default_rng(7)
    _, weight = random_weight(variant, 24, 96, rng)
    x = random_rows(num, 96, rng)
    fine = gemm(kernels, weight, x)
    x[1, 5], x[1, 40], x[1, 80] = np.nan, np.inf, -np.inf
    broken = gemm(kernels, weight, x)
    assert bits(np.delete(broken, 1, axis=0)) == bits(np.delete(fine, 1, axis=0))
    scalar = gemm("scalar", weight, x)
    np.testing.assert_array_equal(scalar, broken)


def test_gemm_wrong_arguments_are_refused() -> None:
    rng = np.random.default_rng(0)
    _, weight = random_weight(Variant("nibble", 32, True, False), 16, 64, rng)
    x = random_rows(2, 64, rng)
    with pytest.raises(ValueError, match="row of `x`"):
        gemm("avx2", weight, x[:, :32].copy())
    with pytest.raises(ValueError, match="bias"):
        gemm("avx2", weight, x, bias=np.zeros(15, np.float32))
    with pytest.raises(ValueError, match="narrower"):
        gemm("avx2", weight, x, y=np.zeros((2, 15), np.float32))
    with pytest.raises(ValueError, match="end"):
        gemm("avx2", weight, x, span=(0, 3))
    with pytest.raises(ValueError, match="unknown"):
        gemm("sse9", weight, x)
