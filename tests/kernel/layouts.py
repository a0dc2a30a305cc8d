"""Every variant of a weight layout with random contents, and what the kernels' numbers mean, in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from firstlight.backend.cpu import _native
from firstlight.models.layouts import PackedWeight, QuantCodes
from firstlight.models.pack import pack

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
TILE = 6
"""kTile of csrc/gemm.h."""
AMX_TILE, AMX_FROM = 16, 6
"""kAmxRows and kAmxFrom of csrc/gemm_amx.cpp."""


@dataclass(frozen=True)
class Variant:
    """One of the layouts that a kernel has its own code for."""

    kind: str
    group: int = 0
    has_min: bool = False
    scale_f32: bool = False

    @property
    def act(self) -> str:
        """The form of activations that it takes."""
        return {"nibble": "int8", "byte": "int16"}.get(self.kind, "float")

    def __str__(self) -> str:
        if self.group == 0:
            return self.kind
        mins = "-min" if self.kind == "byte" and self.has_min else ""
        return f"{self.kind}{self.group if self.kind == 'byte' else ''}{mins}-{'f32' if self.scale_f32 else 'f16'}"


QUANTISED = [
    *(Variant("nibble", 32, True, scale_f32) for scale_f32 in (False, True)),
    *(Variant("byte", g, m, f) for g in (16, 32) for m in (False, True) for f in (False, True)),
]
VARIANTS = [*QUANTISED, Variant("half"), Variant("bf16"), Variant("float")]


def random_matrix(variant: Variant, rows: int, cols: int, rng: np.random.Generator) -> Any:
    """QuantCodes or an array of floats; scales of float16 variants are exact in float16, those of float32 are not."""
    if variant.group == 0:
        values = (rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-8, 3))).astype(np.float32)
        if variant.kind == "half":
            return values.astype(np.float16)
        return (values.view(np.uint32) >> 16).astype(np.uint16) if variant.kind == "bf16" else values
    groups = cols // variant.group

    def numbers() -> F32:
        values = (rng.standard_normal((rows, groups)) * 0.01).astype(np.float32)
        half = values.astype(np.float16).astype(np.float32)
        return np.nextafter(half, np.float32(1)) if variant.scale_f32 else half

    if variant.kind == "nibble":
        codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    else:
        codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    return QuantCodes(variant.kind, variant.group, codes, numbers(), numbers() if variant.has_min else None)


def random_weight(variant: Variant, rows: int, cols: int, rng: np.random.Generator) -> tuple[Any, PackedWeight]:
    matrix = random_matrix(variant, rows, cols, rng)
    packed = pack(matrix)
    assert (packed.kind, packed.group, packed.scale_f32) == (variant.kind, variant.group, variant.scale_f32)
    return matrix, packed


def exact(matrix: Any) -> F64:
    """The values of a matrix in float64: nothing is rounded."""
    if isinstance(matrix, QuantCodes):
        wide = np.repeat(matrix.scales.astype(np.float64), matrix.group, axis=1) * matrix.codes
        return wide if matrix.mins is None else wide + np.repeat(matrix.mins.astype(np.float64), matrix.group, axis=1)
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.asarray(matrix, np.float64)


def quantise(kernels: str, act: str, x: F32) -> npt.NDArray[np.uint8]:
    """The activations' memory as csrc/gemm.h lays it out."""
    out = np.zeros(_native.kernel_activation_bytes(act, *x.shape), np.uint8)
    _native.kernel_quantise(kernels, act, x, out)
    return out


@dataclass(frozen=True)
class Acts:
    """Quantised activations out of their tiles: q `[rows, cols]`, scale `[rows, groups]`, sums `[rows, parts]`."""

    q: npt.NDArray[Any]
    scale: F32
    sums: F32

    def values(self) -> F64:
        """What the quantised numbers stand for."""
        return self.q.astype(np.float64) * np.repeat(self.scale.astype(np.float64), 32, axis=1)


