"""Block formats to codes: the `gguf` package is the oracle."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ModelError
from firstlight.models.gguf import BLOCK_SIZES
from firstlight.models.layouts import QuantCodes
from firstlight.models.quants import QUANT_TYPES, SUPPORTED_TYPES, dequantise, unpack_blocks

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Where the float16 fields of a block are: they get finite values, every other byte is random."""


def random_blocks(type_name: str, rows: int, cols: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    _, values, size = BLOCK_SIZES[type_name]
    blocks = rng.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
    for at in HALVES.get(type_name, []):
        scale = (rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-6, 3)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if type_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(rows * cols).astype(np.float32)
        raw = {
            "F32": values,
            "F16": values.astype(np.float16),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
        }
        return raw[type_name].view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_dequantised_values_equal_the_reference_to_the_bit(type_name: str, rows: int, blocks: int, seed: int) -> None:
    cols = 256 * blocks
    data = random_blocks(type_name, rows, cols, seed)
    ours = dequantise(unpack_blocks(data, type_name, rows, cols))
    theirs = gguf.quants.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(ours, theirs)  # -0.0 equals 0.0: Q4_0's zero code is -8d + 8d here, 0 * d there


@pytest.mark.parametrize("type_name", QUANT_TYPES)
def test_codes_have_the_kind_and_range_of_their_layout(type_name: str) -> None:
    matrix = unpack_blocks(random_blocks(type_name, 8, 512, 1), type_name, 8, 512)
    assert isinstance(matrix, QuantCodes)
    assert matrix.codes.shape == (8, 512)
    assert matrix.scales.shape == (8, 512 // matrix.group)
    assert matrix.codes.dtype == (np.uint8 if matrix.kind == "nibble" else np.int8)
    if matrix.kind == "nibble":
        assert int(matrix.codes.max()) == 15
        assert matrix.mins is not None


@pytest.mark.parametrize("type_name", sorted(set(BLOCK_SIZES) - set(SUPPORTED_TYPES)))
def test_unsupported_type_is_refused_by_name(type_name: str) -> None:
    with pytest.raises(ModelError, match=f"{type_name} is not supported") as caught:
        unpack_blocks(np.zeros(1, dtype=np.uint8), type_name, 1, 1)
    assert "Q4_1" in (caught.value.hint or "")


def test_block_sizes_equal_the_reference() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name != "Q8_1":  # never stored in files; the reference counts an older struct
            assert BLOCK_SIZES[kind.name] == (kind.value, *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize(("size", "cols"), [(18, 32), (20, 33), (40, 32)])
def test_size_that_does_not_fit_the_shape_raises(size: int, cols: int) -> None:
    with pytest.raises(ModelError, match="do not make a matrix"):
        unpack_blocks(np.zeros(size, dtype=np.uint8), "Q4_1", 1, cols)
