"""Logits of the default model to the bit, whatever road a request takes through scheduler, cache and kernels.

The scheduler runs the real backend directly, so that chunks, drafts and preemptions are seen and counted here.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from firstlight.backend.cpu import CpuBackend, native_pack
from firstlight.cache import KVCache
from firstlight.config import EngineConfig
from firstlight.models.weights import LoadedModel, load_model
from firstlight.scheduler import Scheduler, SchedulerLimits, SchedulerStats, StepTimeModel
from firstlight.text import Tokenizer
from firstlight.types import CoreRequest, Pin, SamplingParams
from tests.oracle.compare import backend_logits

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "prompts.jsonl"
MAX_BYTES = 120
"""Prompts are cut here so that all 200 fit the time of a test suite."""
CHUNKS = (1, 2, 7, 16, 61, 128, 255, 300)

Answers = dict[str, list[tuple[int, str]]]
"""Per request: each output token and the digest of the logits it was chosen from."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path, native=native_pack)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return Tokenizer.from_gguf(model.tokenizer.metadata)


@pytest.fixture(scope="module")
def requests(texts: list[str], tokenizer: Tokenizer) -> list[CoreRequest]:
    """One request per real prompt, half of them sampled."""
    cut = [text.encode()[:MAX_BYTES].decode(errors="ignore") for text in texts]
    return [_request(i, tokenizer.encode(text), 3) for i, text in enumerate(cut)]


def _request(i: int, prompt_ids: list[int], max_tokens: int) -> CoreRequest:
    return CoreRequest(
        request_id=f"r{i}",
        prompt_ids=prompt_ids,
        params=SamplingParams(temperature=0.9 * (i % 2), top_p=0.95),
        seed=i,
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        arrival_s=float(i),
        return_logits=True,
    )


def run(
    backend: CpuBackend,
    requests: Sequence[CoreRequest],
    *,
    at_once: int,
    cache: KVCache | None = None,
    drafter: Any = None,
    **limits: Any,
) -> tuple[Answers, SchedulerStats]:
    """Every answer, with `at_once` requests open at any time, in a random order that the seed fixes."""
    info = backend.info
    cache = cache or KVCache(info.num_blocks, info.block_size, info.fingerprint, prefix_cache=False)
    bounds = SchedulerLimits.of(info, EngineConfig(**limits))
    scheduler = Scheduler(cache, bounds, clock=time.monotonic, step_time=StepTimeModel(), drafter=drafter)
    waiting = list(requests)
    random.Random(at_once).shuffle(waiting)
    answers: Answers = {request.request_id: [] for request in requests}
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < at_once:
            scheduler.add(waiting.pop())
            num_open += 1
        plan = scheduler.plan()
        assert plan is not None
        for event in scheduler.absorb(backend.run(plan)):
            for token, logits in zip(event.token_ids, event.logits, strict=True):
                answers[event.request_id].append((token, hashlib.sha256(logits.tobytes()).hexdigest()))
            num_open -= event.finish is not None
    scheduler.check()
    return answers, scheduler.stats


@pytest.fixture
def make_backend(model: LoadedModel) -> Iterator[Callable[..., CpuBackend]]:
    built: list[CpuBackend] = []

    def make(**options: int) -> CpuBackend:
        built.append(CpuBackend(model, EngineConfig(**options)))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


@pytest.fixture(scope="module")
def alone(model: LoadedModel, requests: list[CoreRequest]) -> Answers:
    """The reference: each request by itself, one thread, no cache."""
    backend = CpuBackend(model, EngineConfig(threads=1, num_blocks=256))
    answers, _ = run(backend, requests, at_once=1)
    backend.close()
    assert len(answers) == 200
    assert all(len(answer) == 3 for answer in answers.values())
    return answers


@pytest.mark.parametrize(
    ("at_once", "max_step_tokens", "threads"), [(32, 512, 2), (32, 48, 2), (5, 20, 1)], ids=["wide", "small", "tiny"]
)
def test_logits_in_random_batches_are_equal_to_the_bit(
    alone: Answers,
    requests: list[CoreRequest],
    make_backend: Callable[..., CpuBackend],
    at_once: int,
    max_step_tokens: int,
    threads: int,
) -> None:
    backend = make_backend(threads=threads, num_blocks=512)
    answers, _ = run(backend, requests, at_once=at_once, max_step_tokens=max_step_tokens)
    assert answers == alone


