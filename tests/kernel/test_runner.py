"""Whole programs through the CPU backend: the same logits, to the bit, by every road, and near the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.backend.cpu import CpuBackend
from firstlight.config import EngineConfig
from firstlight.errors import BackendError
from firstlight.models.weights import LoadedModel
from firstlight.types import RowSampling, StepPlan, StepRow
from tests.kernel.layouts import EVERY_SET, EVERY_VECTOR_SET, F32, bits
from tests.kernel.models import RECIPES, build
from tests.oracle.executor import Oracle

BLOCK = 16
NUM_BLOCKS = 64
STEP_TOKENS = 256
PROMPT = 300
GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, output_index=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: build(recipe, make(folder / name)) for name, recipe in RECIPES.items()}


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def backend_of(model: LoadedModel, *, threads: int = 1, kernels: str = "auto", block_size: int = BLOCK) -> CpuBackend:
    config = EngineConfig(
        threads=threads,
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        max_step_tokens=STEP_TOKENS,
        max_step_rows=STEP_TOKENS,
    )
    return CpuBackend(model, config, kernels=kernels)


def row(tokens: Sequence[int], start: int, table: Sequence[int], sample_at: Sequence[int] | None = None) -> StepRow:
    """A row that samples after every token, or after those named."""
    at = tuple(range(len(tokens)) if sample_at is None else sample_at)
    return StepRow(
        request_id="r",
        token_ids=list(tokens),
        start=start,
        block_table=list(table),
        sample_at=at,
        sampling=GREEDY if at else None,
        return_logits=bool(at),
    )


def run(backend: CpuBackend, *rows: StepRow) -> list[Any]:
    return [got.logits for got in backend.run(StepPlan(step_id=0, rows=list(rows))).rows]


def logits(backend: CpuBackend, tokens: Sequence[int], chunks: Sequence[int], table: Sequence[int]) -> F32:
    """Logits after every token, in chunks of the given sizes; the last repeats."""
    parts, start = [], 0
    sizes = iter(chunks)
    size = 0
    while start < len(tokens):
        size = next(sizes, size)
        parts += run(backend, row(tokens[start : start + size], start, table))
        start += size
    return np.concatenate(parts)


def prompt(model: LoadedModel, num: int = PROMPT, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.program.vocab_size) for _ in range(num)]


def table(seed: int, num_tokens: int = PROMPT, block_size: int = BLOCK) -> list[int]:
    return random.Random(seed).sample(range(NUM_BLOCKS), -(-num_tokens // block_size))


ORDINARY = list(range(PROMPT // BLOCK + 1))


# The same bits


@EVERY_VECTOR_SET
@pytest.mark.parametrize("name", RECIPES)
def test_runner_any_kernel_set_gives_the_scalar_bits(models: dict[str, LoadedModel], name: str, kernels: str) -> None:
    model = models[name]
    tokens = prompt(model, 150)
    scalar, vector = (
        logits(backend_of(model, kernels=each), tokens, [100, 1, 1, 3], ORDINARY) for each in ("scalar", kernels)
    )
    assert bits(scalar) == bits(vector)


@EVERY_SET
@pytest.mark.parametrize("name", RECIPES)
def test_runner_threads_chunks_and_tables_give_the_same_bits(
    models: dict[str, LoadedModel], name: str, kernels: str
) -> None:
    model = models[name]
    tokens = prompt(model, 140 if kernels == "scalar" else PROMPT)
    whole = logits(backend_of(model, kernels=kernels), tokens, [150], ORDINARY)
    for threads, chunks in (
        (1, [1, 2, 3, 4, 5, 6, 7, 100]),
        (2, [64]),
        (3, [9, 8, 1, 1, 200]),
        (2, [2, 256, 1]),
        (3, [256]),
    ):
        backend = backend_of(model, threads=threads, kernels=kernels)
        again = logits(backend, tokens, chunks, table(threads))
        assert bits(again) == bits(whole), (threads, chunks)
        backend.close()


@pytest.mark.parametrize("block_size", [32, 48, 128])
@pytest.mark.parametrize("name", ["llama-mixed", "gemma3-mixed", "soft-caps-gelu"])
def test_runner_block_size_gives_the_same_bits(models: dict[str, LoadedModel], name: str, block_size: int) -> None:
    tokens = prompt(models[name])
    whole = logits(backend_of(models[name]), tokens, [150], ORDINARY)
    other = backend_of(models[name], threads=2, block_size=block_size)
    assert bits(logits(other, tokens, [50, 1, 7, 256], table(1, PROMPT, block_size))) == bits(whole)


@pytest.fixture(scope="module")
def company(models: dict[str, LoadedModel]) -> Iterator[dict[str, tuple[list[CpuBackend], list[list[int]], list[F32]]]]:
    """Per model: backends of 1 to 3 threads, four prompts, and each prompt's logits alone."""
    made = {}
    for name in ("llama-mixed", "gemma3-mixed", "soft-caps-gelu", "llama-untied-half"):
        model = models[name]
        prompts = [prompt(model, num, seed) for seed, num in enumerate((200, 37, 130, 16))]
        backends = [backend_of(model, threads=threads) for threads in (1, 2, 3)]
        made[name] = backends, prompts, [logits(backends[0], tokens, [200], ORDINARY) for tokens in prompts]
    yield made
    for backends, _, _ in made.values():
        for backend in backends:
            backend.close()


