"""From the block formats of GGUF to plain codes, scales and minimums, without loss.

`unpack_blocks` gives `QuantCodes` (or a float array for the unquantised types); `dequantise` is the oracle for what
they mean. Every scale is a product of a half float and an integer of at most 7 bits, so it is exact in float32, and
`scale * code + min` takes the same two float32 roundings as the format's own definition. Knows blocks, not files and
not layouts.

Source: the block structures in the ggml project (ggml-common.h); checked bit for bit against the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import ModelError
from firstlight.models.gguf import BLOCK_SIZES
from firstlight.models.layouts import QuantCodes

__all__ = ["SUPPORTED_TYPES", "FloatMatrix", "Matrix", "dequantise", "unpack_blocks"]

FloatMatrix = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""float32, float16, or the bits of bfloat16 as uint16."""
Matrix = QuantCodes | FloatMatrix

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
FOUR = np.uint64(4)


def unpack_blocks(data: U8, type_name: str, rows: int, cols: int) -> Matrix:
    """The matrix `[rows, cols]` that `data` (`[num_bytes] uint8`, whole blocks, row after row) holds.

    Raises:
        ModelError: the type is not supported, or the size does not fit the shape.
    """
    if type_name not in SUPPORTED_TYPES:
        known = ", ".join(SUPPORTED_TYPES)
        raise ModelError(f"quantisation {type_name} is not supported", hint=f"use a file with one of: {known}")
    _, block_values, block_bytes = BLOCK_SIZES[type_name]
    if cols % block_values or data.size != rows * cols // block_values * block_bytes:
        raise ModelError(f"{data.size} bytes of {type_name} do not make a matrix of {rows} x {cols}")
    if type_name in FLOAT_TYPES:
        floats: FloatMatrix = data.view(FLOAT_TYPES[type_name]).reshape(rows, cols)
        return floats
    kind, group, unpack = QUANT_TYPES[type_name]
    codes, scales, mins = unpack(data.reshape(-1, block_bytes))
    groups = (rows, cols // group)
    return QuantCodes(
        kind=kind,
        group=group,
        codes=codes.reshape(rows, cols),
        scales=scales.reshape(groups),
        mins=None if mins is None else mins.reshape(groups),
    )


def dequantise(matrix: Matrix) -> F32:
    """`[rows, cols] float32` values: exact for floats, rounded twice (product, sum) for codes with a minimum."""
    if not isinstance(matrix, QuantCodes):
        if matrix.dtype == np.uint16:
            return (matrix.astype(np.uint32) << 16).view(np.float32)
        return matrix.astype(np.float32)
    rows, cols = matrix.codes.shape
    values = matrix.codes.reshape(rows, cols // matrix.group, matrix.group).astype(np.float32)
    values *= matrix.scales[:, :, None]
    if matrix.mins is not None:
        values += matrix.mins[:, :, None]
    return values.reshape(rows, cols)


Unpacked = tuple[npt.NDArray[np.uint8] | npt.NDArray[np.int8], F32, F32 | None]


def _field(blocks: U8, start: int, num_bytes: int) -> U8:
    """Bytes [start, start + num_bytes) of each block, `[num_blocks, num_bytes]`, contiguous (one copy per block)."""
    item = np.dtype({"names": ["f"], "formats": [f"V{num_bytes}"], "offsets": [start], "itemsize": blocks.shape[1]})
    field = np.ascontiguousarray(blocks.view(item)["f"].reshape(-1))
    return field.view(np.uint8).reshape(-1, num_bytes)


def _half(blocks: U8, start: int) -> F32:
    """The float16 at `start` of each block as `[num_blocks] float32`."""
    return _field(blocks, start, 2).view(np.float16).reshape(-1).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """`[n, 16 * m]` bytes -> `[n, 32 * m]` codes: per 16 bytes, first the low halves, then the high halves."""
    words = packed.view(np.uint64).reshape(-1, 2)
    codes = np.empty((len(words), 4), dtype=np.uint64)
    for index in range(2):
        np.bitwise_and(words[:, index], LOW_NIBBLES, out=codes[:, index])
        np.right_shift(words[:, index], FOUR, out=codes[:, 2 + index])
        np.bitwise_and(codes[:, 2 + index], LOW_NIBBLES, out=codes[:, 2 + index])
    return codes.view(np.uint8).reshape(len(packed), -1)


def _wide_nibbles(packed: U8) -> U8:
    """`[n, 32 * m]` bytes -> `[n, 64 * m]` codes: per 32 bytes, first the low halves, then the high halves."""
    pieces = packed.reshape(len(packed), -1, 32)
    return np.stack([pieces & 15, pieces >> 4], axis=2).reshape(len(packed), -1)


def _bits(packed: U8, width: int) -> U8:
    """`[n, m]` bytes -> `[n, 8 / width, m]`: layer i holds bits [i * width, (i + 1) * width) of every byte."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    layers: U8 = (packed[:, None, :] >> shifts) & np.uint8((1 << width) - 1)
    return layers


def _fifth_bits(blocks: U8, start: int) -> U8:
    """The 32 high bits at `start` of each block, `[num_blocks, 32]` of 0 or 16."""
    bits = np.unpackbits(_field(blocks, start, 4), axis=1, bitorder="little")
    high: U8 = bits << np.uint8(4)
    return high


def _q4_0(blocks: U8) -> Unpacked:
    scales = _half(blocks, 0)
    return _nibbles(_field(blocks, 2, 16)), scales, scales * np.float32(-8.0)


def _q4_1(blocks: U8) -> Unpacked:
    return _nibbles(_field(blocks, 4, 16)), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: U8) -> Unpacked:
    codes = (_nibbles(_field(blocks, 6, 16)) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return codes, _half(blocks, 0), None


def _q5_1(blocks: U8) -> Unpacked:
    codes = (_nibbles(_field(blocks, 8, 16)) | _fifth_bits(blocks, 4)).view(np.int8)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: U8) -> Unpacked:
    return _field(blocks, 2, 32).view(np.int8), _half(blocks, 0), None


def _six_bit_pairs(packed: U8) -> tuple[U8, U8]:
    """The eight 6-bit scales and eight 6-bit minimums that Q4_K and Q5_K keep in 12 bytes, `[n, 8]` each."""
    first, second, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (high & 15) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 63, (high >> 4) | (second >> 6 << 4)], axis=1)
    return scales, mins


def _k_scales(blocks: U8) -> tuple[F32, F32]:
    scales, mins = _six_bit_pairs(_field(blocks, 4, 12))
    return _half(blocks, 0)[:, None] * scales.astype(np.float32), -(_half(blocks, 2)[:, None] * mins.astype(np.float32))


def _q4_k(blocks: U8) -> Unpacked:
    return (_wide_nibbles(_field(blocks, 16, 128)), *_k_scales(blocks))


def _q5_k(blocks: U8) -> Unpacked:
    high = _bits(_field(blocks, 16, 32), 1).reshape(len(blocks), 256)
    codes = _wide_nibbles(_field(blocks, 48, 128)) | (high << 4)
    return (codes.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: U8) -> Unpacked:
    low = _field(blocks, 0, 128).reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = _bits(_field(blocks, 128, 64).reshape(-1, 32), 2).reshape(-1, 2, 4, 32)
    codes = (low | (high << 4)).view(np.int8) - np.int8(32)
    scales = _field(blocks, 192, 16).view(np.int8).astype(np.float32)
    return codes, _half(blocks, 208)[:, None] * scales, None


def _two_bits(packed: U8) -> U8:
    """The 256 2-bit codes of Q2_K and Q3_K, `[n, 256]`."""
    return _bits(packed.reshape(-1, 32), 2).reshape(-1, 256)


def _q3_k(blocks: U8) -> Unpacked:
    high = _bits(_field(blocks, 0, 32), 1).reshape(-1, 256)
    codes = (_two_bits(_field(blocks, 32, 64)) | (high << 2)).view(np.int8) - np.int8(4)
    packed = _field(blocks, 96, 12)
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = _bits(packed[:, 8:], 2).reshape(-1, 16)
    scales = (low | (top << 4)).view(np.int8) - np.int8(32)
    return codes, _half(blocks, 108)[:, None] * scales.astype(np.float32), None


def _q2_k(blocks: U8) -> Unpacked:
    packed = _field(blocks, 0, 16)
    scales = _half(blocks, 80)[:, None] * (packed & 15).astype(np.float32)
    mins = -(_half(blocks, 82)[:, None] * (packed >> 4).astype(np.float32))
    return _two_bits(_field(blocks, 16, 64)).view(np.int8), scales, mins


def _iq4_nl(blocks: U8) -> Unpacked:
    return IQ4_VALUES[_nibbles(_field(blocks, 2, 16))], _half(blocks, 0), None


def _iq4_xs(blocks: U8) -> Unpacked:
    low = _field(blocks, 4, 4)
    low = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8)
    words = _field(blocks, 2, 2).view(np.uint16)
    high = ((words >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)).astype(np.uint8)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    codes = IQ4_VALUES[_nibbles(_field(blocks, 8, 128))]
    return codes, _half(blocks, 0)[:, None] * scales.astype(np.float32), None


FLOAT_TYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}
QUANT_TYPES: dict[str, tuple[str, int, Callable[[U8], Unpacked]]] = {
    "Q4_0": ("nibble", 32, _q4_0),
    "Q4_1": ("nibble", 32, _q4_1),
    "Q4_K": ("nibble", 32, _q4_k),
    "Q5_0": ("byte", 32, _q5_0),
    "Q5_1": ("byte", 32, _q5_1),
    "Q5_K": ("byte", 32, _q5_k),
    "Q6_K": ("byte", 16, _q6_k),
    "Q8_0": ("byte", 32, _q8_0),
    "Q3_K": ("byte", 16, _q3_k),
    "Q2_K": ("byte", 16, _q2_k),
    "IQ4_NL": ("byte", 32, _iq4_nl),
    "IQ4_XS": ("byte", 32, _iq4_xs),
}
SUPPORTED_TYPES = (*FLOAT_TYPES, *QUANT_TYPES)
