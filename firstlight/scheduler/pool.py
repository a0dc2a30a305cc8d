"""One vector from the hidden states of a prompt, the same bits however the prompt was cut into chunks."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Pool"]


class Pool:
    """What one request's chunks have given so far. Written by the scheduler alone."""

    def __init__(self, kind: Literal["mean", "last"]) -> None:
        self._kind = kind
        self._sum: npt.NDArray[np.float64] | None = None
        self._num = 0

    @property
    def needs_every_token(self) -> bool:
        """None of the prompt may be skipped."""
        return self._kind == "mean"

    def first_of(self, num_tokens: int, *, is_last: bool) -> int:
        """From which token of a chunk on hidden states are needed; -1: of none."""
        if self.needs_every_token:
            return 0
        return num_tokens - 1 if is_last else -1

    def add(self, start: int, hidden: npt.NDArray[np.float32]) -> None:
        """Takes one chunk, `[num_tokens, hidden_size]`, that begins at position `start`.

        Token by token in float64, so that the order of additions does not know where a chunk ended. A chunk at 0 begins
        anew: its request was preempted.
        """
        if self._kind == "last" or start == 0 or self._sum is None:
            self._sum, self._num = np.zeros(hidden.shape[1], np.float64), 0
        for row in hidden:
            self._sum += row
        self._num += len(hidden)

    def vector(self) -> npt.NDArray[np.float64] | None:
        """`[hidden_size]`; None before the first chunk."""
        return None if self._sum is None else self._sum / self._num