def tiles(num_rows: int, most: int = TILE) -> list[tuple[int, int]]:
    """(first row, rows) of each tile: as few as fit, sizes differ by at most one, larger ones first."""
    num = -(-num_rows // most)
    sizes = [num_rows // num + (i < num_rows % num) for i in range(num)]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def untile(memory: npt.NDArray[np.uint8], act: str, rows: int, cols: int, *, kernels: str = "scalar") -> Acts:
    """What a kernel set's `quantise` left in its own layout."""
    is_amx = kernels == "amx" and rows >= AMX_FROM
    groups, size = cols // 32, {"int8": 1, "int16": 2}[act]
    parts = groups * size
    q_bytes, scale_bytes = (-(-n // 64) * 64 for n in (rows * cols * size, rows * groups * 4))
    q = memory[: rows * cols * size].view(np.int8 if act == "int8" else np.int16)
    if is_amx and act == "int16":
        low, high = memory[: q.nbytes].reshape(-1, 2, 32).transpose(1, 0, 2)
        q = (high.view(np.int8).astype(np.int16) * 256 + low).reshape(-1)
    scale = memory[q_bytes : q_bytes + rows * groups * 4].view(np.float32)
    sums = memory[q_bytes + scale_bytes :][: rows * parts * 4].view(np.float32)

    def rows_of(flat: npt.NDArray[Any], units: int, width: int) -> npt.NDArray[Any]:
        wide = units * width
        out = np.empty((rows, wide), flat.dtype)
        for first, count in tiles(rows, AMX_TILE if is_amx else TILE):
            tile = flat[first * wide : (first + count) * wide].reshape(units, count, width)
            out[first : first + count] = tile.transpose(1, 0, 2).reshape(count, wide)
        return out

    return Acts(rows_of(q, groups, 32), rows_of(scale, groups, 1), rows_of(sums, parts, 1))


def has_kernels(name: str) -> bool:
    """Whether this processor can run the kernel set."""
    rng = np.random.default_rng(0)
    _, weight = random_weight(VARIANTS[0], 8, 32, rng)
    try:
        gemm(name, weight, random_rows(1, 32, rng))
    except ValueError:
        return False
    return True


def gemm(
    kernels: str,
    weight: PackedWeight,
    x: F32,
    *,
    bias: F32 | None = None,
    accumulate: bool = False,
    y: F32 | None = None,
    span: tuple[int, int] | None = None,
) -> F32:
    """x @ weight.T; `y` is written in place when given, `span` is a range of row blocks."""
    if y is None:
        y = np.full((len(x), weight.rows), np.nan, np.float32)
    begin, end = span or (0, -(-weight.rows // 8))
    layout = (weight.kind, weight.rows, weight.cols, weight.group, weight.has_min, weight.scale_f32)
    _native.kernel_gemm(kernels, *layout, weight.data, x, bias=bias, accumulate=accumulate, y=y, begin=begin, end=end)
    return y


def random_rows(num: int, cols: int, rng: np.random.Generator) -> F32:
    """Activations whose rows differ in size by orders of magnitude."""
    x = rng.standard_normal((num, cols)).astype(np.float32)
    return x * np.exp2(rng.integers(-6, 7, (num, 1))).astype(np.float32)


def bits(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


_NO_VNNI = pytest.mark.skipif(not has_kernels("vnni"), reason="the processor has no AVX-512 VNNI")
_NO_AMX = pytest.mark.skipif(not has_kernels("amx"), reason="the processor has no AMX, or its kernel does not grant it")
_VECTOR_SETS = ["avx2", pytest.param("vnni", marks=_NO_VNNI), pytest.param("amx", marks=_NO_AMX)]
EVERY_VECTOR_SET = pytest.mark.parametrize("kernels", _VECTOR_SETS)
EVERY_SET = pytest.mark.parametrize("kernels", ["scalar", *_VECTOR_SETS])
