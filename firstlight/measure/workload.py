"""Sessions to send: when each begins, what its turns say, how long its user thinks.

Knows prompts and times; knows neither servers nor results. Everything is drawn from a seed, so that runs compare.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.errors import ConfigError
from firstlight.measure.bench import Prompt

__all__ = [
    "Session",
    "arrivals_s",
    "file_sessions",
    "is_trace",
    "single_turns",
    "synthetic_prompts",
    "trace_sessions",
]

_TEXT = (
    "time way year work day part place case week point number group problem fact hand water room area money story "
    "issue side kind head house service friend hour game line end member law car city name team minute idea body "
    "information back parent face level office door health person art war history party result change morning reason "
)
_WORDS = _TEXT.split()
"""Common words: about one token each in every vocabulary, so that a word count is nearly a token count."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns sent one after the other, each when the last answer has ended and its think time has passed."""

    begin_s: float
    prompts: tuple[Prompt, ...]
    thinks_s: tuple[float, ...] = ()
    """Wait before each turn; empty: none."""
    is_conversation: bool = False
    """Whether a turn's messages continue the earlier ones and the answers to them."""


def single_turns(prompts: Iterable[Prompt], begins_s: Iterable[float]) -> list[Session]:
    """One session per prompt, beginning at the given times."""
    return [Session(begin_s, (prompt,)) for prompt, begin_s in zip(prompts, begins_s, strict=False)]


def arrivals_s(rate: float, kind: str, seed: int) -> Iterator[float]:
    """Endless begin times of `rate` per second: `poisson` (independent clients) or `fixed` (a metronome)."""
    rng = random.Random(f"arrivals {seed}")
    now_s = 0.0
    while True:
        yield now_s
        now_s += rng.expovariate(rate) if kind == "poisson" else 1 / rate


def words(key: str, count: int) -> str:
    """`count` words that depend on the key alone."""
    return " ".join(random.Random(key).choices(_WORDS, k=count))


def synthetic_prompts(seed: int, *, input_tokens: int, prefix_tokens: int, max_tokens: int) -> Iterator[Prompt]:
    """Endless prompts of about `input_tokens`, the first `prefix_tokens` of which all share."""
    if prefix_tokens > input_tokens:
        raise ConfigError(
            f"`--prefix-tokens {prefix_tokens}` is more than `--input-tokens {input_tokens}`", hint="share less"
        )
    prefix = words(f"prefix {seed}", prefix_tokens)
    for index in itertools.count():
        own = words(f"own {seed} {index}", input_tokens - prefix_tokens)
        yield Prompt([{"role": "user", "content": f"{prefix} {own}".strip()}], max_tokens or 64)


def is_trace(path: str) -> bool:
    """Whether the rows of a file are requests by length, not conversations. Raises ConfigError of no file or row."""
    first = next(_rows(path), None)
    if first is None:
        raise ConfigError(f"`{path}` has no row", hint="see docs/measuring.md")
    return "input_tokens" in first


def file_sessions(path: str, begins_s: Iterable[float], count: int, max_tokens: int) -> list[Session]:
    """Conversations of a JSONL file: `turns` (user texts in order) or `messages` (OpenAI's form) in each row."""
    sessions = []
    rows = list(_rows(path))
    for row, begin_s in zip(itertools.islice(itertools.cycle(rows), count), begins_s, strict=False):
        if row.get("messages"):
            turns = [[{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in row["messages"]]]
        elif row.get("turns"):
            turns = [[{"role": "user", "content": str(text)}] for text in row["turns"]]
        else:
            raise ConfigError(f"`{path}`: a row has neither `turns` nor `messages`", hint="see docs/measuring.md")
        prompts = tuple(Prompt(messages, max_tokens or 64) for messages in turns)
        sessions.append(Session(begin_s, prompts, is_conversation=True))
    return sessions


def trace_sessions(
    path: str, *, count: int, speed: float, max_input_tokens: int, begins_s: Iterator[float] | None = None
) -> tuple[list[Session], int]:
    """A recorded trace as sessions, and how many of its rows were left out for being longer than `max_input_tokens`.

    Rows of one (session, subagent) are turns, with their think times; others begin at their own time over `speed`, or
    at `begins_s`. Equal block ids (of one session, where the row has one) give equal text, and so equal prefixes.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    num_skipped = num_taken = 0
    for row in _rows(path):
        if num_taken == count:
            break
        if max_input_tokens and row["input_tokens"] > max_input_tokens:
            num_skipped += 1
            continue
        num_taken += 1
        key = (row["session"], row.get("subagent")) if row.get("session") else ("row", row.get("id", num_taken))
        groups.setdefault(key, []).append(row)
    if not groups:
        raise ConfigError(f"`--trace {path}` has no row to send", hint="`--input-tokens` skips longer rows")
    first_s = min(float(rows[0].get("timestamp_s", 0.0)) for rows in groups.values())
    sessions = [
        Session(
            next(begins_s) if begins_s else (float(rows[0].get("timestamp_s", 0.0)) - first_s) / speed,
            tuple(Prompt([{"role": "user", "content": _trace_text(path, row)}], row["output_tokens"]) for row in rows),
            tuple(0.0 if i == 0 else float(row.get("think_s") or 0.0) / speed for i, row in enumerate(rows)),
        )
        for rows in groups.values()
    ]
    return sorted(sessions, key=lambda session: session.begin_s), num_skipped


def _trace_text(path: str, row: dict[str, Any]) -> str:
    """The row's prompt: a text per block, cut to its length; rows without blocks share nothing."""
    num = int(row["input_tokens"])
    size = int(row.get("block_size") or num)
    scope = f"{Path(path).name} {row.get('session', '')}"
    runs = row.get("block_runs")
    ids: Sequence[Any] = [i for first, n in runs for i in range(first, first + n)] if runs else [row.get("id")]
    parts = [words(f"{scope} {block}", min(size, num - at * size)) for at, block in enumerate(ids) if at * size < num]
    return " ".join(parts)


def _rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield msgspec.json.decode(line, type=dict[str, Any])
                    except msgspec.MsgspecError as error:
                        raise ConfigError(f"`{path}` line {number} is not a JSON object: {error}") from None
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror or error}") from None
