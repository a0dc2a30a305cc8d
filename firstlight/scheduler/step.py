"""A step while it is planned, and until its result is absorbed. Knows rows and the requests they belong to."""

from __future__ import annotations

from firstlight.measure.causes import StepShare
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.state import RequestState
from firstlight.scheduler.steptime import StepLoad
from firstlight.types import StepRow

__all__ = ["PlannedStep"]


class PlannedStep:
    """Rows side by side with the requests and drafts they came from. Written by the scheduler."""

    def __init__(self) -> None:
        self.load = StepLoad()
        self.rows: list[StepRow] = []
        self.states: list[RequestState] = []
        self.drafts: list[list[int]] = []
        self.num_drafts = 0
        self.num_sampled = 0
        """Positions whose hidden states the step gathers."""
        self.prefill_ids: set[str] = set()
        self.refusal = ""
        """Why the first waiting request that was looked at was not admitted."""
        self.held: list[tuple[str, str]] = []
        """Waiting requests that are passed over, and whether for "prefix" or "load"."""

    def add(self, state: RequestState, token_ids: list[int], drafts: list[int]) -> None:
        """One more row: `token_ids` from where the request stands, of which the last ones are `drafts`."""
        num_known = len(token_ids) - len(drafts)
        samples = state.num_computed + num_known == len(state.tokens)
        hidden_from = -1 if state.pool is None else state.pool.first_of(len(token_ids), is_last=samples)
        targets = state.targets(len(token_ids))
        self.rows.append(
            StepRow(
                request_id=state.id,
                token_ids=token_ids,
                start=state.num_computed,
                block_table=state.table.blocks,
                sample_at=tuple(range(num_known - 1, len(token_ids))) if samples else (),
                sampling=state.sampling() if samples else None,
                return_logits=state.request.return_logits and samples,
                targets=targets,
                num_rivals=state.request.prompt_logprobs or 0,
                hidden_from=hidden_from,
            )
        )
        if hidden_from >= 0:
            self.num_sampled += len(token_ids) - hidden_from
        else:
            self.num_sampled += len(self.rows[-1].sample_at) + len(targets)
        self.states.append(state)
        self.drafts.append(drafts)
        self.num_drafts += len(drafts)
        self.load.add(state.num_computed, len(token_ids))

    def add_chunk(self, state: RequestState, num: int) -> None:
        """One more row: the next `num` tokens of a prompt."""
        self.add(state, state.tokens[state.num_computed : state.num_computed + num], [])
        self.prefill_ids.add(state.id)

    def spare_samples(self, limits: SchedulerLimits) -> int:
        """Sampled positions that one more row may take, when every row that may still come keeps one."""
        samples = limits.max_step_samples or limits.max_step_tokens
        return samples - self.num_sampled - (limits.max_step_rows - len(self.rows) - 1)

    def shares(self) -> tuple[StepShare, ...]:
        """Whose rows are in it."""
        prefill_ids = self.prefill_ids
        return tuple(
            StepShare(row.request_id, row.start, len(row.token_ids), row.request_id in prefill_ids) for row in self.rows
        )
