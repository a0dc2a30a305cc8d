"""The packer: a matrix into the one byte stream a kernel reads (see `layouts.py`), and back.

Knows the layouts, not file formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import ModelError
from firstlight.models.layouts import PackedWeight, QuantCodes
from firstlight.models.quants import Matrix

__all__ = ["LAYOUT_VERSION", "NativePacker", "aligned_empty", "pack", "packed_bytes", "unpack"]

LAYOUT_VERSION = 1
"""Raise when the bytes of a PackedWeight change for the same matrix."""
ROW_BLOCK = 8
RECORD_INPUTS = 32
ALIGNMENT = 64
"""Bytes: one cache line."""
CHUNK_VALUES = 1 << 21
"""Codes packed at a time, so that temporaries stay in the cache."""

NativePacker = Callable[[Matrix, PackedWeight], None]
"""Fills the zeroed `data` of a PackedWeight, whose other fields are set, from a matrix."""


def pack(matrix: Matrix, native: NativePacker | None = None) -> PackedWeight:
    """The matrix in its layout: nibble or byte for QuantCodes, float, half or bf16 (uint16 bits) for float arrays.

    Raises:
        ModelError: the width does not fill whole groups of 32 inputs.
    """
    rows, cols = _shape(matrix)
    if isinstance(matrix, QuantCodes):
        if cols % RECORD_INPUTS:
            raise ModelError(f"a quantised matrix has {cols} columns, layouts need a multiple of {RECORD_INPUTS}")
        kind, group, has_min = matrix.kind, matrix.group, matrix.mins is not None
        scale_f32 = not (_fits_half(matrix.scales) and (matrix.mins is None or _fits_half(matrix.mins)))
    else:
        kind, group, has_min, scale_f32 = _float_kind(matrix), 0, False, False
    if kind == "nibble" and not has_min:
        raise ModelError("a nibble matrix needs minimums")
    data = aligned_empty(packed_bytes(kind, rows, cols, group, has_min, scale_f32))
    out = PackedWeight(kind=kind, rows=rows, cols=cols, group=group, has_min=has_min, scale_f32=scale_f32, data=data)
    (native or _fill)(matrix, out)
    return out


def unpack(packed: PackedWeight) -> Matrix:
    """The matrix a PackedWeight was made from: the inverse of `pack`, to the bit."""
    records = packed.data.view(_record(packed)).reshape(_num_blocks(packed.rows), -1)
    if packed.group == 0:
        values = records["values"].transpose(0, 2, 1).reshape(-1, packed.cols)
        return np.ascontiguousarray(values[: packed.rows])
    return QuantCodes(
        kind=packed.kind,
        group=packed.group,
        codes=_codes_out(records["codes"], packed),
        scales=_groups_out(records["scales"], packed),
        mins=_groups_out(records["mins"], packed) if packed.has_min else None,
    )


def packed_bytes(kind: str, rows: int, cols: int, group: int, has_min: bool, scale_f32: bool) -> int:
    """Length of `PackedWeight.data` in bytes."""
    blocks = _num_blocks(rows)
    if group == 0:
        return blocks * cols * ROW_BLOCK * (4 if kind == "float" else 2)
    numbers = RECORD_INPUTS // group * ROW_BLOCK * (2 if has_min else 1)
    codes = RECORD_INPUTS * ROW_BLOCK // (2 if kind == "nibble" else 1)
    return blocks * (cols // RECORD_INPUTS) * (numbers * (4 if scale_f32 else 2) + codes)


def aligned_empty(num_bytes: int) -> npt.NDArray[np.uint8]:
    """`[num_bytes] uint8`, 64-byte aligned, not initialised."""
    raw = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def _shape(matrix: Matrix) -> tuple[int, int]:
    rows, cols = (matrix.codes if isinstance(matrix, QuantCodes) else matrix).shape
    return rows, cols


def _num_blocks(rows: int) -> int:
    return -(-rows // ROW_BLOCK)


def _float_kind(matrix: npt.NDArray[Any]) -> str:
    return {"float32": "float", "float16": "half", "uint16": "bf16"}[matrix.dtype.name]


def _fits_half(values: npt.NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return bool(np.array_equal(half.astype(np.float32), values))


def _record(packed: PackedWeight) -> np.dtype[np.void]:
    """One record as a structured dtype."""
    if packed.group == 0:
        value = {"float": "<f4", "half": "<f2", "bf16": "<u2"}[packed.kind]
        return np.dtype([("values", value, (ROW_BLOCK,))])
    number = "<f4" if packed.scale_f32 else "<f2"
    per_record = (RECORD_INPUTS // packed.group, ROW_BLOCK)
    fields: list[tuple[str, str, tuple[int, ...]]] = [("scales", number, per_record)]
    if packed.has_min:
        fields.append(("mins", number, per_record))
    if packed.kind == "nibble":
        fields.append(("codes", "<u4", (4, ROW_BLOCK)))
    else:
        fields.append(("codes", "<u2", (16, ROW_BLOCK)))
    return np.dtype(fields)


def _fill(matrix: Matrix, out: PackedWeight) -> None:
    """The numpy packer. Works through row blocks in chunks; the last block is padded with zero rows."""
    records = out.data.view(_record(out)).reshape(_num_blocks(out.rows), -1)
    step = max(1, CHUNK_VALUES // max(1, out.cols * ROW_BLOCK))
    for first in range(0, len(records), step):
        part = records[first : first + step]
        row, end = first * ROW_BLOCK, (first + len(part)) * ROW_BLOCK
        if not isinstance(matrix, QuantCodes):
            part["values"] = _blocks(matrix[row:end]).transpose(0, 2, 1)
            continue
        part["scales"] = _groups_in(matrix.scales[row:end], out)
        if matrix.mins is not None:
            part["mins"] = _groups_in(matrix.mins[row:end], out)
        part["codes"] = _codes_in(matrix.codes[row:end], out)


def _blocks(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`[rows, n]` -> `[row blocks, 8, n]`, zero rows added at the end."""
    missing = -len(rows) % ROW_BLOCK
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), dtype=rows.dtype)])
    return rows.reshape(-1, ROW_BLOCK, rows.shape[1])


