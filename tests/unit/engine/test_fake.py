"""The fake backend notices what it is there to notice; its sampler is the reference for others."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.backend.fake import FakeBackend, StepCost, VirtualClock
from firstlight.backend.fake.sampling import sample, uniforms
from firstlight.errors import BackendError
from firstlight.types import RowSampling, StepPlan, StepRow


def row(token_ids: list[int], start: int, table: list[int], **sampling: float) -> StepRow:
    wanted = RowSampling(
        **{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "output_index": 0} | sampling
    )
    return StepRow(
        request_id="r",
        token_ids=token_ids,
        start=start,
        block_table=table,
        sample_at=(len(token_ids) - 1,),
        sampling=wanted,
        return_logits=True,
    )


def run(backend: FakeBackend, *rows: StepRow) -> list[np.ndarray]:
    return [result.logits[0] for result in backend.run(StepPlan(step_id=1, rows=list(rows))).rows]


def test_fake_slot_never_written_is_an_error() -> None:
    backend = FakeBackend(block_size=4)
    with pytest.raises(BackendError, match="position 0 of its table holds -1"):
        run(backend, row([1], 1, [0]))


def test_fake_block_in_the_wrong_place_is_an_error() -> None:
    backend = FakeBackend(block_size=2)
    run(backend, row([1, 2, 3, 4], 0, [5, 6]))
    with pytest.raises(BackendError, match="position 0 of its table holds 2"):
        run(backend, row([9], 4, [6, 5, 7]))


def test_fake_stale_block_of_other_tokens_changes_the_answer() -> None:
    backend = FakeBackend(block_size=2)
    run(backend, row([1, 2], 0, [0]))
    (right,) = run(backend, row([3], 2, [0, 1]))
    run(backend, row([8, 2], 0, [0]))
    (wrong,) = run(backend, row([3], 2, [0, 1]))
    assert not np.array_equal(right, wrong)


def test_fake_order_of_tokens_matters() -> None:
    backend = FakeBackend(block_size=4)
    first, second = run(backend, row([1, 2, 3], 0, [0]), row([2, 1, 3], 0, [1]))
    assert not np.array_equal(first, second)


def test_fake_two_rows_writing_one_block_is_an_error() -> None:
    with pytest.raises(BackendError, match="another row of the step writes"):
        run(FakeBackend(block_size=4), row([1], 0, [0]), row([2], 0, [0]))


def test_fake_cost_advances_a_virtual_clock() -> None:
    clock = VirtualClock()
    cost = StepCost(step_s=1.0, row_s=0.1, token_s=0.01, attended_s=0.001)
    backend = FakeBackend(cost=cost, sleep=clock.advance)
    result = backend.run(StepPlan(step_id=1, rows=[row([1, 2, 3], 0, [0])]))
    assert clock() == result.run_s == pytest.approx(1.0 + 0.1 + 0.03 + 0.006)


def test_fake_fails_from_the_named_step_on() -> None:
    backend = FakeBackend(fail_at_step=2)
    run(backend, row([1], 0, [0]))
    for _ in range(2):
        with pytest.raises(BackendError, match="fail_at_step"):
            run(backend, row([1], 0, [0]))


def test_uniforms_depend_on_seed_and_index_alone_and_are_even() -> None:
    assert np.array_equal(uniforms(3, 5, 10), uniforms(3, 5, 20)[:10])
    assert not np.array_equal(uniforms(3, 5, 10), uniforms(3, 6, 10))
    assert not np.array_equal(uniforms(3, 5, 10), uniforms(4, 5, 10))
    counts = np.histogram(uniforms(1, 1, 20_000), bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150


def test_sample_frequencies_are_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    wanted = row([0], 0, [0], temperature=1.0).sampling
    assert wanted is not None
    counts = np.bincount([sample(logits, wanted, nth, []) for nth in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - [0.5, 0.3, 0.2]).max() < 0.03


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.79}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_sample_filters_leave_exactly_the_named_tokens(limits: dict[str, float], kept: set[int]) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    wanted = row([0], 0, [0], temperature=1.0, **limits).sampling
    assert wanted is not None
    assert {sample(logits, wanted, nth, []) for nth in range(600)} == kept


def test_sample_penalties_count_output_and_repetition_counts_the_prompt_too() -> None:
    logits = np.array([2.0, 1.9, 0.0], dtype=np.float32)

    def best(history: list[int], num_prompt: int, **penalties: float) -> int:
        wanted = row([0], 0, [0], num_prompt=num_prompt, **penalties).sampling
        assert wanted is not None
        return sample(logits, wanted, 0, history)

    assert best([0], 1, presence_penalty=1.0) == 0
    assert best([2, 0], 1, presence_penalty=1.0) == 1
    assert best([2, 0], 1, frequency_penalty=0.05) == 0
    assert best([2, 0, 0, 0], 1, frequency_penalty=0.05) == 1
    assert best([0], 1, repetition_penalty=1.2) == 1
