from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from firstlight import Completion, ConfigError, Engine, EngineConfig, FinishReason, RequestError, SamplingParams
from firstlight.engine.fake import fake_parts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine(backend="fake", max_queue=8) as one:
        yield one


def test_generate_many_prompts_answers_in_order_as_one_by_one(engine: Engine) -> None:
    prompts = ["a", "bb", [1, 2, 3], "dddd", "e" * 50] * 4
    together = engine.generate(prompts, GREEDY)
    assert [c.token_ids for c in together] == [engine.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    assert all(c.finish is FinishReason.LENGTH for c in together)
    engine.check()


def test_generate_n_choices_follow_each_other(engine: Engine) -> None:
    wanted = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True)
    completions = engine.generate(["a", "b"], [wanted, GREEDY])
    assert [c.choice for c in completions] == [0, 1, 0]


def test_generate_params_of_another_length_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="list of 1 for 2 prompts"):
        engine.generate(["a", "b"], [GREEDY])


def test_generate_no_prompts_is_an_empty_list(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []


def test_generate_one_bad_prompt_raises_its_error_and_ends_the_others(engine: Engine) -> None:
    with pytest.raises(RequestError, match="`prompt` is 9999 tokens"):
        engine.generate(["fine", [1] * 9999, "fine too"], GREEDY)
    engine.check()
    assert engine.generate("fine", GREEDY)[0].finish is FinishReason.LENGTH


def test_stream_pieces_join_to_the_answer(engine: Engine) -> None:
    whole = engine.generate("hello", GREEDY)[0]
    assert "".join(delta.text for delta in engine.stream("hello", GREEDY)) == whole.text


def test_stream_left_early_is_aborted(engine: Engine) -> None:
    deltas = engine.stream("hello", SamplingParams(max_tokens=2000, ignore_eos=True))
    next(deltas)
    deltas.close()
    engine.check()
    assert engine.stats().scheduler.finished["abort"] >= 1


def test_stream_refuses_at_the_call(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.stream([1] * 9999, GREEDY)


def test_chat_and_stream_of_messages_agree(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (whole,) = engine.chat(messages, GREEDY)
    assert "".join(delta.text for delta in engine.stream(messages, GREEDY)) == whole.text


def test_chat_over_several_conversations_answers_in_their_order(engine: Engine) -> None:
    several = [[{"role": "user", "content": text}] for text in ("hi", "who", "and then")]
    alone = [engine.chat(messages, GREEDY)[0].text for messages in several]
    assert [answer.text for answer in engine.chat(several, GREEDY)] == alone


@pytest.mark.parametrize("messages", [[], ["hi"], [[]], [{"role": "user"}, []], [{"role": "nobody"}]])
def test_chat_refuses_what_is_no_conversation(engine: Engine, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        engine.chat(messages, GREEDY)


def test_generate_from_many_threads_answers_each_its_own(engine: Engine) -> None:
    alone = [engine.generate(f"thread {i}", GREEDY)[0].text for i in range(6)]
    found: dict[int, Completion] = {}

    def ask(i: int) -> None:
        found[i] = engine.generate(f"thread {i}", GREEDY)[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i].text for i in range(6)] == alone


def test_unknown_option_fails_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"`block_sizes` is not an option.*did you mean `block_size`"):
        Engine(backend="fake", block_sizes=4)


def test_failing_load_raises_and_leaves_no_thread() -> None:
    def load(config: EngineConfig) -> None:
        raise ConfigError("no such model")

    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no such model"):
        Engine(load=load)  # type: ignore[arg-type]
    assert set(threading.enumerate()) <= before


def test_close_twice_is_quiet() -> None:
    engine = Engine(load=fake_parts)
    engine.close()
    engine.close()


def test_engine_that_is_dropped_ends_its_threads() -> None:
    before = set(threading.enumerate())
    engine = Engine(load=fake_parts)
    engine.generate("a", GREEDY)
    started = set(threading.enumerate()) - before
    assert started
    del engine
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread.name


def test_stream_keeps_its_engine_until_it_is_left() -> None:
    stream = Engine(load=fake_parts).stream("a", GREEDY)
    gc.collect()
    assert "".join(delta.text for delta in stream)


def test_closed_engine_refuses_by_name() -> None:
    engine = Engine(load=fake_parts)
    stream = engine.stream("a", GREEDY)
    next(stream)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate("a", GREEDY)
    stream.close()


@pytest.mark.parametrize("ending", ["", "import itertools; held = itertools.cycle([engine])", "del engine"])
def test_program_that_closes_nothing_ends_in_silence(ending: str, smollm2_path: Path) -> None:
    """Native objects left to the interpreter's end are reported there as leaks, and files may be cut short."""
    lines = [
        "from firstlight import Engine, SamplingParams",
        f"engine = Engine({str(smollm2_path)!r}, kv_memory_mb=64)",
        "stream = engine.stream('Once', SamplingParams(max_tokens=400, ignore_eos=True))",
        "next(stream)",
        ending,
        "print('end')",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
