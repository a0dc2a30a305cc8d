"""A tiny GGUF writer for tests: enough to build valid and deliberately broken files."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from firstlight.models.gguf import BLOCK_SIZES

KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "u64": 10, "i64": 11, "f64": 12}
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: Any) -> bytes:
    return struct.pack("<I" + FORMATS[KINDS[kind]], KINDS[kind], value)


def text(value: str) -> bytes:
    return struct.pack("<I", 8) + string(value)


def array(kind: str, values: list[Any]) -> bytes:
    head = struct.pack("<IIQ", 9, 8 if kind == "str" else KINDS[kind], len(values))
    if kind == "str":
        return head + b"".join(string(value) for value in values)
    return head + b"".join(struct.pack("<" + FORMATS[KINDS[kind]], value) for value in values)


def encode(value: Any) -> bytes:
    """A Python value as typed GGUF bytes, with the kinds converters use."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool):
        return scalar("bool", value)
    if isinstance(value, int):
        return scalar("u32" if 0 <= value < 2**32 else "i64", value)
    if isinstance(value, float):
        return scalar("f32", value)
    if all(isinstance(item, str) for item in value):
        return array("str", value)
    return array("i32" if all(isinstance(item, int) for item in value) else "f32", value)


class Tensor:
    """One tensor to write: GGUF type name, row-major shape, raw block bytes; `offset` overrides the honest one."""

    def __init__(self, type_name: str, shape: tuple[int, ...], data: bytes, offset: int | None = None) -> None:
        self.type, self.shape, self.data, self.offset = type_name, shape, data, offset


def f32(values: Any) -> Tensor:
    array = np.ascontiguousarray(values, dtype=np.float32)
    return Tensor("F32", array.shape, array.tobytes())


def build(
    metadata: list[tuple[str, Any]] | dict[str, Any],
    tensors: list[tuple[str, Tensor]] | dict[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The bytes of a GGUF file. Lists of pairs allow duplicate names."""
    keys = list(metadata.items()) if isinstance(metadata, dict) else metadata
    named = list(tensors.items()) if isinstance(tensors, dict) else tensors
    out = [b"GGUF", struct.pack("<IQQ", version, len(named), len(keys))]
    out += [string(key) + encode(value) for key, value in keys]
    data = b""
    for name, tensor in named:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        dims = tuple(reversed(tensor.shape))
        out.append(string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        out.append(struct.pack("<IQ", BLOCK_SIZES[tensor.type][0], offset))
        data += tensor.data
    head = b"".join(out)
    return head + bytes(-len(head) % alignment) + data
