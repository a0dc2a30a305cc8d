"""A bounds-checked reader of GGUF v2 and v3 files (little endian).

Every count, length and offset is checked against the file's size before anything is allocated for it, and the file is
read with `pread`, never mapped: a file that shrinks while it is open gives an error, not a signal. Knows the container,
not what the blocks inside a tensor mean (`quants.py`) and not what a model is (`spec.py`).

Source: the GGUF specification in the ggml project (docs/gguf.md) and its table of block sizes.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import ModelError

__all__ = ["BLOCK_SIZES", "GGUFFile", "TensorEntry"]

MAGIC = b"GGUF"
BROKEN_HINT = "the file is truncated or damaged: download it again (`firstlight pull`) or convert the model anew"

MAX_METADATA_BYTES = 512 << 20
"""Metadata beyond this is refused. The largest vocabularies in use (256k tokens with merges) take under 20 MB."""
MAX_ARRAY_ITEMS = 8 << 20
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 255
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
FIRST_READ_BYTES = 4 << 20
"""Enough for the metadata of a 128k vocabulary in one read."""

BLOCK_SIZES: dict[str, tuple[int, int, int]] = {
    # name: (type id, values per block, bytes per block)
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q8_1": (9, 32, 36),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1),
    "I16": (25, 1, 2),
    "I32": (26, 1, 4),
    "I64": (27, 1, 8),
    "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}
TYPE_NAMES = {type_id: name for name, (type_id, _, _) in BLOCK_SIZES.items()}

STRING, ARRAY = 8, 9
SCALARS: dict[int, tuple[str, int]] = {
    0: ("<u1", 1),
    1: ("<i1", 1),
    2: ("<u2", 2),
    3: ("<i2", 2),
    4: ("<u4", 4),
    5: ("<i4", 4),
    6: ("<f4", 4),
    7: ("|b1", 1),
    10: ("<u8", 8),
    11: ("<i8", 8),
    12: ("<f8", 8),
}
BOOL = 7
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `shape` is row-major (outermost first); `offset` is absolute in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` (key -> int, float, bool, str or list of them) and `tensors` (name -> TensorEntry).

    Use as a context manager. `read` may be called from several threads at once.

    Raises:
        ModelError: the file is missing, is not GGUF, or breaks the format; the message says where.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot open model file `{self.path}`: {error}", hint="check the path") from error
        try:
            self.file_bytes = os.fstat(self._fd).st_size
            cursor = _Cursor(self)
            self.version = _read_version(cursor)
            self.metadata, self.tensors = _read_header(cursor)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ModelError(f"cannot read model file `{self.path}`: {error}") from error
            raise

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of tensor `name`, `[num_bytes] uint8`, in memory of their own. Raises ModelError when absent."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError(f"`{self.path.name}` has no tensor `{name}`", hint=BROKEN_HINT)
        out = np.empty(entry.num_bytes, dtype=np.uint8)
        self._fill(out.data, entry)
        return out

    def _fill(self, view: memoryview, entry: TensorEntry) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], entry.offset + done)
            except OSError as error:
                raise ModelError(f"reading tensor `{entry.name}` of `{self.path}` failed: {error}") from error
            if count == 0:
                raise ModelError(f"`{self.path.name}` ends inside tensor `{entry.name}`", hint=BROKEN_HINT)
            done += count

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pread(self, num_bytes: int) -> bytes:
        """The first `num_bytes` of the file."""
        pieces: list[bytes] = []
        done = 0
        while done < num_bytes:
            piece = os.pread(self._fd, num_bytes - done, done)
            if not piece:
                break
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)


class _Cursor:
    """A reading position in the metadata. Holds the file's head, grown by doubling as parsing proceeds."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.limit = min(file.file_bytes, MAX_METADATA_BYTES)
        self.buffer = file._pread(min(self.limit, FIRST_READ_BYTES))
        self.pos = 0

    def error(self, what: str, hint: str = BROKEN_HINT) -> ModelError:
        return ModelError(f"`{self.file.path.name}` is not a valid GGUF file: {what} (byte {self.pos})", hint=hint)

    def need(self, end: int, what: str) -> None:
        """Makes the buffer reach byte `end`, or raises ModelError naming `what`."""
        if end <= len(self.buffer):
            return
        if end > self.limit:
            if self.limit < self.file.file_bytes:
                raise self.error(f"metadata is larger than {MAX_METADATA_BYTES} bytes at {what}")
            raise self.error(f"{what} needs {end - self.pos} bytes, {self.limit - self.pos} are left")
        self.buffer = self.file._pread(min(self.limit, max(end, 2 * len(self.buffer))))
        if end > len(self.buffer):
            raise self.error(f"file ends inside {what}")

    def u32(self, what: str) -> int:
        self.need(self.pos + 4, what)
        (value,) = U32.unpack_from(self.buffer, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(self.pos + 8, what)
        (value,) = U64.unpack_from(self.buffer, self.pos)
        self.pos += 8
        return int(value)

    def count(self, what: str, min_bytes: int) -> int:
        """A count of things that take at least `min_bytes` each; refused when the file cannot hold so many."""
        count = self.u64(what)
        if count * min_bytes > self.limit - self.pos:
            raise self.error(f"{what} is {count}, the file has room for {(self.limit - self.pos) // min_bytes}")
        return count

    def name(self, what: str, max_bytes: int) -> str:
        """A length-prefixed UTF-8 name of 1..max_bytes bytes."""
        length = self.u64(f"length of {what}")
        if not 1 <= length <= max_bytes:
            raise self.error(f"{what} is {length} bytes long, allowed are 1 to {max_bytes}")
        self.need(self.pos + length, what)
        raw = self.buffer[self.pos : self.pos + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None
        self.pos += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """`count` length-prefixed strings. The one hot loop of the reader: vocabularies have 100k of them."""
        out: list[str] = []
        unpack, buffer, pos, have = U64.unpack_from, self.buffer, self.pos, len(self.buffer)
        for _ in range(count):
            start = pos + 8
            if start > have:
                self.pos = pos
                self.need(start, what)
                buffer, have = self.buffer, len(self.buffer)
            end = start + unpack(buffer, pos)[0]
            if end > have:
                self.pos = pos
                self.need(end, what)
                buffer, have = self.buffer, len(self.buffer)
            out.append(buffer[start:end].decode("utf-8", "replace"))
            pos = end
        self.pos = pos
        return out

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        dtype, size = SCALARS[kind]
        self.need(self.pos + count * size, what)
        raw = np.frombuffer(self.buffer, dtype="|u1" if kind == BOOL else dtype, count=count, offset=self.pos)
        if kind == BOOL:
            if count and int(raw.max()) > 1:
                raise self.error(f"{what} holds a bool that is neither 0 nor 1")
            raw = raw.view(np.bool_)
        self.pos += count * size
        return list(raw.tolist())

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.strings(1, what)[0]
        if kind in SCALARS:
            return self.scalars(kind, 1, what)[0]
        if kind != ARRAY:
            raise self.error(f"{what} has value type {kind}, known are 0 to 12")
        if depth >= MAX_ARRAY_DEPTH:
            raise self.error(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        item_kind = self.u32(f"item type of {what}")
        if item_kind != ARRAY and item_kind != STRING and item_kind not in SCALARS:
            raise self.error(f"{what} has item type {item_kind}, known are 0 to 12")
        min_bytes = 12 if item_kind == ARRAY else 8 if item_kind == STRING else SCALARS[item_kind][1]
        count = self.count(f"item count of {what}", min_bytes)
        if count > MAX_ARRAY_ITEMS:
            raise self.error(f"{what} has {count} items, allowed are {MAX_ARRAY_ITEMS}")
        if item_kind == STRING:
            return self.strings(count, what)
        if item_kind == ARRAY:
            return [self.value(ARRAY, what, depth + 1) for _ in range(count)]
        return self.scalars(item_kind, count, what)


def _read_version(cursor: _Cursor) -> int:
    if cursor.buffer[:4] != MAGIC:
        raise cursor.error(
            f"it begins with {cursor.buffer[:4]!r}, not {MAGIC!r}", hint="give a .gguf file, or a Hugging Face folder"
        )
    cursor.pos = 4
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        raise cursor.error(
            "it is written for big-endian machines", hint="convert the model for a little-endian machine"
        )
    raise cursor.error(
        f"version is {version}, 2 and 3 are supported", hint="convert the model with a current converter"
    )


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    num_tensors = cursor.count("tensor count", 8 + 1 + 4 + 8 + 4 + 8)
    num_keys = cursor.count("key count", 8 + 1 + 4 + 1)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.name(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key `{key}` appears twice")
        metadata[key] = cursor.value(cursor.u32(f"value type of `{key}`"), f"value of `{key}`")
    tensors = [_read_entry(cursor, index) for index in range(num_tensors)]
    return metadata, _place(cursor, tensors, _alignment(cursor, metadata))


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"`general.alignment` is {alignment!r}, it must be a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_entry(cursor: _Cursor, index: int) -> TensorEntry:
    """One tensor's description; its offset still counts from the start of the data section."""
    name = cursor.name(f"name of tensor {index}", MAX_NAME_BYTES)
    num_dims = cursor.u32(f"dimension count of tensor `{name}`")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor `{name}` has {num_dims} dimensions, allowed are 1 to {MAX_DIMS}")
    dims = [cursor.u64(f"dimensions of tensor `{name}`") for _ in range(num_dims)]
    type_id = cursor.u32(f"type of tensor `{name}`")
    offset = cursor.u64(f"offset of tensor `{name}`")
    type_name = TYPE_NAMES.get(type_id)
    if type_name is None:
        raise cursor.error(
            f"tensor `{name}` has type id {type_id}, which is not known", hint="use another quantisation"
        )
    _, block_values, block_bytes = BLOCK_SIZES[type_name]
    if min(dims) < 1:
        raise cursor.error(f"tensor `{name}` has an empty dimension: {dims}")
    if dims[0] % block_values:
        raise cursor.error(
            f"tensor `{name}` has rows of {dims[0]} values, {type_name} needs multiples of {block_values}"
        )
    num_bytes = math.prod(dims) // block_values * block_bytes
    return TensorEntry(name=name, type=type_name, shape=tuple(reversed(dims)), offset=offset, num_bytes=num_bytes)


def _place(cursor: _Cursor, entries: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
    """Makes offsets absolute and checks that tensors lie inside the file, aligned, without touching each other."""
    start = -(-cursor.pos // alignment) * alignment
    file_bytes = cursor.file.file_bytes
    placed: dict[str, TensorEntry] = {}
    for entry in entries:
        if entry.name in placed:
            raise cursor.error(f"tensor `{entry.name}` appears twice")
        if entry.offset % alignment:
            raise cursor.error(f"tensor `{entry.name}` is at offset {entry.offset}, not a multiple of {alignment}")
        offset = start + entry.offset
        if offset + entry.num_bytes > file_bytes:
            end = offset + entry.num_bytes
            raise cursor.error(f"tensor `{entry.name}` ends at byte {end}, the file has {file_bytes}")
        placed[entry.name] = TensorEntry(entry.name, entry.type, entry.shape, offset, entry.num_bytes)
    ordered = sorted(placed.values(), key=lambda entry: entry.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise cursor.error(f"tensors `{before.name}` and `{after.name}` overlap")
    return placed
