"""A load of sessions at any rate, and the same load as the simulator reads it. Knows words, not the tokeniser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from firstlight.measure.workload import Session
from firstlight.simulate import Trace, TraceRequest

__all__ = ["at_rate", "trace_of", "unit_rate"]

BLOCK_SIZE = 16
TOKENS_PER_WORD = 1.3
"""Of plain English under common vocabularies; the live runs correct what this gets wrong."""
TEMPLATE_TOKENS = 20


def unit_rate(sessions: Sequence[Session]) -> list[Session]:
    """The sessions with begin times stretched to one a second on the mean; all at once if they have no times."""
    last_s = max(session.begin_s for session in sessions)
    if last_s <= 0:
        return list(sessions)
    return [replace(session, begin_s=session.begin_s * (len(sessions) - 1) / last_s) for session in sessions]


def at_rate(sessions: Sequence[Session], rate: float) -> list[Session]:
    """Sessions of `unit_rate` beginning `rate` a second; think times stay."""
    return [replace(session, begin_s=session.begin_s / rate) for session in sessions]


def trace_of(sessions: Sequence[Session], token_s: float, *, is_plain: bool, has_cache: bool) -> Trace:
    """Lengths, times and shared beginnings of what the sessions send.

    A later turn arrives when the answer before it, at `token_s` a token, and the think time have passed; an answer
    counts as text of its own. `is_plain`: synthetic words, of about one token each.
    """
    per_word = 1.0 if is_plain else TOKENS_PER_WORD
    words_per_block = max(1, round(BLOCK_SIZE / per_word))
    ids: dict[tuple[int, str], int] = {}
    requests = []
    for number, session in enumerate(sessions):
        arrival_s = session.begin_s
        history: list[str] = []
        for at, prompt in enumerate(session.prompts):
            arrival_s += session.thinks_s[at] if session.thinks_s else 0.0
            words = history + [word for message in prompt.messages for word in message["content"].split()]
            blocks, parent = [], -1
            for begin in range(0, len(words) - words_per_block + 1, words_per_block):
                parent = ids.setdefault((parent, " ".join(words[begin : begin + words_per_block])), len(ids))
                blocks.append(parent)
            length = TEMPLATE_TOKENS + round(per_word * len(words))
            requests.append(TraceRequest(arrival_s, length, prompt.max_tokens, blocks if has_cache else []))
            arrival_s += token_s * prompt.max_tokens
            if session.is_conversation:
                history = words + [f"\n{number} {at} {i}" for i in range(round(prompt.max_tokens / per_word))]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(requests, BLOCK_SIZE, len(ids))
