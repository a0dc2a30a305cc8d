"""Host memory over disk, and the thread that reads, checks and writes blocks while steps run.

Knows keys, bytes and seconds. The core's thread calls everything here; `Tiers._serve` alone runs on the other one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from firstlight.cache.tiers.disk import DiskTier
from firstlight.cache.tiers.record import BlockRecord, CorruptBlockError, ForeignBlockError

__all__ = ["BlockBytes", "Load", "TierCounts", "Tiers"]

log = logging.getLogger(__name__)

PRIOR_S_PER_BYTE = {"host": 2e-9, "disk": 5e-9}
"""Reading and checking, before any was timed."""
PACE = 0.1
MAX_UNWRITTEN_BYTES = 256_000_000
"""Blocks that wait to be written to disk; beyond this they are dropped: the disk cannot follow."""


WRITE_POLL_S = 0.002


class BlockBytes(Protocol):
    """What moves a block's bytes; a Backend does."""

    def read_blocks(self, block_ids: list[int]) -> bytes:
        """The KV bytes of blocks that no running step writes; any thread."""

    def write_blocks(self, block_ids: list[int], data: bytes) -> None:
        """Puts them back, into any blocks; between two steps."""


@dataclass(slots=True)
class TierCounts:
    """Counters of one tier, in blocks. A corrupt or foreign block was a miss."""

    stored: int = 0
    loaded: int = 0
    corrupt: int = 0
    foreign: int = 0
    dropped: int = 0
    """Not stored, because the disk failed or could not follow."""


@dataclass(slots=True)
class Load:
    """Blocks on their way up. `payloads` has those that passed their checks, as an unbroken run from the first."""

    keys: Sequence[bytes]
    contents: Sequence[bytes]
    hosted: Sequence[BlockRecord | None]
    """Per key its record in host memory; None: it is on disk."""
    payloads: list[bytes] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    is_read: bool = False
    is_cancelled: bool = False


