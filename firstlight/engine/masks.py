"""Token masks of constrained requests, computed on a thread of their own while the device works.

Knows requests, plans and events, not how they are scheduled. A request's grammar moves on by the tokens of its events
alone, so neither its batch nor a preemption can change its masks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from firstlight.text.grammar import Bits, GrammarCompiler, GrammarState, mask_words
from firstlight.types import CoreRequest, StepMasks, StepPlan, StepRow, TokenEvent

__all__ = ["MaskWorker"]

log = logging.getLogger(__name__)

_ALL = np.uint32(0xFFFFFFFF)


class _Constraint:
    """One open request's grammar. All but `error` is the worker's alone; the core reads `error` between steps."""

    def __init__(self, request: CoreRequest) -> None:
        assert request.params.grammar is not None
        self.spec = request.params.grammar
        self.ignores_eos = request.params.ignore_eos
        self.error: str | None = None
        self.state: GrammarState | None = None
        self.bits: Bits | None = None
        """What may come next, once it is computed."""


class MaskWorker:
    """Owns the grammar states of one core's requests.

    The core calls `open`, `attach` (a plan gets the arrays its masks will be in), `absorb` (the tokens that came) and
    `forget`; each only notes work for the thread, which begins on the next mask as soon as its token is known.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._words = mask_words(compiler.vocab_size)
        self._open: dict[str, _Constraint] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, request: CoreRequest) -> None:
        """Takes note of a request; one without a grammar costs nothing here."""
        if request.params.grammar is None:
            return
        self._open[request.request_id] = _Constraint(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="firstlight-masks", daemon=True)
            self._thread.start()

    def attach(self, plan: StepPlan) -> StepPlan:
        """The plan with masks for its constrained rows; they are filled in while it runs."""
        if not self._open:
            return plan
        rows, orders, num = list(plan.rows), [], 0
        for at, row in enumerate(rows):
            constraint = self._open.get(row.request_id)
            if constraint is None or row.sampling is None:
                continue
            rows[at] = msgspec.structs.replace(row, sampling=msgspec.structs.replace(row.sampling, mask=num))
            orders.append((constraint, num, _drafts(row)))
            num += len(row.sample_at)
        if not orders:
            return plan
        masks = StepMasks(bits=np.empty((num, self._words), np.uint32), ready=np.zeros(num, np.int32))
        self._jobs.put(lambda: self._fill(orders, masks))
        return msgspec.structs.replace(plan, rows=rows, masks=masks)

    def absorb(self, events: Sequence[TokenEvent]) -> dict[str, str]:
        """Moves the grammars on by what a step gave. Returns: the requests whose grammar failed in it, and why."""
        failed: dict[str, str] = {}
        moved: list[tuple[_Constraint, list[int]]] = []
        for event in events if self._open else ():
            constraint = self._open.get(event.request_id)
            if constraint is None:
                continue
            if constraint.error is not None:
                failed[event.request_id] = constraint.error
            elif event.finish is None:
                moved.append((constraint, event.token_ids))
        if moved:
            self._jobs.put(lambda: self._advance(moved))
        return failed

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is known of ended requests."""
        if self._open:
            for request_id in request_ids:
                self._open.pop(request_id, None)

    def close(self) -> None:
        """Ends the thread after the work that was noted. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    # -- the worker's thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _advance(self, moved: list[tuple[_Constraint, list[int]]]) -> None:
        for constraint, tokens in moved:
            self._guarded(constraint, partial(self._next, constraint, tokens))

    def _next(self, constraint: _Constraint, tokens: list[int]) -> None:
        """Moves a grammar and computes its next mask; the first call starts it."""
        state = constraint.state
        if state is None or constraint.bits is None:
            compiled = self._compiler.compile(constraint.spec)
            state = constraint.state = compiled.start(ignores_eos=constraint.ignores_eos)
            constraint.bits = np.empty(self._words, np.uint32)
        state.advance(tokens)
        state.fill(constraint.bits)
        constraint.error = state.error

    def _fill(self, orders: list[tuple[_Constraint, int, list[int]]], masks: StepMasks) -> None:
        for constraint, first, drafts in orders:
            last = first + 1 + len(drafts)
            self._guarded(constraint, partial(self._copy, constraint, drafts, masks.bits[first:last]))
            if constraint.error is not None:
                masks.bits[first:last] = _ALL  # anything: what is sampled here is dropped
            masks.ready[first:last] = 1

    def _copy(self, constraint: _Constraint, drafts: list[int], out: Bits) -> None:
        if constraint.state is None:
            self._next(constraint, [])
        assert constraint.state is not None
        assert constraint.bits is not None
        out[0] = constraint.bits
        if drafts:
            constraint.state.fill_drafts(drafts, out[1:])
            constraint.error = constraint.state.error

    def _guarded(self, constraint: _Constraint, work: Callable[[], None]) -> None:
        """Does the work for one request; whatever fails there ends that request and no other."""
        if constraint.error is not None:
            return
        try:
            work()
        except BaseException as error:  # a panic of the library is no Exception
            log.error("grammar_failed error=%r", error, exc_info=error)
            constraint.error = f"{type(error).__name__}: {error}"


def _drafts(row: StepRow) -> list[int]:
    """The tokens behind the first sampled position: they are guesses."""
    return row.token_ids[row.sample_at[0] + 1 :]
