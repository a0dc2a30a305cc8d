"""The packer: round trips, and the documented place of every code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ModelError
from firstlight.models.layouts import PackedWeight, QuantCodes
from firstlight.models.pack import pack, packed_bytes, unpack
from firstlight.models.quants import Matrix

KINDS = [("nibble", 32, True), ("byte", 32, False), ("byte", 32, True), ("byte", 16, False), ("byte", 16, True)]


def random_codes(kind: str, group: int, has_min: bool, rows: int, cols: int, half: bool, seed: int = 0) -> QuantCodes:
    rng = np.random.default_rng(seed)
    low, high, dtype = (0, 16, np.uint8) if kind == "nibble" else (-128, 128, np.int8)
    numbers = rng.standard_normal((2, rows, cols // group)).astype(np.float16 if half else np.float32)
    return QuantCodes(
        kind=kind,
        group=group,
        codes=rng.integers(low, high, (rows, cols)).astype(dtype),
        scales=numbers[0].astype(np.float32),
        mins=numbers[1].astype(np.float32) if has_min else None,
    )


def assert_same(left: Matrix, right: Matrix) -> None:
    if not isinstance(left, QuantCodes) or not isinstance(right, QuantCodes):
        assert isinstance(left, np.ndarray)
        assert isinstance(right, np.ndarray)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
        return
    assert (left.kind, left.group) == (right.kind, right.group)
    assert left.codes.dtype == right.codes.dtype
    np.testing.assert_array_equal(left.codes, right.codes)
    np.testing.assert_array_equal(left.scales, right.scales)
    assert (left.mins is None) == (right.mins is None)
    if left.mins is not None and right.mins is not None:
        np.testing.assert_array_equal(left.mins, right.mins)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 40),
    groups=st.integers(1, 6),
    half=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_survive_the_round_trip(
    kind: tuple[str, int, bool], rows: int, groups: int, half: bool, seed: int
) -> None:
    codes = random_codes(*kind, rows, 32 * groups, half, seed)
    packed = pack(codes)
    assert packed.scale_f32 is not half
    assert_same(unpack(packed), codes)


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([np.float32, np.float16, np.uint16]),
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_floats_survive_the_round_trip(dtype: type, rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 30000, (rows, cols)).astype(dtype)
    packed = pack(values)
    assert packed.kind == {np.float32: "float", np.float16: "half", np.uint16: "bf16"}[dtype]
    assert_same(unpack(packed), values)


def test_a_matrix_of_many_chunks_survives_the_round_trip() -> None:
    codes = random_codes("nibble", 32, True, 4099, 1600, True)
    assert_same(unpack(pack(codes)), codes)


@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("half", [True, False])
def test_nibble_record_holds_each_number_where_the_layout_says(rows: int, half: bool) -> None:
    codes = random_codes("nibble", 32, True, rows, 96, half)
    packed, size, number = pack(codes), 160 if half else 192, np.float16 if half else np.float32
    assert codes.mins is not None
    records = packed.data.reshape(-1, size)
    for row in range(rows):
        for k in range(96):
            block, lane, group, inner = row // 8, row % 8, k // 32, k % 32
            record = records[block * 3 + group]
            numbers, body = record[:-128].view(number), record[-128:]
            byte = body[(inner % 16 // 4) * 32 + lane * 4 + inner % 4]
            assert (byte >> 4 if inner >= 16 else byte & 15) == codes.codes[row, k]
            assert numbers[lane] == codes.scales[row, group]
            assert numbers[8 + lane] == codes.mins[row, group]


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("has_min", [True, False])
def test_byte_record_holds_each_number_where_the_layout_says(group: int, has_min: bool) -> None:
    codes = random_codes("byte", group, has_min, 11, 64, True)
    packed = pack(codes)
    per_record = 32 // group
    records = packed.data.reshape(4, -1)
    for row in range(11):
        for k in range(64):
            record = records[row // 8 * 2 + k // 32]
            numbers, body = record[:-256].view(np.float16), record[-256:].view(np.int8)
            at, inner = k % 32 // group * 8 + row % 8, k % 32
            assert body[inner // 2 * 16 + row % 8 * 2 + inner % 2] == codes.codes[row, k]
            assert numbers[at] == codes.scales[row, k // group]
            if codes.mins is not None:
                assert numbers[per_record * 8 + at] == codes.mins[row, k // group]


def test_float_record_holds_eight_rows_of_one_input() -> None:
    values = np.arange(10 * 5, dtype=np.float32).reshape(10, 5)
    records = pack(values).data.view(np.float32).reshape(2, 5, 8)
    np.testing.assert_array_equal(records[0, 3], values[:8, 3])
    np.testing.assert_array_equal(records[1, 3, :2], values[8:, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_zero(kind: tuple[str, int, bool]) -> None:
    full = random_codes(*kind, 16, 64, True)
    part = QuantCodes(
        full.kind, full.group, full.codes[:9], full.scales[:9], None if full.mins is None else full.mins[:9]
    )
    whole = unpack(PackedWeight(full.kind, 16, 64, full.group, kind[2], False, pack(part).data))
    assert isinstance(whole, QuantCodes)
    assert not whole.codes[9:].any()
    assert not whole.scales[9:].any()
    assert whole.mins is None or not whole.mins[9:].any()


@pytest.mark.parametrize("matrix", [random_codes(*kind, 9, 32, True) for kind in KINDS] + [np.ones((9, 3), np.float32)])
def test_data_is_aligned_and_as_long_as_documented(matrix: Matrix) -> None:
    packed = pack(matrix)
    assert packed.data.ctypes.data % 64 == 0
    assert packed.data.flags.c_contiguous
    expected = packed_bytes(packed.kind, packed.rows, packed.cols, packed.group, packed.has_min, packed.scale_f32)
    assert packed.data.size == expected


@pytest.mark.parametrize("value", [70000.0, 1e-9, 1.0 + 2**-12])
def test_scales_stay_float32_when_one_does_not_fit_float16(value: float) -> None:
    codes = random_codes("nibble", 32, True, 8, 64, True)
    assert codes.mins is not None
    codes.mins[3, 1] = value
    packed = pack(codes)
    assert packed.scale_f32
    assert_same(unpack(packed), codes)


def test_native_packer_is_called_with_an_empty_weight_of_the_right_size() -> None:
    codes = random_codes("byte", 32, False, 8, 32, True)
    reference = pack(codes)
    seen = []

    def native(matrix: Matrix, out: PackedWeight) -> None:
        seen.append(matrix)
        out.data[:] = reference.data

    assert_same(unpack(pack(codes, native=native)), codes)
    assert seen == [codes]


def test_width_that_does_not_fill_groups_raises() -> None:
    with pytest.raises(ModelError, match="33 columns"):
        pack(QuantCodes("byte", 32, np.zeros((1, 33), np.int8), np.zeros((1, 1), np.float32), None))


def test_nibble_without_minimums_raises() -> None:
    with pytest.raises(ModelError, match="needs minimums"):
        pack(QuantCodes("nibble", 32, np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.float32), None))
