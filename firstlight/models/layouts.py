"""The weight layouts that kernels read, and the packer from plain codes into them.

Every file format becomes `QuantCodes` (plain row-major codes, scales, mins) and then one `PackedWeight`, a single byte
stream whose records a kernel reads in order. Rows are padded with zeros to a multiple of 8 and interleaved 8 at a time.
R below is the row inside the block of 8; K is the input width; every record is stored for row block 0 group 0, group 1,
..., then row block 1, ...

nibble   4-bit codes 0..15, value = scale * code + min, groups of 32. Record of one (row block, group of 32):
         8 scales, 8 mins (float16 or float32), 128 bytes of codes: byte [j*32 + R*4 + b], j 0..3, b 0..3, holds code
         k = 4j + b in its low half and k = 16 + 4j + b in its high half.
         160 bytes with float16 scales, 192 with float32.
byte     signed 8-bit codes, value = scale * code (+ min), groups of 16 or 32. Record of one (row block, 32 inputs):
         for each group inside the 32: 8 scales; then, if mins are there, for each group: 8 mins; then 256 bytes of
         codes: byte [u*16 + R*2 + b], u 0..15, b 0..1, holds code k = 2u + b.
half     float16, record of one (row block, k): 8 values.          bf16: the same with bfloat16 bits.
float    float32, record of one (row block, k): 8 values.

Scales are float16 exactly when every scale and min of the tensor is exactly representable in it, else float32: packing
loses nothing. Knows no file format and no arithmetic beyond dequantisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PackedWeight", "QuantCodes"]


@dataclass(frozen=True, slots=True)
class QuantCodes:
    """A quantised matrix as plain arrays.

    codes: `[rows, cols] uint8` (nibble, 0..15) or `[rows, cols] int8` (byte).
    scales: `[rows, cols / group] float32`; mins the same or None; value = scale * code + min.
    """

    kind: str
    group: int
    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    mins: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix in one layout: `data` is `[num_bytes] uint8`, C-contiguous, 64-byte aligned."""

    kind: str
    """"nibble", "byte", "half", "bf16" or "float"."""
    rows: int
    cols: int
    group: int
    """Inputs per scale: 16 or 32; 0 for half, bf16 and float."""
    has_min: bool
    scale_f32: bool
    data: npt.NDArray[np.uint8]