class Tiers:
    """Where evicted blocks go. Everything is bounded; what is asked for and not sound is a miss.

    Args:
        space: 32 bytes that name weights and layout.
        block_bytes: KV bytes of one block.
        host_bytes: what host memory may hold; 0: none.
        disk: the tier below it, if any.
        on_read: called on the other thread when a load or a spill has been read.
        clock: seconds, by which loads are timed.
    """

    def __init__(
        self,
        source: BlockBytes,
        space: bytes,
        block_bytes: int,
        *,
        host_bytes: int,
        disk: DiskTier | None,
        on_read: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counts = {"host": TierCounts(), "disk": TierCounts()}
        self.block_bytes = block_bytes
        self._source = source
        self._space = space
        self._max_host = host_bytes // block_bytes
        self._disk = disk
        self._on_read = on_read
        self._clock = clock
        self._host: OrderedDict[bytes, BlockRecord] = OrderedDict()
        self._unwritten: dict[bytes, BlockRecord] = {}
        self._read: deque[int] = deque()
        self._block_s = {name: prior * block_bytes for name, prior in PRIOR_S_PER_BYTE.items()}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="firstlight-tiers", daemon=True)
        self._thread.start()

    # -- the core's thread ----------------------------------------------------------------------------------------

    @property
    def num_host(self) -> int:
        """Blocks in host memory."""
        return len(self._host)

    @property
    def num_disk(self) -> int:
        """Blocks on disk, those of other weights included."""
        return len(self._disk) if self._disk is not None else 0

    def where(self, key: bytes) -> str | None:
        """The highest tier that has the block."""
        if key in self._host or key in self._unwritten:
            return "host"
        return "disk" if self._disk is not None and key in self._disk else None

    def predict_s(self, num_host: int, num_disk: int) -> float:
        """Seconds until so many blocks of each tier have been read and checked."""
        return num_host * self._block_s["host"] + num_disk * self._block_s["disk"]

    def put(self, record: BlockRecord, block: int | None) -> None:
        """Takes a block in. Its bytes are in the record, or are read from `block` on the other thread; the block's id
        is then among `take_read` when they have been."""
        self._keep(record)

        def read_and_seal() -> None:
            if record.payload is None:
                assert block is not None
                record.payload = self._source.read_blocks([block])
                self._read.append(block)
                self._on_read()
            record.seal(self._space)

        self._jobs.put(read_and_seal)
        self._push_down()

    def _keep(self, record: BlockRecord) -> None:
        self._host[record.key] = record
        self._host.move_to_end(record.key)
        self.counts["host"].stored += self._max_host > 0

    def _push_down(self) -> None:
        """What host memory has no room for goes to disk, the longest unused first."""
        while len(self._host) > self._max_host:
            key, record = self._host.popitem(last=False)
            if self._disk is None or key in self._disk:
                continue
            if len(self._unwritten) * self.block_bytes > MAX_UNWRITTEN_BYTES:
                self.counts["disk"].dropped += 1
                continue
            self._unwritten[key] = record
            self._jobs.put(lambda record=record: self._write(record))  # type: ignore[misc]

    def take_read(self) -> list[int]:
        """Blocks whose bytes have been read since the last call, so that they may be used again."""
        return [self._read.popleft() for _ in range(len(self._read))]

    def start(self, load: Load) -> None:
        """Has the load read; `is_read` tells when it was."""
        self._jobs.put(lambda: self._fetch(load))

    def hosted(self, key: bytes) -> BlockRecord | None:
        """The block's record in host memory, which counts as used now."""
        if key in self._host:
            self._host.move_to_end(key)
            return self._host[key]
        return self._unwritten.get(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks in every tier, with all that was computed on top of them (as far as host memory knows)."""
        gone = set(keys)
        while below := {r.key for r in [*self._host.values(), *self._unwritten.values()] if r.parent in gone} - gone:
            gone |= below
        for key in gone:
            self._host.pop(key, None)
            self._unwritten.pop(key, None)
            if self._disk is not None:
                self._jobs.put(lambda key=key, disk=self._disk: disk.remove(key))  # type: ignore[misc]

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def wait_for_disk(self, give_up_s: float) -> bool:
        """Waits while many blocks are on their way to disk; False once it is `give_up_s` on the monotonic clock."""
        while len(self._unwritten) * self.block_bytes > MAX_UNWRITTEN_BYTES // 2:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(WRITE_POLL_S)
        return True

    def empty_host(self, give_up_s: float) -> None:
        """Sends what host memory holds to disk, and keeps nothing there from now on."""
        while self._host and self.wait_for_disk(give_up_s):
            self._max_host = len(self._host) - 1
            self._push_down()
        self._max_host = 0

    def close(self) -> None:
        """Ends the thread, after what was asked of it."""
        self._jobs.put(None)
        self._thread.join()

    # -- the other thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, record: BlockRecord) -> None:
        assert self._disk is not None
        try:
            if record.key in self._unwritten and self._disk.write(record):
                self.counts["disk"].stored += 1
        except OSError as error:
            self.counts["disk"].dropped += 1
            log.warning("disk_cache_write_failed error=%r", str(error))
        self._unwritten.pop(record.key, None)

    def _fetch(self, load: Load) -> None:
        """Reads and checks one block after the other; the first that is not sound ends the run."""
        for key, content, hosted in zip(load.keys, load.contents, load.hosted, strict=True):
            if load.is_cancelled:
                break
            tier, begin = "disk" if hosted is None else "host", self._clock()
            record = self._sound(tier, key, hosted)
            if record is None or record.payload is None:
                break
            if record.content != content or len(record.payload) != self.block_bytes:
                self.counts[tier].foreign += 1
                break
            load.payloads.append(record.payload)
            load.origins.append(tier)
            self.counts[tier].loaded += 1
            self._block_s[tier] += PACE * (self._clock() - begin - self._block_s[tier])
        load.is_read = True
        self._on_read()

    def _sound(self, tier: str, key: bytes, hosted: BlockRecord | None) -> BlockRecord | None:
        """The block's record if it passes its checks. Counts and removes one that does not."""
        if hosted is not None:
            if hosted.is_intact(self._space):
                return hosted
            self.counts[tier].corrupt += 1
            self._host.pop(key, None)
            return None
        assert self._disk is not None
        try:
            return self._disk.read(key)
        except CorruptBlockError:
            self.counts[tier].corrupt += 1
        except ForeignBlockError:
            self.counts[tier].foreign += 1
        except OSError:
            self.counts[tier].dropped += 1
        return None
