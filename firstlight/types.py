"""Plain data that crosses rooms: requests, step plans, step results, token events.

Nothing here has behaviour beyond checking itself; everything can be sent through a queue or a pipe.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

__all__ = [
    "CacheMiss",
    "CacheReport",
    "CoreRequest",
    "FinishReason",
    "GrammarSpec",
    "OutputDelta",
    "Pin",
    "RowResult",
    "RowSampling",
    "SamplingParams",
    "StepMasks",
    "StepPlan",
    "StepResult",
    "StepRow",
    "TokenEvent",
    "TokenLogprob",
    "Usage",
]


class FinishReason(enum.StrEnum):
    """Why a request ended. Every admitted request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like: every sampled token keeps it on a road to a text of the grammar.

    `kind` json_schema: `text` is a JSON Schema; regex: a regular expression for the whole answer (Rust's syntax);
    grammar: a context-free grammar in Lark's or GBNF's form. `preamble`, where not empty, is a Lark grammar of the
    whole answer in which `@body` stands for the rest. `field` is what error messages call it.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    preamble: str = ""
    field: str = "grammar"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose output tokens, and when to stop. `firstlight.text.params.check` raises RequestError on bad values.

    temperature 0 is greedy. `top_k` 0 is off. `logprobs` None is off, 0 gives the sampled token's own,
    k its k best rivals too. `seed` None draws one at admission. `max_tokens` None runs to the context's end.
    `logit_bias` maps token id to addend. With a `grammar`, `ignore_eos` ends the answer only where the grammar allows
    nothing else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    n: int = 1
    grammar: GrammarSpec | None = None


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt left what the prefix cache had, and why.

    "diverged": the most similar cached prompt has another token at `first_token`; "evicted": the block that begins
    there was cached and has made room for others; "not_cached": nothing that was cached goes on from there.
    """

    first_token: int
    reason: Literal["diverged", "evicted", "not_cached"]


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one request's prompt; token counts."""

    hit_tokens: int
    loaded_tokens: int = 0
    """Among them, those that were brought back from host memory or disk for this request."""
    miss: CacheMiss | None = None
    """None where every full block was cached."""
    pinned_tokens: int = 0
    """Leading tokens that this request asked to pin and that are pinned."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Asks that the KV of a prompt's first `num_tokens` tokens is kept for `ttl_s` seconds (None: always)."""

    num_tokens: int
    ttl_s: float | None = None


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence for the core: ids only, checked, every default filled in.

    `arrival_s` is on the core's monotonic clock. `stop_ids` end the output with reason stop (EOS is among them unless
    ignored). `cache_salt` keeps tenants' prefix-cache entries apart. `max_tokens` >= 1 is resolved by the frontend.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    arrival_s: float
    priority: int = 0
    """Smaller goes first: -1 interactive, 0 standard, 1 batch."""
    deadline_s: float | None = None
    """On the core's clock: a request that was not admitted by then ends with error code "deadline_exceeded"."""
    tenant: bytes = b""
    """Who is billed for what is computed: tenants are served alike. Output lengths are learned per tenant and route."""
    route: str = ""
    cache_salt: bytes = b""
    return_logits: bool = False
    forced_ids: tuple[int, ...] = ()
    """Output ids to take in place of the sampled ones (replay, teacher forcing); logits are still computed."""
    prompt_logprobs: int | None = None
    """The first event carries the log-probabilities of the prompt's tokens but its first, with so many rivals each."""
    pooling: Literal["mean", "last"] | None = None
    """The last event carries the prompt's hidden states as one vector: their mean, or the last token's."""
    pins: tuple[Pin, ...] = ()


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the backend samples one row. The j-th sampled position of the row uses noise (seed, output_index + j).

    `history` holds every known id up to and including the first sampled position's own token, and is filled only when a
    penalty is on; the first `num_prompt` of them are the prompt. Later sampled positions extend it with the row's
    token_ids.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    output_index: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    history: list[int] = []
    num_prompt: int = 0
    mask: int = -1
    """The j-th sampled position may give only tokens of `StepPlan.masks` row `mask + j`; -1: any token."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of a step.

    Computes `token_ids`, which stand at absolute positions [start, start + len(token_ids)), writing their KV into
    `block_table` (block ids covering [0, start + len)). After each index in `sample_at` (ascending, into token_ids) one
    token is sampled; a prefill chunk that is not the prompt's last has none; drafts make several.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample_at: tuple[int, ...] = ()
    sampling: RowSampling | None = None
    return_logits: bool = False
    targets: list[int] = []
    """After its i-th token the log-probability of `targets[i]` is wanted, each at the cost of a sampled position. All
    come before the first sampled position; not together with `hidden_from`."""
    num_rivals: int = 0
    """Best tokens to name beside each target."""
    hidden_from: int = -1
    """Hidden states of its tokens from this index on are wanted, each at the cost of a sampled position; -1: none."""


class StepMasks(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed tokens of a step's constrained positions, filled by another thread while the device computes.

    `bits` is `[num_masks, (vocab + 31) // 32] uint32`, bit id % 32 of word id // 32 set for an allowed id. `ready` is
    `[num_masks] int32`: 0 until that row of `bits` is final, then 1. Who samples waits for it.
    """

    bits: Any
    ready: Any


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does: plain data from scheduler to backend."""

    step_id: int
    rows: list[StepRow]
    copy_blocks: list[tuple[int, int]] = []
    """(source, destination) block pairs copied before the rows run."""
    finished_ids: list[str] = []
    masks: StepMasks | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability (natural log) of a sampled token and its rivals in the model's own distribution.

    That is before penalties, biases, temperature and grammar: with a grammar the sampled token may be improbable, and a
    rival may be one that the grammar forbids.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled ids of one row, one per entry of `sample_at`; logits `[len(sample_at), vocab] float32` when asked.

    `hidden` where asked: `[len(token_ids) - hidden_from, hidden_size] float32`, what the head reads (after the last
    norm).
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    target_logprobs: list[TokenLogprob] = []
    """One per target of the row."""
    logits: Any = None
    hidden: Any = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave, rows in the plan's order. `run_s` is the time inside the backend."""

    step_id: int
    rows: list[RowResult]
    run_s: float
    op_times_s: dict[str, float] | None = None
    """Seconds by kind of op, where the backend was told to time them."""
    ran_alone: bool = False
    """One thread ran it, because a neighbour on the machine kept a core busy."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache: CacheReport | None = None
    """Where one sequence's prefix cache was reported."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What the core tells the frontend about one request after a step. The last event of a request has `finish` set."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    logits: Any = None
    finish: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    """What kind of error, where it is not the engine's own failure; a `code` of firstlight.errors."""
    cached_tokens: int = 0
    cache: CacheReport | None = None
    """On the last event of a request that was admitted."""
    first_scheduled_s: float | None = None
    """When the request first entered a step, on the monotonic clock; set on its first event."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """On the first event of a request that asked for them."""
    embedding: Any = None
    """`[hidden_size] float64` on the last event of a request with `pooling` that ran to its end."""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer as the frontend gives it to a caller: decoded, stop strings applied.

    `choice` is the index among the request's `n`. `text` may be empty while a code point or a possible stop is
    held back.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    logits: Any = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    error: str | None = None
    error_code: str | None = None
    """What kind of error, where it is not the engine's own failure; a `code` of firstlight.errors."""
    usage: Usage | None = None
    """On the finishing delta."""
    first_scheduled_s: float | None = None
    """When the choice first entered a step, on the monotonic clock."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """As in TokenEvent."""
    embedding: Any = None
    """As in TokenEvent."""
