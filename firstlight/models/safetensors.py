"""A bounds-checked reader of safetensors folders: one file, or an index and its shards.

Offers the same `tensors` and `read` as `GGUFFile`. Knows the container, not what the tensors are for.

Source: the format description in the safetensors project's README.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import ModelError
from firstlight.models.gguf import TensorEntry

__all__ = ["SafetensorsFolder", "read_json"]

MAX_HEADER_BYTES = 64 << 20
MAX_JSON_BYTES = 64 << 20
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
HINT = "the file is truncated or damaged: download the folder again"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises ModelError when it is missing, too large or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"`{path}` is larger than {MAX_JSON_BYTES} bytes", hint=HINT)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read `{path}`: {error}", hint="the folder is not a complete model") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"`{path}` is not valid JSON: {error}", hint=HINT) from error
    if not isinstance(value, dict):
        raise ModelError(f"`{path}` holds no JSON object", hint=HINT)
    return value


class SafetensorsFolder:
    """The tensors of a folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Raises:
        ModelError: a file is missing or breaks the format; the message says which and where.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.tensors: dict[str, TensorEntry] = {}
        self.file_bytes = 0
        self._files: dict[str, Path] = {}
        for path in _shards(folder):
            for name, entry in _read_header(path).items():
                if name in self.tensors:
                    raise ModelError(f"tensor `{name}` is in two files of `{folder}`", hint=HINT)
                self.tensors[name] = entry
                self._files[name] = path
            self.file_bytes += path.stat().st_size

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of tensor `name`, `[num_bytes] uint8`. Raises ModelError when absent or cut short."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError(f"`{self.path}` has no tensor `{name}`", hint=HINT)
        try:
            data = np.fromfile(self._files[name], dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        except OSError as error:
            raise ModelError(f"cannot read tensor `{name}` of `{self.path}`: {error}", hint=HINT) from error
        if data.size != entry.num_bytes:
            raise ModelError(f"`{self._files[name]}` ends inside tensor `{name}`", hint=HINT)
        return data


def _shards(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if whole.is_file():
            return [whole]
        raise ModelError(
            f"`{folder}` has neither model.safetensors nor its index",
            hint="weights are read from safetensors and GGUF only",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"`{index}` has no `weight_map` of file names", hint=HINT)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"`{index}` names {name!r}, which is no safetensors file of this folder", hint=HINT)
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, TensorEntry]:
    def error(what: str) -> ModelError:
        return ModelError(f"`{path}` is not a valid safetensors file: {what}", hint=HINT)

    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or length > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise error(f"its header claims {length} bytes, the file has {file_bytes}")
            raw = file.read(length)
    except OSError as failure:
        raise ModelError(f"cannot read `{path}`: {failure}", hint="the folder is not a complete model") from failure
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as failure:
        raise error(f"its header is not JSON ({failure})") from failure
    if not isinstance(header, dict):
        raise error("its header is no JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(name, value, start, file_bytes, error) for name, value in header.items()}
    end = start
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset < end:
            raise error(f"tensor `{entry.name}` overlaps another")
        end = entry.offset + entry.num_bytes
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _entry(name: str, value: Any, start: int, file_bytes: int, error: Any) -> TensorEntry:
    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)

    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise error(f"tensor `{name}` has no dtype")
    dtype = value["dtype"]
    shape: Any = value.get("shape")
    span: Any = value.get("data_offsets")
    if not whole(shape) or not whole(span) or len(span) != 2 or span[0] > span[1]:
        raise error(f"tensor `{name}` has no valid shape and offsets")
    if start + span[1] > file_bytes:
        raise error(f"tensor `{name}` ends at byte {start + span[1]}, the file has {file_bytes}")
    num_bytes = span[1] - span[0]
    if dtype in DTYPE_BYTES and math.prod(shape) * DTYPE_BYTES[dtype] != num_bytes:
        raise error(f"tensor `{name}` of shape {shape} and type {dtype} is given {num_bytes} bytes")
    return TensorEntry(name=name, type=dtype, shape=tuple(shape), offset=start + span[0], num_bytes=num_bytes)
