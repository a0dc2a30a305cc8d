"""A directory of blocks, one file each, within a bound. Knows files and bytes; one thread uses it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import OrderedDict
from pathlib import Path

from firstlight.cache.tiers.record import BlockRecord, decode, header_of
from firstlight.errors import ConfigError

__all__ = ["DiskTier"]

SUFFIX = ".kv"
STALE_S = 60.0
"""A temporary file this old was left by a process that died."""


class DiskTier:
    """Files `DIR/SPACE/KEY.kv`. A file appears whole, by renaming; a crash leaves at most a temporary one.

    A file torn by a loss of power fails its checksum, so nothing is synced. The least recently used goes first,
    and the files of other spaces (other weights or layouts) go before all.

    Args:
        space: 32 bytes that name weights and layout.
        max_bytes: all files of the directory together.

    Raises:
        ConfigError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path, space: bytes, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._space = space
        self._home = directory / space.hex()[:16]
        self._serial = itertools.count()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            (probe := self._temporary()).touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"`disk_cache` {directory} cannot be used: {error}", param="disk_cache") from None
        self._scan(directory)

    def _scan(self, directory: Path) -> None:
        """Finds what earlier processes left; the files of other spaces, then the oldest, will go first."""
        found = []
        for path in directory.glob("*/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                if path.suffix == SUFFIX:
                    found.append((path.parent == self._home, stat.st_mtime, path, stat.st_size))
                elif path.suffix == ".tmp" and time.time() - stat.st_mtime > STALE_S:
                    path.unlink()
        for _, _, path, size in sorted(found):
            self._sizes[path] = size
            self.num_bytes += size
        self._make_room(0)

    def _path(self, key: bytes) -> Path:
        return self._home / (key.hex() + SUFFIX)

    def _temporary(self) -> Path:
        return self._home / f"{os.getpid()}-{next(self._serial)}.tmp"

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._sizes

    def write(self, record: BlockRecord) -> bool:
        """Stores a sealed record; False where it is there already or larger than the bound. Raises OSError."""
        path, header = self._path(record.key), header_of(record, self._space)
        assert record.payload is not None
        size = len(header) + len(record.content) + len(record.payload)
        if path in self._sizes or size > self.max_bytes:
            return False
        self._make_room(size)
        temporary = self._temporary()
        try:
            with temporary.open("wb") as file:
                file.writelines((header, record.content, record.payload))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sizes[path] = size
        self.num_bytes += size
        return True

    def read(self, key: bytes) -> BlockRecord:
        """The block; it counts as used now.

        Raises:
            OSError: the file is gone or cannot be read; it is forgotten.
            CorruptBlockError, ForeignBlockError: what is there is not the block; it is removed.
        """
        path = self._path(key)
        try:
            record = decode(path.read_bytes(), self._space, key)
            os.utime(path)
        except Exception:
            self.remove(key)
            raise
        if path in self._sizes:
            self._sizes.move_to_end(path)
        return record

    def remove(self, key: bytes) -> None:
        """Forgets a block and its file."""
        self._unlink(self._path(key))

    def _make_room(self, size: int) -> None:
        while self._sizes and self.num_bytes + size > self.max_bytes:
            self._unlink(next(iter(self._sizes)))
            self.num_evicted += 1

    def _unlink(self, path: Path) -> None:
        self.num_bytes -= self._sizes.pop(path, 0)
        with contextlib.suppress(OSError):
            path.unlink()
