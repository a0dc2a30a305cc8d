"""The default model held to schemas and calls: finished answers are valid, and the same by another road."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from firstlight import Engine, SamplingParams
from firstlight.errors import RequestError
from firstlight.types import FinishReason, GrammarSpec

DATA = Path(__file__).resolve().parents[1] / "data" / "json_schemas.jsonl"


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    with Engine(str(smollm2_path), max_model_len=1024) as one:
        yield one


def params(schema: object, seed: int) -> SamplingParams:
    grammar = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    return SamplingParams(grammar=grammar, max_tokens=96, temperature=0.7, seed=seed)


def test_answers_to_real_schemas_are_valid_alone_and_together(engine: Engine) -> None:
    schemas = [json.loads(line)["schema"] for line in DATA.read_text().splitlines()]
    prompts = ["Answer in JSON:"] * len(schemas)
    wanted = [params(schema, seed) for seed, schema in enumerate(schemas)]
    together = engine.generate(prompts, wanted)
    alone = engine.generate(prompts[0], wanted[0])
    assert alone[0].token_ids == together[0].token_ids
    num_finished = 0
    for schema, completion in zip(schemas, together, strict=True):
        assert completion.error is None
        if completion.finish is FinishReason.STOP:
            num_finished += 1
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(completion.text))
    assert num_finished >= len(schemas) // 3


def test_repetition_that_would_stall_a_step_is_refused(engine: Engine) -> None:
    grammar = GrammarSpec(kind="regex", text="a{1000000}")
    with pytest.raises(RequestError, match=r"grammar.* too complex"):
        engine.generate("x", SamplingParams(grammar=grammar))
