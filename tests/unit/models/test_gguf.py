"""The GGUF reader: what it gives from good files, and one clear error from every bad one."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ModelError
from firstlight.models.gguf import GGUFFile
from tests.oracle import gguf_writer as gw

METADATA = {
    "general.architecture": "llama",
    "u8": gw.scalar("u8", 255),
    "i8": gw.scalar("i8", -3),
    "u16": gw.scalar("u16", 65535),
    "i16": gw.scalar("i16", -300),
    "u32": gw.scalar("u32", 2**32 - 1),
    "i32": gw.scalar("i32", -5),
    "f32": gw.scalar("f32", 0.5),
    "bool": gw.scalar("bool", True),
    "u64": gw.scalar("u64", 2**64 - 1),
    "i64": gw.scalar("i64", -(2**63)),
    "f64": gw.scalar("f64", 1e-5),
    "tokens": ["a", "", "ü", "Ġhello"],
    "types": [1, -2, 3],
    "bools": gw.array("bool", [True, False]),
}
NUMBERS = [255, -3, 65535, -300, 2**32 - 1, -5, 0.5, True, 2**64 - 1, -(2**63), 1e-5]
ARRAYS = [["a", "", "ü", "Ġhello"], [1, -2, 3], [True, False]]
PLAIN = dict(zip(METADATA, ["llama", *NUMBERS, *ARRAYS], strict=True))
GRID = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORS = {"grid": gw.f32(GRID), "codes": gw.Tensor("Q4_0", (2, 64), bytes(range(72))), "last": gw.f32([1.0])}
GOOD = gw.build(METADATA, TENSORS)


def opened(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile(path)


def read_all(path: Path, data: bytes) -> None:
    with opened(path, data) as file:
        for name in file.tensors:
            file.read(name)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type_comes_back(tmp_path: Path, version: int) -> None:
    with opened(tmp_path / "m.gguf", gw.build(METADATA, TENSORS, version=version)) as file:
        assert file.metadata == PLAIN
        assert [type(value) for value in file.metadata.values()] == [type(value) for value in PLAIN.values()]
        assert file.version == version


def test_nested_array_comes_back(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 7, -8) + struct.pack("<IQ", 8, 1) + gw.string("x")
    with opened(tmp_path / "m.gguf", gw.build({"deep": struct.pack("<IIQ", 9, 9, 2) + inner}, {})) as file:
        assert file.metadata == {"deep": [[7, -8], ["x"]]}


def test_tensors_come_back_with_row_major_shape(tmp_path: Path) -> None:
    with opened(tmp_path / "m.gguf", GOOD) as file:
        assert file.tensors["grid"].shape == (3, 4)
        assert file.tensors["codes"].type == "Q4_0"
        np.testing.assert_array_equal(file.read("grid").view(np.float32).reshape(3, 4), GRID)
        assert file.read("codes").tobytes() == bytes(range(72))


def test_custom_alignment_is_followed(tmp_path: Path) -> None:
    data = gw.build({"general.alignment": 128}, TENSORS, alignment=128)
    with opened(tmp_path / "m.gguf", data) as file:
        assert all(entry.offset % 128 == 0 for entry in file.tensors.values())
        assert file.read("last").view(np.float32)[0] == 1.0


def test_vocabulary_longer_than_the_first_read_comes_back(tmp_path: Path) -> None:
    tokens = [f"token {index} {'x' * 90}" for index in range(60_000)]
    with opened(tmp_path / "m.gguf", gw.build({"tokens": tokens, "after": 7}, TENSORS)) as file:
        assert file.metadata == {"tokens": tokens, "after": 7}


def test_reading_an_unknown_tensor_raises(tmp_path: Path) -> None:
    with opened(tmp_path / "m.gguf", GOOD) as file, pytest.raises(ModelError, match="no tensor `nope`"):
        file.read("nope")


def test_file_that_shrinks_while_open_raises(tmp_path: Path) -> None:
    with opened(tmp_path / "m.gguf", GOOD) as file:
        (tmp_path / "m.gguf").write_bytes(GOOD[: file.tensors["last"].offset])
        with pytest.raises(ModelError, match="ends inside tensor `last`"):
            file.read("last")


def with_array(item_kind: int, count: int) -> bytes:
    return gw.build({"a": struct.pack("<IIQ", 9, item_kind, count)}, {})


def tensor(shape: tuple[int, ...], type_name: str = "F32", data: bytes = b"", offset: int | None = None) -> bytes:
    return gw.build({}, {"t": gw.Tensor(type_name, shape, data, offset)})


BAD = {
    "empty": (b"", "begins with"),
    "wrong magic": (b"GGML" + GOOD[4:], "begins with b'GGML'"),
    "version 1": (gw.build({}, {}, version=1), "version is 1"),
    "version 4": (gw.build({}, {}, version=4), "version is 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (GOOD[:10], "tensor count needs 8 bytes"),
    "huge tensor count": (GOOD[:8] + b"\xff" * 8 + GOOD[16:], "tensor count is 18446744073709551615"),
    "huge key count": (GOOD[:16] + b"\xff" * 8 + GOOD[24:], "key count is 18446744073709551615"),
    "empty key": (gw.build([("", 1)], {}), "key 0 is 0 bytes"),
    "huge key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(64), "key 0 is 9223372036854775808 bytes"),
    "key not utf-8": (gw.build([("k", 1)], {}).replace(b"k", b"\xff", 1), "not UTF-8"),
    "duplicate key": (gw.build([("k", 1), ("k", 2)], {}), "`k` appears twice"),
    "unknown value type": (gw.build({"k": struct.pack("<I", 13)}, {}), "value type 13"),
    "unknown item type": (with_array(13, 0), "item type 13"),
    "huge string": (gw.build({"k": struct.pack("<IQ", 8, 2**64 - 1)}, {}), "value of `k` needs"),
    "huge array": (with_array(4, 2**62), "item count of value of `a` is 4611686018427387904"),
    "huge string array": (with_array(8, 2**40), "item count of value of `a`"),
    "bool of 2": (gw.build({"k": struct.pack("<IB", 7, 2)}, {}), "neither 0 nor 1"),
    "deep arrays": (gw.build({"a": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9}, {}), "deeper than 4"),
    "alignment 0": (gw.build({"general.alignment": 0}, TENSORS), "`general.alignment` is 0"),
    "alignment 48": (gw.build({"general.alignment": 48}, TENSORS), "`general.alignment` is 48"),
    "alignment text": (gw.build({"general.alignment": "x"}, TENSORS), "`general.alignment` is 'x'"),
    "duplicate tensor": (gw.build({}, [("t", gw.f32([1.0])), ("t", gw.f32([2.0]))]), "`t` appears twice"),
    "no dimensions": (tensor(()), "0 dimensions"),
    "five dimensions": (tensor((1,) * 5), "5 dimensions"),
    "empty dimension": (tensor((4, 0)), "empty dimension"),
    "odd row": (tensor((1, 33), "Q4_0", bytes(18)), "rows of 33 values"),
    "overflowing size": (tensor((2**32, 2**32)), "the file has"),
    "overflowing wide": (tensor((2**63, 2**63, 2**63, 2**63)), "the file has"),
    "offset outside": (tensor((1,), data=bytes(4), offset=2**63), "the file has"),
    "offset unaligned": (tensor((1,), data=bytes(64), offset=4), "not a multiple of 32"),
    "data cut": (GOOD[:-1], "`last` ends at byte"),
    "overlap": (gw.build({}, {"a": gw.f32([1.0] * 9), "b": gw.Tensor("F32", (1,), b"1234", 32)}), "overlap"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_raises_one_clear_error(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ModelError, match=message) as caught:
        read_all(tmp_path / "bad.gguf", data)
    assert "bad.gguf" in caught.value.message
    assert caught.value.hint


def test_unknown_tensor_type_raises(tmp_path: Path) -> None:
    data = gw.build({}, {"t": gw.f32([1.0])})
    at = data.index(struct.pack("<IQQ", 1, 1, 0)[:12]) + 12
    with pytest.raises(ModelError, match="type id 99"):
        read_all(tmp_path / "bad.gguf", data[:at] + struct.pack("<I", 99) + data[at + 4 :])


@pytest.mark.parametrize("make", ["absent", "folder"])
def test_path_that_is_no_file_raises(tmp_path: Path, make: str) -> None:
    path = tmp_path / make
    if make == "folder":
        path.mkdir()
    with pytest.raises(ModelError, match=make):
        GGUFFile(path)


def test_every_truncation_raises(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelError):
            read_all(tmp_path / "bad.gguf", GOOD[:length])


def survives(path: Path, data: bytes) -> None:
    """Reads a mutated file: it may be valid or refused, nothing else; memory stays near the file's size."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_all(path, data)
    except ModelError:
        pass  # refused, as it may be
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_every_byte_set_to_its_extremes_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    for at in range(len(GOOD)):
        for value in (0xFF, GOOD[at] ^ 0x01):
            survives(path, GOOD[:at] + bytes([value]) + GOOD[at + 1 :])


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8)), max_size=6))
def test_random_edits_never_crash(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(GOOD)
    for at, raw in edits:
        data[at : at + len(raw)] = raw
    survives(tmp_path_factory.getbasetemp() / "edited.gguf", bytes(data))


@settings(max_examples=200, deadline=None)
@given(tail=st.binary(max_size=300))
def test_random_bytes_after_the_magic_never_crash(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    survives(tmp_path_factory.getbasetemp() / "random.gguf", b"GGUF\x03\0\0\0" + tail)
