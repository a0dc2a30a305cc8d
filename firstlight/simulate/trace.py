"""A trace as lengths, times and prefix block ids. Knows the file's format (JSONL)."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Annotated

import msgspec

from firstlight.errors import ConfigError

__all__ = ["Trace", "TraceRequest", "read_trace"]


class _Row(msgspec.Struct):
    timestamp_s: float = 0.0
    input_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    output_tokens: int = 1
    block_size: int = 0
    block_runs: list[tuple[int, int]] = []
    session: str = ""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `blocks`: ids of its prefix blocks, first to last; empty if unknown."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `block_size` 0: the trace says nothing about shared prefixes."""

    requests: list[TraceRequest]
    block_size: int
    num_block_ids: int

    @property
    def num_blocks(self) -> int:
        """Prefix blocks over all requests."""
        return sum(len(request.blocks) for request in self.requests)


def read_trace(path: str, *, count: int = 0, speed: float = 1.0) -> Trace:
    """The first `count` requests (0: all) by arrival, times divided by `speed`.

    Block ids of a row with a session are its own; sessions begin together where the file counts time from each one's
    first request.

    Raises:
        ConfigError: the file cannot be read, or a row is not a request.
    """
    rows = _rows(path)
    rows.sort(key=lambda row: row.timestamp_s)
    rows = rows[: count or None]
    if not rows:
        raise ConfigError(f"`{path}` has no request")
    sizes = {row.block_size for row in rows if row.block_runs}
    if len(sizes) > 1:
        raise ConfigError(f"`{path}` has blocks of {sorted(sizes)} tokens: one size is needed")
    first_s = rows[0].timestamp_s
    ids: dict[tuple[str, int], int] = {}
    requests = [
        TraceRequest(
            arrival_s=(row.timestamp_s - first_s) / speed,
            input_tokens=row.input_tokens,
            output_tokens=max(1, row.output_tokens),
            blocks=[
                ids.setdefault((row.session, block), len(ids))
                for first, num in row.block_runs
                for block in range(first, first + num)
            ],
        )
        for row in rows
    ]
    return Trace(requests, sizes.pop() if sizes else 0, len(ids))


def _rows(path: str) -> list[_Row]:
    rows = []
    decoder = msgspec.json.Decoder(_Row)
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        rows.append(decoder.decode(line))
                    except msgspec.MsgspecError as error:
                        raise ConfigError(f"`{path}` line {number} is not a request: {error}") from None
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror or error}") from None
    return rows
