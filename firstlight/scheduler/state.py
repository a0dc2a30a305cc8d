"""What the scheduler knows of one request: known tokens, computed tokens, blocks, where it stands."""

from __future__ import annotations

import enum

from firstlight.cache import BlockTable, LoadTicket
from firstlight.scheduler.pool import Pool
from firstlight.types import CacheMiss, CacheReport, CoreRequest, FinishReason, RowSampling, TokenLogprob

__all__ = ["RequestState", "Status"]


class Status(enum.Enum):
    """Where a request stands. Waiting and preempted ones hold no blocks; ended ones are forgotten."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDED = "ended"


class RequestState:
    """One request from admission to its end. Written by the scheduler alone.

    Invariants:
        0 <= num_computed < len(tokens) while it is open: there is always something left to compute.
        DECODE exactly when all but the last known token are computed and at least one is output.
    """

    __slots__ = (
        "awaited_key",
        "cache_miss",
        "cached_tokens",
        "expected_output",
        "first_scheduled_s",
        "has_penalty",
        "high_water",
        "loaded_tokens",
        "max_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "pinned_tokens",
        "pool",
        "prompt_logprobs",
        "rank",
        "request",
        "status",
        "table",
        "tickets",
        "tokens",
        "was_reported",
    )

    def __init__(self, request: CoreRequest, table: BlockTable) -> None:
        params = request.params
        self.request = request
        self.table = table
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.cached_tokens = 0
        self.awaited_key: bytes | None = None
        """The first block's key it lacked when last looked up."""
        self.cache_miss: CacheMiss | None = None
        self.pinned_tokens = 0
        self.loaded_tokens = 0
        self.tickets: list[LoadTicket] = []
        """Loads that it has waited for since it began to wait."""
        self.num_preemptions = 0
        self.high_water = 0
        """The most tokens it ever had computed; below that, work is done again."""
        self.expected_output = 0
        """Output tokens set aside for it in all; 0: not asked yet."""
        self.pool = Pool(request.pooling) if request.pooling is not None else None
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's tokens from its second on, as far as they are known."""
        self.first_scheduled_s: float | None = None
        self.was_reported = False
        self.status = Status.WAITING
        self.max_tokens = request.max_tokens
        self.rank: tuple[int, int, float, int] = (request.priority, 1, 0.0, 0)
        self.has_penalty = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def gap(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def max_drafts(self) -> int:
        """Drafts of which each could still become output."""
        return self.max_tokens - self.num_output - 1

    @property
    def samples_every_token(self) -> bool:
        """Each token of its next chunk takes a sampled position."""
        return (self.pool is not None and self.pool.needs_every_token) or self._wants_targets

    @property
    def _wants_targets(self) -> bool:
        return self.request.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def targets(self, num: int) -> list[int]:
        """The prompt's tokens that follow on each of its next `num` tokens, where their logprobs are still wanted.

        Mutates: begins anew at position 0, because its request was preempted.
        """
        if not self._wants_targets:
            return []
        if self.num_computed == 0:
            self.prompt_logprobs = []
        return self.request.prompt_ids[self.num_computed + 1 : self.num_computed + num + 1]

    @property
    def is_loading(self) -> bool:
        """It waits for a load."""
        return bool(self.tickets) and not self.tickets[-1].is_done

    def cache_report(self) -> CacheReport | None:
        """What the prefix cache did for it; None before it was admitted."""
        if self.first_scheduled_s is None:
            return None
        return CacheReport(
            hit_tokens=self.cached_tokens,
            loaded_tokens=self.loaded_tokens,
            miss=self.cache_miss,
            pinned_tokens=self.pinned_tokens,
        )

    def sampling(self) -> RowSampling:
        """How to sample right after the last known token. `history` is the live list: read it before `absorb`."""
        params = self.request.params
        return RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=self.request.seed,
            output_index=len(self.tokens) - self.num_prompt,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            logprobs=params.logprobs,
            history=self.tokens if self.has_penalty else [],
            num_prompt=self.num_prompt,
        )

    def forced(self, sampled: list[int]) -> list[int]:
        """The sampled ids, those replaced that the request came with."""
        forced, at = self.request.forced_ids, self.num_output
        if at >= len(forced):
            return sampled
        forced = forced[at : at + len(sampled)]
        return [*forced, *sampled[len(forced) :]]

    def cut_at_end(self, new: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the one that ends the request, and why it ends."""
        for i, token in enumerate(new):
            if token in self.request.stop_ids:
                return new[: i + 1], FinishReason.STOP
            if self.num_output + i + 1 >= self.max_tokens:
                return new[: i + 1], FinishReason.LENGTH
        return new, None