def _groups_in(values: npt.NDArray[np.float32], out: PackedWeight) -> npt.NDArray[np.float32]:
    """`[rows, groups]` -> `[row blocks, records, groups per record, 8]`."""
    blocks = _blocks(values)
    return blocks.reshape(len(blocks), ROW_BLOCK, -1, RECORD_INPUTS // out.group).transpose(0, 2, 3, 1)


def _groups_out(values: npt.NDArray[Any], packed: PackedWeight) -> npt.NDArray[np.float32]:
    rows = values.transpose(0, 3, 1, 2).reshape(-1, packed.cols // packed.group)
    return np.ascontiguousarray(rows[: packed.rows]).astype(np.float32)


def _codes_in(codes: npt.NDArray[Any], out: PackedWeight) -> npt.NDArray[Any]:
    """`[rows, cols]` codes -> words of 4 nibble pairs or 2 bytes, `[row blocks, records, words, 8]`."""
    blocks = _blocks(np.ascontiguousarray(codes).view(np.uint8))
    shape = (len(blocks), ROW_BLOCK, out.cols // RECORD_INPUTS)
    if out.kind == "byte":
        return blocks.view(np.uint16).reshape(*shape, 16).transpose(0, 2, 3, 1)
    wide = blocks.view(np.uint64).reshape(-1, 4)  # 32 codes: 16 low halves, 16 high halves
    pairs = np.empty((len(wide), 2), dtype=np.uint64)
    for index in range(2):
        np.left_shift(wide[:, 2 + index], np.uint64(4), out=pairs[:, index])
        np.bitwise_or(pairs[:, index], wide[:, index], out=pairs[:, index])
    return pairs.view(np.uint32).reshape(*shape, 4).transpose(0, 2, 3, 1)


def _codes_out(words: npt.NDArray[Any], packed: PackedWeight) -> npt.NDArray[Any]:
    rows = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8)
    if packed.kind == "byte":
        return rows.reshape(-1, packed.cols)[: packed.rows].view(np.int8)
    pairs = rows.reshape(-1, packed.cols // RECORD_INPUTS, 16)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2)
    return codes.reshape(-1, packed.cols)[: packed.rows]