def test_logits_from_a_warm_cache_are_equal_to_the_bit(
    alone: Answers, requests: list[CoreRequest], make_backend: Callable[..., CpuBackend]
) -> None:
    backend = make_backend(threads=2, num_blocks=1024)
    cache = KVCache(1024, backend.info.block_size, backend.info.fingerprint, prefix_cache=True)
    some = requests[:100]
    cold, _ = run(backend, some, at_once=16, cache=cache)
    warm, _ = run(backend, some, at_once=16, cache=cache)
    assert cold == warm == {request.request_id: alone[request.request_id] for request in some}
    assert cache.stats().hit_tokens > 1000


def test_logits_from_pinned_blocks_are_equal_to_the_bit(
    alone: Answers, requests: list[CoreRequest], make_backend: Callable[..., CpuBackend]
) -> None:
    backend = make_backend(threads=2, num_blocks=48)
    cache = KVCache(48, backend.info.block_size, backend.info.fingerprint, max_pinned=12)
    pinned = [msgspec.structs.replace(one, pins=(Pin(num_tokens=len(one.prompt_ids)),)) for one in requests[:4]]
    for some in (pinned, requests[10:60], requests[:4]):
        answers, _ = run(backend, some, at_once=4, cache=cache)
        assert answers == {request.request_id: alone[request.request_id] for request in some}
    stats = cache.stats()
    assert stats.pinned_blocks > 0
    assert stats.evictions > 0
    assert stats.hit_tokens >= stats.pinned_blocks * backend.info.block_size


def test_logits_after_preemption_and_drafts_are_equal_to_the_bit(
    texts: list[str], tokenizer: Tokenizer, make_backend: Callable[..., CpuBackend]
) -> None:
    prompts = [tokenizer.encode(text)[: 40 + i] for i, text in enumerate(text for text in texts if len(text) > 400)]
    some = [_request(i, ids, 40) for i, ids in enumerate(prompts[:16])]
    roomy = make_backend(threads=1, num_blocks=256)
    reference, stats = run(roomy, some, at_once=1)
    assert stats.preemptions == 0

    backend = make_backend(threads=2, num_blocks=20)
    preempted, stats = run(backend, some, at_once=16, reserve_output=False)
    assert preempted == reference
    assert stats.preemptions > 0

    outputs = {id: [token for token, _ in answer] for id, answer in reference.items()}
    prompt_lengths = {request.request_id: len(request.prompt_ids) for request in some}
    random_source = random.Random(7)

    def draft(request_id: str, tokens: list[int], most: int) -> list[int]:
        """What really follows, cut anywhere, with a wrong token now and then."""
        at = len(tokens) - prompt_lengths[request_id]
        ids = outputs[request_id][at : at + random_source.randint(0, most)]
        return [token if random_source.random() < 0.85 else token ^ 1 for token in ids]

    drafted, stats = run(make_backend(threads=2, num_blocks=256), some, at_once=6, drafter=draft)
    assert drafted == reference
    assert 0 < stats.accepted_tokens < stats.draft_tokens

    looked_up, stats = run(make_backend(threads=2, num_blocks=256), some, at_once=2, speculate="lookup")
    assert looked_up == reference
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_logits_in_batches_are_equal_to_the_bit(
    requests: list[CoreRequest], alone: Answers, make_backend: Callable[..., CpuBackend], mode: str
) -> None:
    some = requests[::5]
    together, stats = run(make_backend(num_blocks=256), some, at_once=12, mode=mode, batch_size=5)
    assert together == {request.request_id: alone[request.request_id] for request in some}
    assert stats.steps >= len(some) / 5 * 3


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_at_every_chunk_size_are_equal_to_the_bit(
    texts: list[str], tokenizer: Tokenizer, make_backend: Callable[..., CpuBackend], threads: int
) -> None:
    ids = tokenizer.encode(max(texts, key=len))[:400]
    assert len(ids) == 400
    backend = make_backend(threads=threads, num_blocks=32)
    expected = backend_logits(backend, ids, first=360, chunk=512)
    for chunk in CHUNKS[threads - 1 :]:
        np.testing.assert_array_equal(backend_logits(backend, ids, first=360, chunk=chunk), expected)
