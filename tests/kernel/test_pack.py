"""The native packer against the numpy one, byte for byte, and rows taken out of a packed weight again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.backend.cpu import _native, native_pack
from firstlight.models.pack import pack, unpack
from firstlight.models.quants import dequantise
from tests.kernel.layouts import VARIANTS, Variant, bits, exact, random_matrix, random_weight

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@EVERY_VARIANT
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 50), units=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_pack_native_gives_the_bytes_of_numpy(variant: Variant, seed: int, rows: int, units: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(variant, rows, units * 32 if variant.group else units * 7, rng)
    fast, plain = pack(matrix, native_pack), pack(matrix)
    assert (fast.kind, fast.rows, fast.cols, fast.group, fast.has_min, fast.scale_f32) == (
        plain.kind,
        plain.rows,
        plain.cols,
        plain.group,
        plain.has_min,
        plain.scale_f32,
    )
    assert bits(fast.data) == bits(plain.data)
    np.testing.assert_array_equal(dequantise(unpack(fast)), dequantise(matrix))


@pytest.mark.parametrize("kind", ["half", "bf16", "float"])
def test_pack_native_moves_every_bit_pattern(kind: str) -> None:
    """NaN payloads, infinities, denormals and negative zero are bits like any other."""
    if kind == "float":
        bits32 = np.random.default_rng(1).integers(0, 2**32, (40, 33), dtype=np.uint64).astype(np.uint32)
        bits32[0, :4] = 0x7F800001, 0xFF800000, 1, 0x80000000
        matrix = bits32.view(np.float32)
    else:
        patterns = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        matrix = patterns.view(np.float16) if kind == "half" else patterns
    assert bits(pack(matrix, native_pack).data) == bits(pack(matrix).data)


@EVERY_VARIANT
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 30), units=st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_dequantise_row_rounds_the_exact_value_once(variant: Variant, seed: int, rows: int, units: int) -> None:
    matrix, weight = random_weight(variant, rows, units * 32, np.random.default_rng(seed))
    layout = (weight.kind, weight.rows, weight.cols, weight.group, weight.has_min, weight.scale_f32)
    out = np.full((rows, weight.cols), np.nan, np.float32)
    for row in range(rows):
        _native.kernel_dequantise_row(*layout, weight.data, row, out[row])
    # scale * code is exact in float64 and one fma rounds once; float64's own sum rounds far below float32's ties.
    np.testing.assert_array_max_ulp(out, exact(matrix).astype(np.float32), maxulp=1)
    plain = dequantise(matrix)
    parts = np.abs(plain) if variant.group == 0 or not variant.has_min else largest_part(matrix)
    assert np.all(np.abs(out - plain) <= parts * 2**-23)


def largest_part(matrix: object) -> np.ndarray:
    """|min| + |value| per weight: two roundings differ from one by an ulp of these."""
    mins = np.repeat(np.abs(matrix.mins), matrix.group, axis=1)  # type: ignore[attr-defined]
    return mins + np.abs(exact(matrix))


@pytest.mark.parametrize("row", [-1, 5, 8])
def test_dequantise_row_outside_the_matrix_is_refused(row: int) -> None:
    _, weight = random_weight(Variant("half"), 5, 32, np.random.default_rng(0))
    with pytest.raises(ValueError, match="row"):
        _native.kernel_dequantise_row("half", 5, 32, 0, False, False, weight.data, row, np.zeros(32, np.float32))
