"""What was found out so far, in a file: the same command reads it and goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from firstlight.errors import ConfigError

__all__ = ["Journal"]

T = TypeVar("T")


class _File(msgspec.Struct):
    purpose: dict[str, Any]
    found: dict[str, dict[str, Any]]


class Journal:
    """Answers by kind and key. Each new one is on disk, in a whole file, before it is given.

    What asks is deterministic given the answers, so a stopped search repeats itself up to where it was.
    """

    def __init__(self, path: Path, purpose: dict[str, Any]) -> None:
        """Opens or begins the file. Raises ConfigError where it is not one of this purpose."""
        self._path = path
        self._file = _File(msgspec.json.decode(msgspec.json.encode(purpose)), {})
        if not path.exists():
            return
        try:
            read = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"`{path}` cannot be gone on from: {error}", hint="remove it, or give another `--journal`"
            ) from None
        other = [name for name in self._file.purpose if read.purpose.get(name) != self._file.purpose[name]]
        if other:
            raise ConfigError(
                f"`{path}` was begun with another {other[0]}: {read.purpose.get(other[0])}",
                hint="give the same options to go on, another `--journal`, or remove it to begin anew",
            )
        self._file.found = read.found

    def num_found(self, kind: str) -> int:
        """How many answers of a kind are there."""
        return len(self._file.found.get(kind, {}))

    def recall(self, kind: str, key: str, answer_type: type[T], find: Callable[[], T]) -> T:
        """The answer in the file, or what `find` gives, which is written first."""
        answers = self._file.found.setdefault(kind, {})
        if key not in answers:
            answers[key] = msgspec.to_builtins(find())
            self._write()
        return msgspec.convert(answers[key], answer_type)

    def _write(self) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_bytes(msgspec.json.encode(self._file))  # whole even if this process is killed in the middle
        beside.replace(self._path)
