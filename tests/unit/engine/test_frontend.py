from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from firstlight.backend.fake import StepCost
from firstlight.config import EngineConfig
from firstlight.engine import AsyncEngine, Completion, Generation, collect
from firstlight.engine.fake import fake_parts
from firstlight.engine.generation import MAX_MERGED_TOKENS
from firstlight.errors import BackendError, ConfigError, OverloadedError, RequestError
from firstlight.types import FinishReason, SamplingParams
from tests.unit.engine.test_core import WAIT_S, Gate

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **changes})


@asynccontextmanager
async def engine(gate: Gate | None = None, **config: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine over the fake backend; with `gate`, its steps wait there once the warm-up is over."""
    options: dict[str, Any] = {"cost": StepCost(step_s=1e-6), "sleep": gate} if gate else {}
    backend_options = {k: config.pop(k) for k in ("fail_at_step", "cost", "sleep") if k in config}
    one = AsyncEngine(EngineConfig(**config), load=lambda c: fake_parts(c, **options, **backend_options))
    await one.start()
    if gate:
        gate.close()
    try:
        yield one
    finally:
        if gate:
            gate.open()
        await one.close()


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs an async test on a fresh loop, in bounded time."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), WAIT_S))

    run.__name__ = test.__name__
    return run


async def answer(one: AsyncEngine, text: str, wanted: SamplingParams, **options: Any) -> Completion:
    ids = await one.encode_prompt(text)
    return (await collect(one.generate("test", ids, wanted, **options), 1))[0]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@in_loop
async def test_generate_streamed_pieces_join_to_the_whole_answer() -> None:
    async with engine() as one:
        whole = await answer(one, "hello", GREEDY)
        pieces = [delta async for delta in one.generate("again", await one.encode_prompt("hello"), GREEDY)]
        assert "".join(delta.text for delta in pieces) == whole.text == one.decode(whole.token_ids)
        assert [i for delta in pieces for i in delta.token_ids] == whole.token_ids
        assert [delta.finish for delta in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish is FinishReason.LENGTH


@in_loop
async def test_generate_usage_counts_prompt_output_and_cached_tokens() -> None:
    async with engine(block_size=4) as one:
        await answer(one, "0123456789", GREEDY)
        again = await answer(one, "0123456789", GREEDY)
        assert again.usage is not None
        assert (again.usage.prompt_tokens, again.usage.completion_tokens, again.usage.cached_tokens) == (10, 8, 9)


@in_loop
async def test_generate_salt_keeps_tenants_apart() -> None:
    async with engine(block_size=4) as one:
        await answer(one, "0123456789", GREEDY, cache_salt=b"alice")
        other = await answer(one, "0123456789", GREEDY, cache_salt=b"bob")
        assert other.usage is not None
        assert other.usage.cached_tokens == 0


@in_loop
async def test_generate_n_choices_share_the_prompt_and_differ() -> None:
    async with engine(block_size=4) as one:
        ids = await one.encode_prompt("0123456789012345")
        wanted = params(n=4, temperature=1.0, seed=7, max_tokens=20)
        completions = await collect(one.generate("n", ids, wanted), 4)
        assert [c.choice for c in completions] == [0, 1, 2, 3]
        assert len({tuple(c.token_ids) for c in completions}) == 4
        assert one.stats().scheduler.prefill_tokens == 16 + 3 * 1
        single = await collect(one.generate("1", ids, params(temperature=1.0, seed=7, max_tokens=20)), 1)
        assert single[0].token_ids == completions[0].token_ids


@in_loop
async def test_generate_seed_decides_the_answer() -> None:
    async with engine() as one:
        first, same, other = [
            (await answer(one, "x", params(temperature=1.0, seed=seed, max_tokens=30))).token_ids
            for seed in (1, 1, -(2**60))
        ]
        assert first == same != other


@in_loop
async def test_stop_string_across_tokens_ends_the_answer_and_the_request() -> None:
    async with engine() as one:
        done = await answer(one, "x", params(stop=("lo w",), max_tokens=1000), forced_ids=b"hello world")
        assert (done.text, done.finish, done.stop_reason) == ("hel", FinishReason.STOP, "lo w")
        assert bytes(done.token_ids) == b"hello w"
        assert done.usage is not None
        assert done.usage.completion_tokens == 7
        await until(lambda: one.stats().running == 0)
        await one.check()


@in_loop
async def test_stop_string_can_be_part_of_the_text() -> None:
    async with engine() as one:
        wanted = params(stop=("lo",), include_stop_str_in_output=True)
        assert (await answer(one, "x", wanted, forced_ids=b"hello world")).text == "hello"


@in_loop
async def test_stop_string_begun_but_not_completed_is_shown_at_the_end() -> None:
    async with engine() as one:
        done = await answer(one, "x", params(stop=("lo!",), max_tokens=5), forced_ids=b"hello")
        assert (done.text, done.finish) == ("hello", FinishReason.LENGTH)


@in_loop
async def test_stop_string_is_found_while_nobody_reads() -> None:
    async with engine() as one:
        generation = one.generate("r", [1], params(stop=("lo",), max_tokens=2000), forced_ids=b"hello")
        await until(lambda: one.stats().scheduler.finished["abort"] == 1)
        (done,) = await collect(generation, 1)
        assert (done.text, done.stop_reason) == ("hel", "lo")


@in_loop
async def test_stop_token_id_ends_and_is_named_but_not_shown() -> None:
    async with engine() as one:
        done = await answer(one, "x", params(stop_token_ids=(ord("l"),)), forced_ids=b"hello")
        assert (done.text, done.finish, done.stop_reason) == ("he", FinishReason.STOP, ord("l"))
        assert bytes(done.token_ids) == b"hel"


@pytest.mark.parametrize("ignores", [False, True])
def test_eos_ends_the_answer_unless_ignored(ignores: bool) -> None:
    @in_loop
    async def run() -> None:
        async with engine() as one:
            done = await answer(one, "x", params(ignore_eos=ignores), forced_ids=(104, 105, 257, 104))
            assert done.finish is (FinishReason.LENGTH if ignores else FinishReason.STOP)
            assert done.stop_reason is None
            assert len(done.token_ids) == (8 if ignores else 3)
            assert done.text.startswith("hih" if ignores else "hi")

    run()


@in_loop
async def test_text_code_point_across_tokens_is_never_split() -> None:
    async with engine() as one:
        text = "aé漢🙂"
        ids = tuple(text.encode())
        generation = one.generate("r", [1], params(max_tokens=len(ids)), forced_ids=ids)
        pieces = [delta.text async for delta in generation]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)


@in_loop
async def test_text_code_point_cut_off_by_the_end_is_replaced() -> None:
    async with engine() as one:
        done = await answer(one, "x", params(max_tokens=2), forced_ids="漢".encode())
        assert done.text == "\ufffd"


@in_loop
async def test_slow_reader_gets_few_merged_deltas() -> None:
    async with engine() as one:
        generation = one.generate("r", [1], params(max_tokens=300, logprobs=1, seed=1))
        await until(lambda: one.stats().scheduler.finished["length"] == 1)
        await asyncio.sleep(0.01)
        deltas = [delta async for delta in generation]
        assert [len(delta.token_ids) for delta in deltas] == [MAX_MERGED_TOKENS, 300 - MAX_MERGED_TOKENS]
        assert [delta.finish for delta in deltas] == [None, FinishReason.LENGTH]
        for delta in deltas:
            assert [entry.token_id for entry in delta.logprobs or []] == delta.token_ids
        (whole,) = await collect(one.generate("s", [1], params(max_tokens=300, logprobs=1, seed=1)), 1)
        assert whole.text == "".join(delta.text for delta in deltas)


@in_loop
async def test_stop_string_inside_accepted_drafts_drops_what_follows() -> None:
    text = b"hello world, hello again"

    def draft(request_id: str, tokens: list[int], most: int) -> list[int]:
        return list(text[len(tokens) - 1 :][:most])

    one = AsyncEngine(EngineConfig(), load=fake_parts, drafter=draft)
    async with one:
        wanted = params(stop=("o w",), max_tokens=20, logprobs=0)
        (done,) = await collect(one.generate("r", [1], wanted, forced_ids=text), 1)
        assert (done.text, done.stop_reason, bytes(done.token_ids)) == ("hell", "o w", b"hello w")
        assert done.usage is not None
        assert done.usage.completion_tokens == len(done.logprobs or []) == 7
        assert one.stats().scheduler.accepted_tokens > 7


@in_loop
async def test_logprobs_and_logits_have_one_entry_per_token_also_after_a_stop_string() -> None:
    async with engine() as one:
        wanted = params(stop=("lo",), logprobs=2)
        done = await answer(one, "x", wanted, forced_ids=b"hello world", return_logits=True)
        assert done.logprobs is not None
        assert len(done.token_ids) == len(done.logprobs) == len(done.logits) == 5
        assert done.logits.shape[1] == one.info.vocab_size
        assert all(len(entry.top) == 2 for entry in done.logprobs)


@in_loop
async def test_max_tokens_none_runs_to_the_end_of_the_context() -> None:
    async with engine(max_model_len=40) as one:
        done = await answer(one, "0123456789", params(max_tokens=None))
        assert len(done.token_ids) == 30
        assert done.finish is FinishReason.LENGTH


@in_loop
async def test_generate_refuses_at_the_call() -> None:
    async with engine(max_model_len=32) as one:
        for prompt in ([], [1] * 32, [999]):
            with pytest.raises(RequestError):
                one.generate("r", prompt, GREEDY)
        for bad in ({"max_tokens": 0}, {"temperature": -1.0}, {"n": 0}, {"stop_token_ids": (999,)}):
            with pytest.raises(RequestError) as caught:
                one.generate("r", [1], params(**bad))
            assert caught.value.param in bad
        await one.check()


@in_loop
async def test_generate_beyond_max_queue_is_refused_whole() -> None:
    gate = Gate()
    async with engine(gate, max_queue=3) as one:
        with pytest.raises(OverloadedError):
            one.generate("r", [1], params(n=4))
        assert one.stats().waiting == 0


@pytest.mark.parametrize("where", ["queued", "prefill", "decode"])
def test_closed_stream_frees_everything(where: str) -> None:
    @in_loop
    async def run() -> None:
        gate = Gate()
        async with engine(gate, max_step_tokens=8, max_step_rows=1) as one:
            blocker = one.generate("blocker", [1], params(max_tokens=500))
            victim = blocker
            if where == "queued":
                victim = one.generate("victim", [2], params(max_tokens=500))
            elif where == "prefill":
                await blocker.aclose()
                victim = one.generate("victim", [2] * 60, params(max_tokens=500))
            for _ in range(3):
                gate.let_one_through()
            await until(lambda: one.stats().scheduler.steps >= 3)
            await victim.aclose()
            await victim.aclose()
            assert [delta async for delta in victim] == []
            gate.open()
            await until(lambda: one.stats().scheduler.finished["abort"] >= 1)
            await blocker.aclose()
            await until(lambda: one.stats().running + one.stats().waiting == 0)
            await one.check()
            assert one.stats().cache.free_blocks == one.stats().cache.num_blocks

    run()


@in_loop
async def test_cancelled_reader_aborts_at_once() -> None:
    gate = Gate()
    async with engine(gate) as one:
        task = asyncio.create_task(collect(one.generate("r", [1], params(max_tokens=1000)), 1))
        await until(lambda: one.stats().scheduler.steps == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await until(lambda: one.stats().scheduler.finished["abort"] == 1)
        await one.check()


@in_loop
async def test_dropped_stream_is_aborted_by_its_finaliser() -> None:
    async with engine() as one:
        one.generate("dropped", [1], params(max_tokens=2000))
        gc.collect()
        await until(lambda: one.stats().scheduler.finished["abort"] == 1)
        await one.check()


@in_loop
async def test_backend_failure_ends_the_stream_with_an_error_and_readiness() -> None:
    async with engine(Gate(), max_restarts=0) as one:
        backend: Any = one._started()[0].backend
        backend._fail_at_step = backend.num_runs + 1
        (done,) = await collect(one.generate("r", [1], GREEDY), 1)
        assert done.finish is FinishReason.ERROR
        assert "fail_at_step" in (done.error or "")
        assert not one.ready
        assert "fail_at_step" in (one.failed or "")
        with pytest.raises(BackendError):
            one.generate("late", [1], GREEDY)
        await one.check()


@in_loop
async def test_close_with_drain_lets_open_streams_end() -> None:
    gate = Gate()
    async with engine(gate) as one:
        generation = one.generate("r", [1], GREEDY)
        closing = asyncio.create_task(one.close(drain_s=WAIT_S))
        await asyncio.sleep(0)
        assert not one.ready
        with pytest.raises(OverloadedError) as caught:
            one.generate("late", [1], GREEDY)
        assert caught.value.status == 503
        gate.open()
        (done,) = await collect(generation, 1)
        assert done.finish is FinishReason.LENGTH
        await closing


@in_loop
async def test_close_during_a_drain_aborts_the_rest() -> None:
    gate = Gate()
    async with engine(gate) as one:
        generation = one.generate("r", [1], params(max_tokens=2000))
        draining = asyncio.create_task(one.close(drain_s=1000.0))
        await until(lambda: one.stats().scheduler.steps == 1)
        gate.open()
        await one.close()
        await draining
        (done,) = await collect(generation, 1)
        assert done.finish is FinishReason.ABORT


@in_loop
async def test_not_started_engine_is_not_ready_and_says_so() -> None:
    one = AsyncEngine(EngineConfig(backend="fake"))
    assert not one.ready
    with pytest.raises(BackendError, match="not started"):
        one.generate("r", [1], GREEDY)
    await one.close()


@in_loop
async def test_start_with_a_failing_load_or_warm_up_raises_and_closes() -> None:
    with pytest.raises(ConfigError, match="backend"):
        await AsyncEngine(EngineConfig(backend="tpu")).start()
    one = AsyncEngine(EngineConfig(), load=lambda config: fake_parts(config, fail_at_step=1))
    with pytest.raises(BackendError):
        await one.start()
    assert not one.ready
    await one.close()


@in_loop
async def test_encode_chat_uses_the_template_and_keeps_special_text_as_text() -> None:
    async with engine() as one:
        ids = await one.encode_chat([{"role": "user", "content": "hi<|im_end|>"}])
        assert ids[0] == 258
        assert ids.count(257) == 1
        long = await one.encode_chat([{"role": "user", "content": "é" * 3000}])
        assert bytes(i for i in long if i < 256).decode().count("é") == 3000


@in_loop
async def test_encode_chat_without_a_template_is_refused() -> None:
    parts = fake_parts(EngineConfig())
    one = AsyncEngine.from_parts(parts.backend, parts.tokenizer, None, EngineConfig(), "bare")
    async with one:
        assert not one.info.has_chat_template
        assert one.info.model == "bare"
        with pytest.raises(RequestError, match="no chat template"):
            await one.encode_chat([{"role": "user", "content": "hi"}])


@in_loop
async def test_encode_prompt_long_text_gives_the_same_ids() -> None:
    async with engine() as one:
        assert await one.encode_prompt("ab" * 4000) == list(b"ab" * 4000)
        assert await one.encode_prompt((1, 2)) == [1, 2]


@in_loop
async def test_answers_do_not_depend_on_the_company() -> None:
    async with engine(num_blocks=20, block_size=4, max_step_tokens=24, reserve_output=False) as one:
        prompts = [f"common beginning {i % 7}" for i in range(24)]
        wanted = [params(temperature=float(i % 2), seed=i, max_tokens=5 + i) for i in range(24)]
        alone = [(await answer(one, *pair)).token_ids for pair in zip(prompts, wanted, strict=True)]
        together = await asyncio.gather(*(answer(one, *pair) for pair in zip(prompts, wanted, strict=True)))
        assert [completion.token_ids for completion in together] == alone
        assert one.stats().scheduler.preemptions > 0
        await one.check()


def test_generation_type_is_an_async_iterator() -> None:
    assert issubclass(Generation, AsyncIterator)
