"""Whether drafts pay: how likely each is to stand, and what a step that checks it costs on this machine.

A step's weights are read once, however many tokens it computes, so that a second token of a lone stream is nearly free
and a third one is not. Which is which is learned from the steps themselves, as is how often a guess is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstlight.scheduler.lookup import MAX_MATCH, Lookup
from firstlight.scheduler.state import RequestState
from firstlight.scheduler.steptime import StepLoad, StepTimeModel

__all__ = ["MAX_STREAMS", "Speculation"]

MAX_STREAMS = 4
"""With more of them a step's arithmetic is what it costs, and drafts are more of it."""
MAX_DRAFTS = 8
"""In one step, over all streams."""
MIN_GAIN = 0.02
"""Of time per token, below which a step goes without drafts."""
FIRST_GUESS = (0.0, 0.25, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
"""How often a guess is right, by the length of the match, before anything was seen; it counts as GUESS_TRIALS."""
GUESS_TRIALS = 4.0
REQUEST_TRIALS = 4.0
"""As how many right guesses it counts that a request is like the others."""
FADING = 0.995
"""Weight of a trial against the next one of its length: about the last 200 count."""
COST_PACE, MAX_COST_ERROR = 0.1, 0.3
COST_RETURN = 0.01
"""What a cost that was found too high goes back towards the model's, each time that it is why nothing is drafted."""


@dataclass(slots=True)
class _Guess:
    """What may follow in one stream."""

    tokens: list[int]
    match: int
    chances: list[float]
    """That the first one stands, the first two, and so on."""


@dataclass(slots=True)
class _Luck:
    """How one request's guesses do."""

    lookup: Lookup
    right: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.right + REQUEST_TRIALS) / (self.expected + REQUEST_TRIALS)


class Speculation:
    """`draft` when a step of streams is planned, `learned` for each of them when it is absorbed, `ran` for the step.

    Guesses that are not worth a draft are compared with what came all the same, so that it notices when they are.
    """

    def __init__(self, step_time: StepTimeModel, slo_s: float = 0.0) -> None:
        self._step_time = step_time
        self._slo_s = slo_s
        self._right = [chance * GUESS_TRIALS for chance in FIRST_GUESS]
        self._trials = [GUESS_TRIALS] * len(FIRST_GUESS)
        self._costs: dict[tuple[int, int], float] = {}
        """By rows and drafts: run time over the model's, which knows no steps in the cost of a token."""
        self._guesses: dict[str, _Guess] = {}
        self._luck: dict[str, _Luck] = {}

    def draft(self, streams: Sequence[RequestState], load: StepLoad, most: int) -> dict[str, list[int]]:
        """Drafts by request, at most `most` in all, for a step that computes `load` without any.

        Mutates: forgets the guesses of the step before.
        """
        self._guesses = {s.id: guess for s in streams if (guess := self._guess(s, min(most, MAX_DRAFTS))) is not None}
        ranked = sorted(
            ((chance, -j, id) for id, guess in self._guesses.items() for j, chance in enumerate(guess.chances)),
            reverse=True,
        )[: min(most, MAX_DRAFTS)]
        num = self._best(load, [chance for chance, _, _ in ranked])
        drafts: dict[str, list[int]] = {}
        for _, at, id in ranked[:num]:
            drafts.setdefault(id, []).append(self._guesses[id].tokens[-at])
        return drafts

    def pause(self) -> None:
        """The next step goes without guesses."""
        self._guesses.clear()

    def _guess(self, state: RequestState, most: int) -> _Guess | None:
        most = min(most, state.max_drafts)
        if most <= 0 or state.request.params.grammar is not None or state.pool is not None:
            return None
        luck = self._luck.get(state.id)
        if luck is None:
            luck = self._luck[state.id] = _Luck(Lookup(state.tokens))
        at, match = luck.lookup.find(state.tokens)
        if match == 0:
            return None
        tokens = state.tokens[at : at + most]
        chances, chance = [], 1.0
        for j in range(len(tokens)):
            length = min(match + j, MAX_MATCH)
            chance *= min(0.98, self._right[length] / self._trials[length] * luck.factor)
            chances.append(chance)
        return _Guess(tokens, match, chances)

    def _best(self, load: StepLoad, chances: Sequence[float]) -> int:
        """How many of the drafts, most likely first, give the least time per token."""
        alone_s = self._cost_s(load, 0)
        best, least_s = 0, alone_s / load.rows * (1 - MIN_GAIN)
        num_tokens = float(load.rows)
        for num, chance in enumerate(chances, 1):
            num_tokens += chance
            cost_s = self._cost_s(load, num)
            if self._slo_s and cost_s > max(self._slo_s, alone_s):
                break
            if cost_s / num_tokens < least_s:
                best, least_s = num, cost_s / num_tokens
        if best == 0 and chances:
            self._doubt((load.rows, 1))
        return best

    def _doubt(self, key: tuple[int, int]) -> None:
        """What was found to cost much may have been measured at a bad moment."""
        cost = self._costs.get(key, 1.0)
        if cost > 1:
            self._costs[key] = cost + COST_RETURN * (1 - cost)

    def _cost_s(self, load: StepLoad, num_drafts: int) -> float:
        return self._step_time.predict_s(_with(load, num_drafts)) * self._costs.get((load.rows, num_drafts), 1.0)

    def learned(self, request_id: str, new: Sequence[int]) -> None:
        """What was sampled for a stream, up to the first draft that did not stand."""
        guess = self._guesses.get(request_id)
        if guess is None:
            return
        luck = self._luck[request_id]
        for j, (guessed, token) in enumerate(zip(guess.tokens, new, strict=False)):
            length = min(guess.match + j, MAX_MATCH)
            luck.expected = FADING * luck.expected + self._right[length] / self._trials[length]
            luck.right *= FADING
            self._trials[length] = FADING * self._trials[length] + 1
            self._right[length] *= FADING
            if guessed != token:
                return
            self._right[length] += 1
            luck.right += 1

    def ran(self, load: StepLoad, num_drafts: int, run_s: float) -> None:
        """A step of streams alone took `run_s`; `load` has its drafts in it.

        A step with drafts teaches the model only the machine's pace: its costs would bend the line between the others.
        """
        if run_s <= 0:
            return
        key = (load.rows, num_drafts)
        modelled_s = self._step_time.predict_s(load)
        cost = self._costs.get(key)
        if num_drafts > 0 and cost is not None:
            self._step_time.follow(run_s, modelled_s * cost)
        if cost is None:
            self._costs[key] = max(0.5, min(2.0, run_s / modelled_s))
            return
        error = run_s / (modelled_s * cost) - 1
        moved = cost * (1 + COST_PACE * max(-MAX_COST_ERROR, min(MAX_COST_ERROR, error)))
        self._costs[key] = max(0.3, min(3.0, moved))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._luck.pop(request_id, None)
        self._guesses.pop(request_id, None)


def _with(load: StepLoad, num_drafts: int) -> StepLoad:
    """The load and some drafts, which stand after the contexts its rows have on average."""
    context = load.context // load.rows
    return replace(
        load,
        tokens=load.tokens + num_drafts,
        context=load.context + num_drafts,
        attended=load.attended + num_drafts * context,
    )
