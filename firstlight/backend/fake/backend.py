"""The fake backend: no weights, real bookkeeping. Its KV is the tokens themselves, so a wrong block changes the answer.

Knows plans and slots. A slot that is read before it was written, or holds another position, is an error at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from firstlight.backend.base import BackendInfo
from firstlight.backend.fake.cost import StepCost
from firstlight.backend.fake.sampling import hash64, sample, token_logprob
from firstlight.errors import BackendError
from firstlight.types import RowResult, RowSampling, StepMasks, StepPlan, StepResult, StepRow, TokenLogprob

__all__ = ["FakeBackend"]

EMPTY = -1
MASK_WAIT_S = 30.0
HIDDEN_SIZE = 16
PREFERRED_IDS = slice(32, 127)
"""Printable ASCII for a tokenizer whose ids are bytes: answers are readable."""
PREFERENCE = 6.0
NUM_EOS_PREFERRED = 2
"""Ids 256 and 257 (bytes' end marks) are as likely as a letter, so that answers end after about a hundred tokens."""


class FakeBackend:
    """Next-token logits are a hash of every (position, token) the block table leads to.

    Args:
        cost: seconds of each step; what `sleep` does with them (time.sleep, or a VirtualClock's advance).
        fail_at_step: the n-th call of `run` (from 1) raises BackendError, and so does every later one.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        vocab_size: int = 320,
        max_model_len: int = 2048,
        max_step_tokens: int = 512,
        max_step_rows: int = 64,
        max_step_samples: int = 0,
        cost: StepCost | None = None,
        sleep: Callable[[float], None] = time.sleep,
        fail_at_step: int | None = None,
        fingerprint: bytes = b"fake",
    ) -> None:
        self._info = BackendInfo(
            name="fake",
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
            max_step_rows=max_step_rows,
            max_step_samples=max_step_samples or max_step_tokens,
            kv_bytes_per_block=block_size * 2 * 8,
            weight_bytes=0,
            num_threads=1,
            fingerprint=fingerprint,
            hidden_size=HIDDEN_SIZE,
        )
        self.num_runs = 0
        self.is_closed = False
        self._is_tracing = False
        self._cost = cost
        self._sleep = sleep
        self._fail_at_step = fail_at_step
        self._kv = np.full((num_blocks, block_size, 2), EMPTY, dtype=np.int64)  # [block, slot, (position, token)]
        self._vocab_words = hash64(np.arange(vocab_size, dtype=np.uint64))
        self._preference = np.zeros(vocab_size, dtype=np.float32)
        self._preference[PREFERRED_IDS] = PREFERENCE
        self._preference[256 : 256 + NUM_EOS_PREFERRED] = PREFERENCE

    @property
    def info(self) -> BackendInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step; writes every row's KV before any row reads."""
        begin = time.perf_counter()
        self.num_runs += 1
        if self._fail_at_step is not None and self.num_runs >= self._fail_at_step:
            raise BackendError(f"step {plan.step_id} failed because `fail_at_step` is {self._fail_at_step}")
        self._validate(plan)
        for source, target in plan.copy_blocks:
            self._kv[target] = self._kv[source]
        for row in plan.rows:
            self._write(row)
        rows = [self._row_result(row, plan.masks) for row in plan.rows]
        run_s = time.perf_counter() - begin
        if self._cost is not None:
            run_s = self._cost.of(plan)
            self._sleep(run_s)
        op_times_s = {"fake": run_s} if self._is_tracing else None
        return StepResult(step_id=plan.step_id, rows=rows, run_s=run_s, op_times_s=op_times_s)

    def trace_ops(self, on: bool) -> None:
        self._is_tracing = on

    def read_blocks(self, block_ids: list[int]) -> bytes:
        return self._kv[block_ids].tobytes()

    def write_blocks(self, block_ids: list[int], data: bytes) -> None:
        wanted = len(block_ids) * self._info.kv_bytes_per_block
        if len(data) != wanted:
            raise BackendError(f"`data` is {len(data)} bytes, {len(block_ids)} blocks take {wanted}")
        self._kv[block_ids] = np.frombuffer(data, dtype=np.int64).reshape(len(block_ids), self._info.block_size, 2)

    def close(self) -> None:
        self.is_closed = True

    def _validate(self, plan: StepPlan) -> None:
        """Raises BackendError where the plan breaks a limit, a table is too short, or two rows write the same block."""
        info = self._info
        written: set[int] = set()
        if self.is_closed:
            raise BackendError("the backend is closed")
        if not 0 < len(plan.rows) <= info.max_step_rows:
            raise BackendError(f"step of {len(plan.rows)} rows, limit 1..{info.max_step_rows}")
        if (num := sum(len(row.token_ids) for row in plan.rows)) > info.max_step_tokens:
            raise BackendError(f"step of {num} tokens, limit {info.max_step_tokens}")
        if (num := sum(_num_sampled(row) for row in plan.rows)) > info.max_step_samples:
            raise BackendError(f"step of {num} sampled positions, limit {info.max_step_samples}")
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            if (
                not row.token_ids
                or row.start < 0
                or end > min(len(row.block_table) * info.block_size, info.max_model_len)
            ):
                raise BackendError(
                    f"row {row.request_id}: positions {row.start}..{end} do not fit its table or the context"
                )
            if not 0 <= min(row.token_ids) <= max(row.token_ids) < info.vocab_size:
                raise BackendError(f"row {row.request_id}: a token id outside 0..{info.vocab_size - 1}")
            if not 0 <= min(row.block_table) <= max(row.block_table) < info.num_blocks:
                raise BackendError(f"row {row.request_id}: a block id outside 0..{info.num_blocks - 1}")
            if bool(row.sample_at) != (row.sampling is not None) or any(i >= len(row.token_ids) for i in row.sample_at):
                raise BackendError(
                    f"row {row.request_id}: `sample_at` {row.sample_at} and `sampling` do not go together"
                )
            if len(row.targets) > (row.sample_at[0] if row.sample_at else len(row.token_ids)):
                raise BackendError(f"row {row.request_id}: more targets than tokens before the first sampled position")
            blocks = set(row.block_table[row.start // info.block_size : -(-end // info.block_size)])
            if blocks & written:
                raise BackendError(f"row {row.request_id} writes a block that another row of the step writes")
            written |= blocks

    def _write(self, row: StepRow) -> None:
        size = self._info.block_size
        positions = np.arange(row.start, row.start + len(row.token_ids))
        table = np.array(row.block_table)
        self._kv[table[positions // size], positions % size] = np.stack([positions, row.token_ids], axis=1)

    def _read(self, row: StepRow, num: int) -> npt.NDArray[np.uint64]:
        """The row's first `num` tokens, through its table. Raises BackendError for a slot of another position."""
        table = np.array(row.block_table[: -(-num // self._info.block_size)])
        slots = self._kv[table].reshape(-1, 2)[:num]
        wrong = np.nonzero(slots[:, 0] != np.arange(num))[0]
        if len(wrong):
            raise BackendError(f"row {row.request_id}: position {wrong[0]} of its table holds {slots[wrong[0], 0]}")
        tokens: npt.NDArray[np.uint64] = slots[:, 1].astype(np.uint64)
        return tokens

    def _row_result(self, row: StepRow, masks: StepMasks | None) -> RowResult:
        if row.sampling is None:
            self._read(row, row.start + len(row.token_ids))
            scored = self._scored(row)
            return RowResult(request_id=row.request_id, token_ids=[], target_logprobs=scored, hidden=self._hidden(row))
        logits = np.stack([self._logits(row, row.start + i + 1) for i in row.sample_at])
        ids: list[int] = []
        for nth, i in enumerate(row.sample_at):
            history = _history(row, row.sampling, i)
            allowed = self._allowed(masks, row.sampling.mask + nth) if row.sampling.mask >= 0 else None
            ids.append(sample(logits[nth], row.sampling, nth, history, allowed))
        logprobs: list[TokenLogprob] | None = None
        if (num_top := row.sampling.logprobs) is not None:
            logprobs = [token_logprob(logits[nth], token, num_top) for nth, token in enumerate(ids)]
        return RowResult(
            request_id=row.request_id,
            token_ids=ids,
            logprobs=logprobs,
            target_logprobs=self._scored(row),
            logits=logits if row.return_logits else None,
            hidden=self._hidden(row),
        )

    def _scored(self, row: StepRow) -> list[TokenLogprob]:
        """The log-probability of each of the row's targets."""
        return [
            token_logprob(self._logits(row, row.start + at + 1), target, row.num_rivals)
            for at, target in enumerate(row.targets)
        ]

    def _allowed(self, masks: StepMasks | None, at: int) -> npt.NDArray[np.bool_]:
        """`[vocab] bool` of one mask, once it is ready. Raises BackendError when it never is."""
        if masks is None or not 0 <= at < len(masks.ready):
            raise BackendError(f"a row asks for mask {at}, which the step does not have")
        give_up = time.monotonic() + MASK_WAIT_S
        while not masks.ready[at]:
            if time.monotonic() > give_up:
                raise BackendError(f"mask {at} was not ready {MASK_WAIT_S:.0f} s after its logits")
            time.sleep(2e-5)
        bits = np.unpackbits(masks.bits[at].view(np.uint8), bitorder="little")
        return bits[: self._info.vocab_size].astype(np.bool_)

    def _hidden(self, row: StepRow) -> npt.NDArray[np.float32] | None:
        """`[tokens, HIDDEN_SIZE] float32` where asked, each row a hash of all tokens up to it, in -1..1."""
        if row.hidden_from < 0:
            return None
        end = row.start + len(row.token_ids)
        words = hash64(np.bitwise_xor(hash64(np.arange(end, dtype=np.uint64)), hash64(self._read(row, end))))
        states = words.cumsum(dtype=np.uint64)[row.start + row.hidden_from :]
        parts = hash64(states[:, None] ^ hash64(np.arange(HIDDEN_SIZE, dtype=np.uint64))) >> np.uint64(40)
        hidden: npt.NDArray[np.float32] = parts.astype(np.float32) / np.float32(2**23) - np.float32(1)
        return hidden

    def _logits(self, row: StepRow, num: int) -> npt.NDArray[np.float32]:
        """`[vocab] float32` after the row's first `num` tokens: a wrapping sum of one word per position."""
        tokens = self._read(row, num)
        places = hash64(np.arange(num, dtype=np.uint64))
        state = hash64(np.bitwise_xor(places, hash64(tokens))).sum(dtype=np.uint64)
        words = hash64(self._vocab_words ^ state) >> np.uint64(40)
        logits: npt.NDArray[np.float32] = (words.astype(np.float32) / np.float32(2**21)) + self._preference
        return logits


def _num_sampled(row: StepRow) -> int:
    if row.hidden_from >= 0:
        return len(row.token_ids) - row.hidden_from
    return len(row.sample_at) + len(row.targets)


def _history(row: StepRow, sampling: RowSampling, i: int) -> list[int]:
    """The ids known up to the row's token `i`, where a penalty wants them."""
    if not sampling.history:
        return []
    return sampling.history + row.token_ids[row.sample_at[0] + 1 : i + 1]