@pytest.mark.parametrize("name", ["llama-mixed", "gemma3-mixed", "soft-caps-gelu", "llama-untied-half"])
@given(seed=st.integers(0, 2**32 - 1), threads=st.integers(1, 3))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_runner_any_schedule_beside_others_gives_the_bits_of_each_alone(
    company: dict[str, tuple[list[CpuBackend], list[list[int]], list[F32]]], name: str, seed: int, threads: int
) -> None:
    """Steps of random rows of random length, sampled at random places, over blocks in random order."""
    backends, prompts, alone = company[name]
    backend, rng = backends[threads - 1], random.Random(seed)
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[order.pop() for _ in range(-(-len(tokens) // BLOCK))] for tokens in prompts]
    done = [0] * len(prompts)
    while any(num < len(tokens) for num, tokens in zip(done, prompts, strict=True)):
        left, rows, wanted = STEP_TOKENS, [], []
        for i in rng.sample(range(len(prompts)), rng.randint(1, len(prompts))):
            size = min(rng.choice([1, 1, 2, 7, 8, 9, 30, 120]), left, len(prompts[i]) - done[i])
            if size == 0:
                continue
            at = sorted(rng.sample(range(size), rng.choice([0, 1, size])))
            rows.append(row(prompts[i][done[i] : done[i] + size], done[i], tables[i], at))
            wanted.append(alone[i][[done[i] + j for j in at]] if at else None)
            done[i] += size
            left -= size
        for got, expected in zip(run(backend, *rows) if rows else [], wanted, strict=True):
            assert (got is None) == (expected is None)
            assert expected is None or bits(got) == bits(expected)


# Near the oracle


TOLERANCE = {"nibble": 0.08, "byte": 2e-3, "half": 2e-3, "bf16": 2e-3, "float": 2e-3}
"""Root-mean-square error over the logits' spread. int8 activations cost percents; float16 KV may round otherwise."""


@pytest.mark.parametrize("name", RECIPES)
def test_runner_logits_are_the_oracles(models: dict[str, LoadedModel], name: str) -> None:
    model = models[name]
    tokens = prompt(model, 200)
    wanted = Oracle(model.program, model.weights, model.constants).logits(tokens)
    got = logits(backend_of(model, threads=2), tokens, [130, 1, 30], ORDINARY)
    error = np.sqrt(np.mean((got - wanted) ** 2)) / np.std(wanted)
    assert error < max(TOLERANCE[weight.kind] for weight in model.weights.values())
    assert np.mean(got.argmax(axis=1) == wanted.argmax(axis=1)) > 0.85


def test_runner_release_gives_the_same_bits_and_empties_the_model(tmp_path: Path) -> None:
    model = build(RECIPES["llama-mixed"], tmp_path)
    tokens = prompt(model, 20)
    wanted = logits(backend_of(model), tokens, [20], [0, 1])
    config = EngineConfig(threads=1, num_blocks=4, max_step_tokens=32, max_step_rows=8)
    released = CpuBackend(model, config, release=True)
    assert not model.weights
    assert bits(logits(released, tokens, [16, 1], [0, 1])) == bits(wanted)


# Plans that break a limit


BROKEN: dict[str, dict[str, Any]] = {
    "token id past the vocabulary": {"token_ids": [1, 96, 2]},
    "token id negative": {"token_ids": [1, -1, 2]},
    "block id past the pool": {"block_table": [NUM_BLOCKS]},
    "block id negative": {"block_table": [-1]},
    "block table too short": {"block_table": []},
    "block table short of the last token": {"start": 14, "block_table": [0]},
    "start past the context": {"start": 319, "block_table": list(range(21))},
    "start negative": {"start": -1},
    "no tokens": {"token_ids": [], "sample_at": ()},
    "too many tokens": {"token_ids": [1] * (STEP_TOKENS + 1), "block_table": list(range(17))},
    "samples out of order": {"sample_at": (2, 1)},
    "sample twice": {"sample_at": (1, 1)},
    "sample after the step": {"sample_at": (3,)},
    "sample before the step": {"sample_at": (-1,)},
    "samples without parameters": {"sampling": None},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_runner_broken_plan_is_refused_and_changes_nothing(
    models: dict[str, LoadedModel], broken: dict[str, Any]
) -> None:
    backend = backend_of(models["llama-mixed"], threads=2)
    tokens = prompt(models["llama-mixed"], 40)
    whole = logits(backend, tokens, [40], [5, 3, 4])
    before = backend.read_blocks(list(range(NUM_BLOCKS)))
    fine = row([1, 2, 3], 0, [0])
    fields = {name: getattr(fine, name) for name in fine.__struct_fields__}
    with pytest.raises(BackendError):
        backend.run(StepPlan(step_id=1, rows=[StepRow(**fields | broken)]))
    assert backend.read_blocks(list(range(NUM_BLOCKS))) == before
    assert bits(run(backend, row(tokens[30:], 30, [5, 3, 4]))[0]) == bits(whole[30:])


def test_runner_too_many_samples_are_refused(models: dict[str, LoadedModel]) -> None:
    config = EngineConfig(threads=1, num_blocks=8, max_step_tokens=64, max_step_rows=2)
    backend = CpuBackend(models["llama"], config)
    run(backend, row([1] * 40, 0, [0, 1, 2], range(backend.info.max_step_samples)))
    with pytest.raises(BackendError, match="samples 5 positions"):
        run(backend, row([1] * 40, 0, [0, 1, 2], range(backend.info.max_step_samples + 1)))


@pytest.mark.parametrize("sample_at", [(2,), (-1,)])
def test_runner_sample_in_a_neighbours_row_is_refused(
    models: dict[str, LoadedModel], sample_at: tuple[int, ...]
) -> None:
    backend = backend_of(models["llama"])
    rows = [row([1, 2], 0, [0], []), row([3, 4], 0, [1], sample_at), row([5, 6], 0, [2], [])]
    with pytest.raises(BackendError):
        run(backend, *rows)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70])
def test_runner_number_beyond_32_bits_is_refused(models: dict[str, LoadedModel], token: int) -> None:
    with pytest.raises(BackendError):
        run(backend_of(models["llama"]), row([token], 0, [0]))


@pytest.mark.parametrize("copy", [(0, NUM_BLOCKS), (NUM_BLOCKS, 0), (-1, 0), (0, -1)])
def test_runner_copy_of_a_block_past_the_pool_is_refused(models: dict[str, LoadedModel], copy: tuple[int, int]) -> None:
    with pytest.raises(BackendError):
        backend_of(models["llama"]).run(StepPlan(step_id=0, rows=[], copy_blocks=[copy]))


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_runner_reading_or_writing_a_block_past_the_pool_is_refused(models: dict[str, LoadedModel], block: int) -> None:
    backend = backend_of(models["llama"])
    with pytest.raises((BackendError, ValueError)):
        backend.read_blocks([block])
    with pytest.raises((BackendError, ValueError)):
        backend.write_blocks([block], bytes(backend.info.kv_bytes_per_block))


def test_runner_writing_a_wrong_size_is_refused(models: dict[str, LoadedModel]) -> None:
    backend = backend_of(models["llama"])
    with pytest.raises(BackendError, match="need"):
        backend.write_blocks([0, 1], bytes(backend.info.kv_bytes_per_block))
