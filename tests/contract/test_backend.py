"""What every backend owes the engine: the same answer, to the bit, by whatever road it is asked for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from firstlight.backend.base import Backend
from firstlight.backend.fake.sampling import sample
from firstlight.cache import KVCache
from firstlight.config import EngineConfig
from firstlight.errors import BackendError
from firstlight.scheduler import Scheduler, SchedulerLimits, StepTimeModel
from firstlight.types import (
    CoreRequest,
    RowResult,
    RowSampling,
    SamplingParams,
    StepMasks,
    StepPlan,
    StepRow,
)
from tests.contract.conftest import CONTEXT, MakeBackend

Logits = npt.NDArray[np.float32]
BLOCK = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "output_index": 0}


def row(
    token_ids: Sequence[int],
    start: int,
    table: Sequence[int],
    *,
    sample_at: Sequence[int] = (),
    name: str = "r",
    **sampling: Any,
) -> StepRow:
    return StepRow(
        request_id=name,
        token_ids=list(token_ids),
        start=start,
        block_table=list(table),
        sample_at=tuple(sample_at),
        sampling=RowSampling(**GREEDY | sampling) if sample_at else None,
        return_logits=bool(sample_at),
    )


def run(backend: Backend, *rows: StepRow, copy_blocks: Sequence[tuple[int, int]] = ()) -> list[RowResult]:
    result = backend.run(StepPlan(step_id=7, rows=list(rows), copy_blocks=list(copy_blocks)))
    assert result.step_id == 7
    assert [got.request_id for got in result.rows] == [wanted.request_id for wanted in rows]
    assert [len(got.token_ids) for got in result.rows] == [len(wanted.sample_at) for wanted in rows]
    assert result.run_s > 0
    return result.rows


def all_logits(backend: Backend, tokens: Sequence[int], table: Sequence[int], chunks: Sequence[int]) -> Logits:
    """Logits after every token, `[len(tokens), vocab]`, computed in chunks of the given sizes (the last repeats)."""
    parts, start, sizes = [], 0, list(chunks)
    while start < len(tokens):
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - start)
        (got,) = run(backend, row(tokens[start : start + size], start, table, sample_at=range(size)))
        parts.append(got.logits)
        start += size
    return np.concatenate(parts)


def prompt(backend: Backend, num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(backend.info.vocab_size) for _ in range(num)]


def scattered(backend: Backend, num_tokens: int, seed: int) -> list[int]:
    """A table of random blocks."""
    return random.Random(seed).sample(range(backend.info.num_blocks), -(-num_tokens // BLOCK))


def test_op_times_are_there_while_somebody_traces(make_backend: MakeBackend) -> None:
    backend = make_backend()
    step = row([5, 6, 7], 0, [0], sample_at=[2])
    plan = StepPlan(step_id=7, rows=[step])
    before = backend.run(plan)
    backend.trace_ops(True)
    traced = backend.run(plan)
    backend.trace_ops(False)
    after = backend.run(plan)
    assert before.op_times_s is after.op_times_s is None
    assert traced.op_times_s
    assert 0 < sum(traced.op_times_s.values()) <= traced.run_s
    assert traced.rows[0].token_ids == before.rows[0].token_ids


def test_logits_have_the_vocabulary_and_differ_with_every_token(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 20)
    logits = all_logits(backend, tokens, [0, 1], [20])
    assert logits.shape == (20, backend.info.vocab_size)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    for changed in range(20):
        other = [*tokens[:changed], (tokens[changed] + 1) % backend.info.vocab_size, *tokens[changed + 1 :]]
        differs = np.any(all_logits(backend, other, [2, 3], [20]) != logits, axis=1)
        assert list(differs) == [position >= changed for position in range(20)]


@pytest.mark.parametrize("chunks", [[1], [2], [3], [7], [16], [17], [64], [5, 1, 30, 2], [1, 99]])
def test_logits_any_chunk_size_gives_the_same_bits(make_backend: MakeBackend, chunks: list[int]) -> None:
    backend = make_backend()
    tokens = prompt(backend, 100)
    whole = all_logits(backend, tokens, range(7), [100])
    assert np.array_equal(all_logits(backend, tokens, range(7, 14), chunks), whole)


def test_targets_get_the_logprobs_that_sampling_them_gives(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 60)
    (sampled,) = run(backend, row(tokens, 0, range(4), sample_at=range(60), logprobs=3, seed=5, temperature=1.0))
    assert sampled.logprobs is not None
    for chunks in ([60], [7] * 9, [1] * 60):
        start, found = 0, []
        for size in chunks:
            part = row(tokens[start : start + size], start, range(4, 8))
            targets = sampled.token_ids[start : start + len(part.token_ids)]
            (got,) = run(backend, msgspec.structs.replace(part, targets=targets, num_rivals=3))
            found += got.target_logprobs
            start += size
        assert found == sampled.logprobs, chunks
    ahead, behind = row(tokens[:20], 0, [8, 9], sample_at=[19], logprobs=1), row(tokens[20:], 20, range(4, 8))
    together = msgspec.structs.replace(ahead, targets=tokens[1:20]), msgspec.structs.replace(behind, targets=[1])
    first, second = run(backend, *together)
    assert [one.token_id for one in first.target_logprobs] == tokens[1:20]
    assert first.token_ids == run(backend, ahead)[0].token_ids
    assert [one.token_id for one in second.target_logprobs] == [1]


def test_logits_scattered_blocks_give_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 70)
    whole = all_logits(backend, tokens, range(5), [70])
    for seed in range(4):
        assert np.array_equal(all_logits(backend, tokens, scattered(backend, 70, seed), [33]), whole)


def test_logits_any_company_gives_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend(num_blocks=256)
    rng = random.Random(3)
    prompts = [prompt(backend, rng.choice([1, 2, 15, 16, 17, 40]), seed) for seed in range(24)]
    alone = [all_logits(backend, tokens, [0, 1, 2], [64])[-1] for tokens in prompts]
    for num in (2, 3, 5, 9, 13):
        chosen = rng.sample(range(24), num)
        while sum(len(prompts[i]) for i in chosen) > 256:
            chosen.pop()
        rows = [
            row(prompts[i], 0, range(3 * i, 3 * i + 3), sample_at=[len(prompts[i]) - 1], name=str(i)) for i in chosen
        ]
        for i, got in zip(chosen, run(backend, *rows), strict=True):
            assert np.array_equal(got.logits[0], alone[i])


def test_logits_decode_beside_a_prefill_gives_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens, other = prompt(backend, 60, 1), prompt(backend, 90, 2)
    alone = all_logits(backend, tokens, range(4), [60])
    all_logits(backend, tokens[:-3], range(4, 8), [57])
    for i in (57, 58, 59):
        begin = (i - 57) * 30
        rows = [
            row(other[begin : begin + 30], begin, range(8, 14), name="prefill"),
            row([tokens[i]], i, range(4, 8), sample_at=[0], name="stream"),
        ]
        assert np.array_equal(run(backend, *rows)[1].logits[0], alone[i])


def test_logits_two_tables_over_one_prefix_give_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    shared = prompt(backend, 32)
    tails = [prompt(backend, 9, seed) for seed in (5, 6)]
    cold = [all_logits(backend, shared + tail, [10, 11, 12], [41])[32:] for tail in tails]
    all_logits(backend, shared, [0, 1], [32])
    rows = [row(tail, 32, [0, 1, 2 + i], sample_at=range(9), name=str(i)) for i, tail in enumerate(tails)]
    for got, wanted in zip(run(backend, *rows), cold, strict=True):
        assert np.array_equal(got.logits, wanted)


def test_logits_any_number_of_threads_gives_the_same_bits(make_backend: MakeBackend) -> None:
    found = []
    for threads in (1, 2, 3):
        backend = make_backend(threads=threads)
        found.append(all_logits(backend, prompt(backend, 100), range(7), [64, 1]))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_blocks_that_were_read_and_written_back_give_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 40)
    whole = all_logits(backend, tokens, [0, 1, 2], [40])
    data = backend.read_blocks([0, 1])
    assert len(data) == 2 * backend.info.kv_bytes_per_block
    backend.write_blocks([30, 20], data)
    (got,) = run(backend, row(tokens[32:], 32, [30, 20, 5], sample_at=range(8)))
    assert np.array_equal(got.logits, whole[32:])
    with pytest.raises(BackendError):
        backend.write_blocks([0], data)


def test_blocks_copied_in_a_plan_give_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 40)
    whole = all_logits(backend, tokens, [0, 1, 2], [40])
    wanted = row(tokens[32:], 32, [8, 9, 10], sample_at=range(8))
    (got,) = run(backend, wanted, copy_blocks=[(0, 8), (1, 9)])
    assert np.array_equal(got.logits, whole[32:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_several_positions_of_a_row_equals_one_by_one(make_backend: MakeBackend, temperature: float) -> None:
    """The row a draft makes: each position has the noise, and the penalised history, it would have had alone."""
    backend = make_backend()
    tokens = prompt(backend, 30)
    common: dict[str, Any] = {"temperature": temperature, "seed": 11, "num_prompt": 25, "logprobs": 3}
    common |= {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    all_logits(backend, tokens[:26], [0, 1], [26])
    one_by_one = []
    for j in range(4):
        wanted = common | {"output_index": 2 + j, "history": tokens[: 27 + j]}
        (got,) = run(backend, row([tokens[26 + j]], 26 + j, [0, 1], sample_at=[0], **wanted))
        one_by_one.append(got)
    all_logits(backend, tokens[:26], [2, 3], [26])
    wanted = common | {"output_index": 2, "history": tokens[:27]}
    (together,) = run(backend, row(tokens[26:], 26, [2, 3], sample_at=range(4), **wanted))
    assert together.token_ids == [got.token_ids[0] for got in one_by_one]
    assert np.array_equal(together.logits, np.concatenate([got.logits for got in one_by_one]))
    assert together.logprobs == [entry for got in one_by_one for entry in got.logprobs or []]


def test_sampling_temperature_0_takes_the_largest_logit(make_backend: MakeBackend) -> None:
    backend = make_backend()
    (got,) = run(backend, row(prompt(backend, 50), 0, range(4), sample_at=range(50)))
    assert got.token_ids == list(np.argmax(got.logits, axis=1))


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_sampling_filtered_to_one_token_is_greedy(make_backend: MakeBackend, limits: dict[str, Any]) -> None:
    backend = make_backend()
    wanted = row(prompt(backend, 30), 0, range(2), sample_at=range(30), **{"temperature": 1.5, **limits})
    (got,) = run(backend, wanted)
    assert got.token_ids == list(np.argmax(got.logits, axis=1))


def test_sampling_logit_bias_moves_the_choice_and_not_the_logprob(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 20)
    (plain,) = run(backend, row(tokens, 0, range(2), sample_at=[19], logprobs=2))
    loser = int(np.argmin(plain.logits[0]))
    (biased,) = run(backend, row(tokens, 0, range(2, 4), sample_at=[19], logprobs=2, logit_bias={loser: 1000.0}))
    assert biased.token_ids == [loser]
    assert np.array_equal(biased.logits, plain.logits)
    assert plain.logprobs is not None
    assert biased.logprobs is not None
    assert biased.logprobs[0].top == plain.logprobs[0].top


def test_sampling_penalties_choose_as_the_reference(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 40)
    rng = random.Random(8)
    for _ in range(10):
        history = [*tokens, *rng.choices(range(backend.info.vocab_size), k=30)]
        wanted = {
            "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-1, 1),
            "history": history,
            "num_prompt": 40,
        }
        (got,) = run(backend, row(tokens, 0, range(3), sample_at=[39], **wanted))
        assert got.token_ids == [sample(got.logits[0], RowSampling(**GREEDY | wanted), 0, history)]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_the_log_softmax_whatever_the_temperature(make_backend: MakeBackend, num_top: int) -> None:
    backend = make_backend()
    wanted = row(prompt(backend, 30), 0, range(2), sample_at=range(30), temperature=2.0, logprobs=num_top, seed=4)
    (got,) = run(backend, wanted)
    logits = got.logits.astype(np.float64)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    assert got.logprobs is not None
    for i, entry in enumerate(got.logprobs):
        assert entry.token_id == got.token_ids[i]
        assert entry.logprob == pytest.approx(logprobs[i, entry.token_id], abs=1e-4)
        assert [token for token, _ in entry.top] == list(np.argsort(-logprobs[i], kind="stable")[:num_top])
        assert all(value == pytest.approx(logprobs[i, token], abs=1e-4) for token, value in entry.top)


def test_sampling_depends_on_seed_and_index_and_on_nothing_else(make_backend: MakeBackend) -> None:
    backend = make_backend()
    tokens = prompt(backend, 16)

    def sampled(seed: int, index: int, *company: StepRow) -> int:
        wanted = row(tokens, 0, [0], sample_at=[15], temperature=3.0, seed=seed, output_index=index)
        return run(backend, *company, wanted)[-1].token_ids[0]

    company = [row(prompt(backend, 9, i), 0, [4 + i], sample_at=[8], temperature=1.0, name=f"c{i}") for i in range(3)]
    draws = [sampled(seed, 0) for seed in range(20)]
    assert draws == [sampled(seed, 0, *company) for seed in range(20)]
    assert len(set(draws)) > 3
    assert len({sampled(0, index) for index in range(20)}) > 3


def test_sampling_frequencies_are_the_softmax(make_backend: MakeBackend) -> None:
    backend = make_backend(max_step_rows=64)
    tokens = prompt(backend, 5)
    counts = np.zeros(backend.info.vocab_size)
    for seed in range(0, 2048, 32):
        rows = [
            row(tokens, 0, [i], sample_at=[4], temperature=1.0, seed=seed + i, output_index=3, name=str(i))
            for i in range(32)
        ]
        results = run(backend, *rows)
        for got in results:
            counts[got.token_ids[0]] += 1
    logits = results[0].logits[0].astype(np.float64)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    sigma = np.sqrt(2048 * probs * (1 - probs))
    assert np.all(np.abs(counts - 2048 * probs) < 5 * sigma + 1)


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": [1] * 300, "block_table": list(range(19))},
        {"token_ids": [1] * 17, "block_table": [0]},
        {"start": CONTEXT, "block_table": list(range(17))},
        {"token_ids": [100_000]},
        {"token_ids": [-1]},
        {"block_table": [64]},
        {"block_table": [-1]},
    ],
)
def test_run_plan_beyond_a_limit_is_refused_and_the_backend_goes_on(
    make_backend: MakeBackend, broken: dict[str, Any]
) -> None:
    backend = make_backend()
    fine = row([1, 2, 3], 0, [0])
    fields = {name: getattr(fine, name) for name in fine.__struct_fields__}
    with pytest.raises(BackendError):
        backend.run(StepPlan(step_id=1, rows=[StepRow(**fields | broken)]))
    run(backend, fine)


def test_close_twice_is_quiet(make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.close()
    backend.close()


# -- the same answers through the scheduler


def requests(backend: Backend, num: int) -> list[CoreRequest]:
    rng = random.Random(num)
    bases = [prompt(backend, 60, seed) for seed in (1, 2)]
    found = []
    for i in range(num):
        ids = rng.choice(bases)[: rng.randrange(1, 60)] + prompt(backend, rng.randrange(1, 12), 100 + i)
        params = SamplingParams(temperature=float(i % 2), repetition_penalty=1.2 if i % 3 == 0 else 1.0)
        found.append(
            CoreRequest(
                request_id=f"r{i}",
                prompt_ids=ids,
                params=params,
                seed=i,
                max_tokens=rng.randrange(1, 24),
                stop_ids=frozenset(),
                arrival_s=float(i),
                return_logits=True,
            )
        )
    return found


def serve(
    backend: Backend,
    wanted: Sequence[CoreRequest],
    *,
    max_step_tokens: int,
    max_step_rows: int,
    num_blocks: int,
    reserve_output: bool = True,
) -> tuple[dict[str, tuple[list[int], Logits]], Scheduler]:
    """Ids and logits of every request, arriving one step apart, with the pool audited after every step."""
    config = EngineConfig(max_step_tokens=max_step_tokens, max_step_rows=max_step_rows, reserve_output=reserve_output)
    limits = SchedulerLimits.of(backend.info, config)
    cache = KVCache(num_blocks, BLOCK, backend.info.fingerprint)
    scheduler = Scheduler(cache, limits, clock=lambda: 0.0, step_time=StepTimeModel())
    ids: dict[str, list[int]] = {one.request_id: [] for one in wanted}
    logits: dict[str, list[Logits]] = {one.request_id: [] for one in wanted}
    left = list(wanted)
    while left or scheduler.has_work:
        if left:
            scheduler.add(left.pop(0))
        plan = scheduler.plan()
        assert plan is not None
        for event in scheduler.absorb(backend.run(plan)):
            ids[event.request_id] += event.token_ids
            logits[event.request_id].append(event.logits)
        scheduler.check()
    return {name: (ids[name], np.concatenate(logits[name])) for name in ids}, scheduler


@pytest.mark.parametrize(
    ("max_step_tokens", "max_step_rows", "num_blocks"),
    [(256, 64, 64), (24, 5, 20), (16, 16, 12), (7, 3, 8), (256, 1, 8)],
)
def test_serve_any_schedule_gives_the_ids_and_logits_of_each_request_alone(
    make_backend: MakeBackend, max_step_tokens: int, max_step_rows: int, num_blocks: int
) -> None:
    backend = make_backend()
    wanted = requests(backend, 14)
    alone: dict[str, tuple[list[int], Logits]] = {}
    for one in wanted:
        alone |= serve(backend, [one], max_step_tokens=256, max_step_rows=1, num_blocks=64)[0]
    together, scheduler = serve(
        backend, wanted, max_step_tokens=max_step_tokens, max_step_rows=max_step_rows, num_blocks=num_blocks
    )
    assert scheduler.cache.stats().hit_tokens > 0
    for name, (ids, logits) in alone.items():
        assert together[name][0] == ids
        assert np.array_equal(together[name][1], logits)


def test_serve_tiny_pool_preempts_and_still_gives_the_same_bits(make_backend: MakeBackend) -> None:
    backend = make_backend()
    wanted = [
        CoreRequest(
            request_id=f"r{i}",
            prompt_ids=prompt(backend, 14, i),
            params=SamplingParams(temperature=1.0),
            seed=i,
            max_tokens=60,
            stop_ids=frozenset(),
            arrival_s=float(i),
            return_logits=True,
        )
        for i in range(4)
    ]
    alone: dict[str, tuple[list[int], Logits]] = {}
    for one in wanted:
        alone |= serve(backend, [one], max_step_tokens=64, max_step_rows=4, num_blocks=64)[0]
    together, scheduler = serve(
        backend, wanted, max_step_tokens=64, max_step_rows=4, num_blocks=9, reserve_output=False
    )
    assert scheduler.stats.preemptions > 0
    for name, (ids, logits) in alone.items():
        assert together[name][0] == ids
        assert np.array_equal(together[name][1], logits)


def masks_of(backend: Backend, *allowed: Sequence[int], ready: int = 1) -> StepMasks:
    bits = np.zeros((len(allowed), -(-backend.info.vocab_size // 32) * 32), np.uint8)
    for one, ids in zip(bits, allowed, strict=True):
        one[list(ids)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return StepMasks(bits=words, ready=np.full(len(allowed), ready, np.int32))


def test_masks_rule_their_positions_and_no_other(make_backend: MakeBackend) -> None:
    backend = make_backend()
    first, second = prompt(backend, 5), prompt(backend, 9, seed=1)
    rows = [
        row(first, 0, [0], sample_at=[4], name="free"),
        row(second, 0, [1], sample_at=[6, 7, 8], name="masked", mask=0),
    ]
    free, unmasked = run(backend, *[rows[0], row(second, 0, [1], sample_at=[6, 7, 8], name="masked")])
    allowed = [(3, 17), (20,), tuple(range(backend.info.vocab_size))]
    masked_plan = StepPlan(step_id=1, rows=rows, masks=masks_of(backend, *allowed))
    beside, masked = backend.run(masked_plan).rows
    assert beside.token_ids == free.token_ids
    assert np.array_equal(beside.logits, free.logits)
    assert np.array_equal(masked.logits, unmasked.logits)
    best = [max(ids, key=lambda i: masked.logits[at][i]) for at, ids in enumerate(allowed)]
    assert masked.token_ids == best


def test_masks_filled_while_the_step_runs_are_waited_for(make_backend: MakeBackend) -> None:
    backend = make_backend()
    masks = masks_of(backend, (5,), ready=0)

    def fill() -> None:
        time.sleep(0.05)
        masks.bits[0] = masks_of(backend, (9,)).bits[0]
        masks.ready[0] = 1

    thread = threading.Thread(target=fill)
    thread.start()
    one = row(prompt(backend, 3), 0, [0], sample_at=[2], mask=0)
    (got,) = backend.run(StepPlan(step_id=1, rows=[one], masks=masks)).rows
    thread.join()
    assert got.token_ids == [9]


def test_masks_that_the_step_lacks_are_refused(make_backend: MakeBackend) -> None:
    backend = make_backend()
    one = row(prompt(backend, 3), 0, [0], sample_at=[2], mask=4)
    with pytest.raises(BackendError, match="mask"):
        backend.run(StepPlan(step_id=1, rows=[one], masks=masks_of(backend, (5,))))
