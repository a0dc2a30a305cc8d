"""Constrained answers through the engine: the same by every road, and a failure that stays its own request's."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

from firstlight.config import EngineConfig
from firstlight.engine import AsyncEngine, collect
from firstlight.engine.fake import fake_parts
from firstlight.errors import RequestError
from firstlight.types import FinishReason, GrammarSpec, SamplingParams
from tests.unit.engine.test_frontend import answer, engine, in_loop

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "size": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    }
)
JSON = GrammarSpec(kind="json_schema", text=SCHEMA)
WORD = GrammarSpec(kind="regex", text="[a-f]{3,40}!")


def params(grammar: GrammarSpec | None, seed: int, **changes: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 1.0 if seed % 2 else 0.0, "max_tokens": 120}
    return SamplingParams(seed=seed, grammar=grammar, **chosen | changes)


def guesses(num: int) -> Any:
    """A drafter that is often right inside JSON and never looks at the grammar."""

    def draft(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        rng = random.Random(len(tokens))
        return [*rng.choice([b'": "', b'", "', b"red", b"!!!", b"abc", b'{"name', b'}}"'])][: min(num, max_drafts)]

    return draft


WANTED = [params(grammar, seed, n=1 + seed % 2) for seed in range(8) for grammar in (JSON, WORD, None)]


async def answers(*, drafter: Any = None, together: bool = True, **config: Any) -> list[list[Any]]:
    async with AsyncEngine(EngineConfig(**config), load=fake_parts, drafter=drafter) as one:

        async def ask(at: int) -> list[Any]:
            ids = await one.encode_prompt("a shared beginning " + "x" * (at % 5))
            await one.prepare(WANTED[at])
            got = await collect(one.generate(f"{at}", ids, WANTED[at]), WANTED[at].n)
            return [(c.token_ids, c.finish, c.error) for c in got]

        if together:
            got = await asyncio.gather(*(ask(at) for at in range(len(WANTED))))
        else:
            got = [await ask(at) for at in range(len(WANTED))]
        await one.check()
        return got


@in_loop
async def test_constrained_answers_are_the_same_by_every_road_and_valid() -> None:
    alone = await answers(together=False, prefix_cache=False, block_size=16)
    for at, choices in enumerate(alone):
        for ids, finish, error in choices:
            assert error is None
            text = bytes(i for i in ids if i < 256).decode()
            if finish is FinishReason.STOP and WANTED[at].grammar is JSON:
                document = json.loads(text)
                assert document.keys() == {"name", "tags", "size"}
                assert set(document["tags"]) <= {"red", "green", "blue"}
            if finish is FinishReason.STOP and WANTED[at].grammar is WORD:
                assert re.fullmatch(WORD.text, text)
    assert sum(finish is FinishReason.STOP for choices in alone for _, finish, _ in choices) > len(WANTED) // 2
    roads: list[dict[str, Any]] = [
        {},
        {"block_size": 4, "num_blocks": 48},
        {"block_size": 4, "max_step_tokens": 24, "max_step_rows": 5},
        {"drafter": guesses(3)},
        {"drafter": guesses(6), "block_size": 4, "num_blocks": 60},
    ]
    for road in roads:
        assert await answers(**road) == alone, road


@in_loop
async def test_preemption_keeps_the_place_in_the_grammar() -> None:
    async with engine(block_size=4, num_blocks=48, reserve_output=False) as one:
        wanted = [params(JSON, seed, max_tokens=80) for seed in range(12)]
        got = await asyncio.gather(*(answer(one, f"p{seed}", wanted[seed]) for seed in range(12)))
        assert one.stats().scheduler.preemptions > 0
        for completion in got:
            assert completion.finish in (FinishReason.STOP, FinishReason.LENGTH)
            if completion.finish is FinishReason.STOP:
                json.loads(completion.text)


@in_loop
async def test_max_tokens_inside_an_answer_ends_with_length() -> None:
    async with engine() as one:
        cut = await answer(one, "x", params(JSON, 0, max_tokens=5))
        assert (cut.finish, len(cut.token_ids)) == (FinishReason.LENGTH, 5)


@in_loop
async def test_ignore_eos_goes_on_as_long_as_the_grammar_allows_more() -> None:
    async with engine() as one:
        grammar = GrammarSpec(kind="regex", text="[ab]{1,50}")
        done = await answer(one, "x", params(grammar, 1, ignore_eos=True))
        assert done.finish is FinishReason.STOP
        assert len(done.text) == 50


@in_loop
async def test_forced_ids_move_the_grammar_and_one_outside_it_ends_the_request_alone() -> None:
    async with engine() as one:
        inside = await answer(one, "x", params(WORD, 0), forced_ids=list(b"abc"))
        assert inside.text.startswith("abc")
        assert re.fullmatch(WORD.text, inside.text)
        beside = asyncio.create_task(answer(one, "y", params(JSON, 1)))
        deltas = [d async for d in one.generate("r", [1], params(WORD, 0), forced_ids=list(b"abz"))]
        assert deltas[-1].finish is FinishReason.ERROR
        assert deltas[-1].error == "token 122 is outside the grammar"
        assert deltas[-1].error_code == "invalid_request"
        assert (await beside).finish is FinishReason.STOP
        await one.check()
        assert one.stats().running == 0


@in_loop
async def test_logprobs_are_the_models_own() -> None:
    async with engine() as one:
        free = await answer(one, "x", params(None, 0, logprobs=2, max_tokens=1))
        held = await answer(one, "x", params(WORD, 0, logprobs=2, max_tokens=1))
        assert free.logprobs is not None
        assert held.logprobs is not None
        assert held.logprobs[0].top == free.logprobs[0].top


@in_loop
async def test_prepare_a_bad_grammar_is_refused_at_the_call() -> None:
    async with engine() as one:
        bad = params(GrammarSpec(kind="regex", text="(", field="guided_regex"), 0)
        with pytest.raises(RequestError, match="guided_regex"):
            await one.prepare(bad)
        with pytest.raises(RequestError, match="guided_regex"):
            one.generate("r", [1], bad)
        assert one.stats().waiting == one.stats().running == 0
