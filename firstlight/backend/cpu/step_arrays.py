"""A plan's rows as the flat arrays that one native call takes. Knows plans and arrays; not weights or KV blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from firstlight.errors import BackendError
from firstlight.types import RowSampling, StepMasks, StepRow

__all__ = ["StepArrays", "num_unseen", "only_hidden"]

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]
_NativeMasks = tuple[npt.NDArray[np.uint32], _Ints, _Ints] | tuple[()]
_NativeInputs = tuple[_Ints, _Ints, _Ints, _Ints, _Floats, _Ints, npt.NDArray[np.uint64], _Ints, _Floats, _Ints]

_UNSEEN = RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, output_index=0)
"""How positions are sampled whose token nobody asks for."""
_CERTAIN = 1e30
"""A bias that beats every logit: the token that is taken greedily is the one whose logprob is wanted (logprobs are from
before biases)."""


def only_hidden(row: StepRow) -> tuple[int, ...]:
    """The row's tokens that go through the head only because their hidden state is wanted; before those sampled."""
    if row.hidden_from < 0:
        return ()
    return tuple(range(row.hidden_from, row.sample_at[0] if row.sample_at else len(row.token_ids)))


def num_unseen(row: StepRow) -> int:
    """Positions of the row that go through the head without a token being sampled there; they come first."""
    return len(only_hidden(row)) + len(row.targets)


class StepArrays:
    """The rows of a plan as flat arrays for the native call."""

    def __init__(self, rows: list[StepRow]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        tables: list[int] = []
        native_rows: list[int] = []
        self.samples: list[int] = []
        self.floats: list[float] = []
        self.ints: list[int] = []
        self.seeds: list[int] = []
        self.bias_ids: list[int] = []
        self.bias_values: list[float] = []
        self.histories: list[int] = []
        self.sample_masks: list[int] = []
        self.num_top = 0
        for row in rows:
            first, count = len(tokens), len(row.token_ids)
            native_rows += (first, count, row.start, len(tables))
            tokens += row.token_ids
            positions += range(row.start, row.start + count)
            tables += row.block_table
            if unseen := only_hidden(row):
                self._add_samples(msgspec.structs.replace(row, sample_at=unseen), _UNSEEN, first)
            for at, target in enumerate(row.targets):
                certain = msgspec.structs.replace(_UNSEEN, logit_bias={target: _CERTAIN}, logprobs=row.num_rivals)
                self._add_samples(msgspec.structs.replace(row, sample_at=(at,)), certain, first)
            if row.sample_at:
                if row.sampling is None:
                    raise BackendError(f"row `{row.request_id}` samples without sampling parameters")
                self._add_samples(row, row.sampling, first)
        self._tokens = np.array(tokens, np.int32)
        self._positions = np.array(positions, np.int32)
        self._tables = np.array(tables, np.int32)
        self._rows = np.array(native_rows, np.int32).reshape(-1, 4)

    def _add_samples(self, row: StepRow, sampling: RowSampling, first: int) -> None:
        bias_begin, bias_count = len(self.bias_ids), len(sampling.logit_bias)
        self.bias_ids += sampling.logit_bias.keys()
        self.bias_values += sampling.logit_bias.values()
        num_logprobs = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_top = max(self.num_top, num_logprobs)
        for j, at in enumerate(row.sample_at):
            if not 0 <= at < len(row.token_ids):
                raise BackendError(
                    f"row `{row.request_id}` samples after token {at}, it has {len(row.token_ids)} tokens"
                )
            history = sampling.history
            if history and j:  # later positions have also seen the row's tokens up to their own
                history = history + row.token_ids[row.sample_at[0] + 1 : at + 1]
            self.samples.append(first + at)
            self.floats += (
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
            )
            self.ints += (
                first + at,
                sampling.top_k,
                sampling.output_index + j,
                num_logprobs,
                sampling.num_prompt,
                bias_begin,
                bias_count,
                len(self.histories),
                len(history),
            )
            self.sample_masks.append(sampling.mask + j if sampling.mask >= 0 else -1)
            self.seeds.append(sampling.seed & 0xFFFFFFFFFFFFFFFF)
            self.histories += history

    def masks(self, masks: StepMasks | None) -> _NativeMasks:
        """The last arguments of Runner.run where the step has masks, else none."""
        return () if masks is None else (masks.bits, np.array(self.sample_masks, np.int32), masks.ready)

    def native(self) -> _NativeInputs:
        """The input arguments of Runner.run, in its order."""
        return (
            self._tokens,
            self._positions,
            self._rows,
            self._tables,
            np.array(self.floats, np.float32).reshape(-1, 6),
            np.array(self.ints, np.int32).reshape(-1, 9),
            np.array(self.seeds, np.uint64),
            np.array(self.bias_ids, np.int32),
            np.array(self.bias_values, np.float32),
            np.array(self.histories, np.int32),
        )
