"""The safetensors reader: agreement with the reference library, and one clear error from every bad file."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ModelError
from firstlight.models.safetensors import SafetensorsFolder
from tests.oracle.tiny_model import safetensors_bytes

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((4,), np.float16)}
GOOD = safetensors_bytes({"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (4,), bytes(8))})


def read_all(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    file = SafetensorsFolder(folder)
    for name in file.tensors:
        file.read(name)


def test_tensors_equal_what_the_reference_library_wrote(tmp_path: Path) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "np"})
    file = SafetensorsFolder(tmp_path)
    for name, array in ARRAYS.items():
        assert file.tensors[name].shape == array.shape
        np.testing.assert_array_equal(file.read(name).view(array.dtype).reshape(array.shape), array)


def with_entry(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"t": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD = {
    "empty": (b"", "claims 0 bytes"),
    "huge header": (struct.pack("<Q", 2**63) + bytes(100), "claims 9223372036854775808 bytes"),
    "no json": (with_header(b"{{{{"), "not JSON"),
    "not utf-8": (with_header(b'{"\xff": 1}'), "not JSON"),
    "a list": (with_header(b"[1]"), "no JSON object"),
    "deep": (with_header(b"[" * 100_000), "not JSON"),
    "duplicate": (with_header(b'{"t": 1, "t": 2}'), "appears twice"),
    "entry is a number": (with_header(b'{"t": 1}'), "no dtype"),
    "no shape": (with_entry(shape=None), "no valid shape"),
    "negative shape": (with_entry(shape=[-2, -1]), "no valid shape"),
    "shape of floats": (with_entry(shape=[2.0]), "no valid shape"),
    "offsets reversed": (with_entry(data_offsets=[8, 0]), "no valid shape"),
    "three offsets": (with_entry(data_offsets=[0, 4, 8]), "no valid shape"),
    "beyond the end": (with_entry(data_offsets=[0, 16], shape=[4]), "the file has"),
    "size and shape differ": (with_entry(shape=[3]), r"shape \[3\] and type F32 is given 8 bytes"),
    "overlap": (
        safetensors_bytes({"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8))}).replace(b"[8, 16]", b"[4, 12]"),
        "overlaps",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_raises_one_clear_error(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ModelError, match=message):
        read_all(tmp_path, data)


def test_every_truncation_raises(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ModelError):
            read_all(tmp_path, GOOD[:length])


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8)), max_size=6))
def test_random_edits_never_crash(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(GOOD)
    for at, raw in edits:
        data[at : at + len(raw)] = raw
    with contextlib.suppress(ModelError):  # refused, as it may be
        read_all(tmp_path_factory.getbasetemp(), bytes(data))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", ""])
def test_index_that_names_a_file_elsewhere_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="no safetensors file of this folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_broken_index_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsFolder(tmp_path)


def test_missing_shard_raises(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor its index"):
        SafetensorsFolder(tmp_path)
