from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from firstlight.cache import POLICIES
from firstlight.errors import ConfigError
from firstlight.scheduler import StepLoad
from firstlight.simulate import (
    Hardware,
    Setup,
    Trace,
    TraceRequest,
    hardware_names,
    read_hardware,
    read_trace,
    replay_blocks,
    replay_optimum,
    roofline,
    simulate,
)

SIZE = 8
HARDWARE = Hardware(
    name="toy", assumptions={}, step_s=0.01, token_s=0.001, context_s=0.0, pair_s=0.0, kv_tokens=4096, max_step_rows=8
)


def request(arrival_s: float, blocks: list[int], output_tokens: int = 4) -> TraceRequest:
    return TraceRequest(arrival_s, len(blocks) * SIZE, output_tokens, blocks)


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace(list(requests), SIZE, 1 + max(block for one in requests for block in one.blocks))


def random_trace(seed: int, num: int = 120) -> Trace:
    """Conversations that grow, in random order: block ids follow from the path, as in recorded traces."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[0]]
    ids = 1
    requests = []
    for i in range(num):
        path = list(rng.choice(paths))
        for _ in range(rng.randrange(1, 4)):
            path.append(ids)
            ids += 1
        paths.append(path)
        requests.append(request(i * 0.05, path))
    return trace_of(*requests)


@pytest.mark.parametrize("policy", [*POLICIES, "optimum"])
def test_replay_unbroken_leading_run_counts_as_hits(policy: str) -> None:
    trace = trace_of(request(0, [0, 1, 2]), request(1, [0, 1, 3]), request(2, [0, 1, 2]))
    found = replay_optimum(trace, 10) if policy == "optimum" else replay_blocks(trace, policy, 10)
    assert (found.hits, found.blocks) == (2 + 3, 9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache_blocks", [8, 20, 60])
def test_replay_no_policy_beats_the_optimum(policy: str, cache_blocks: int) -> None:
    trace = random_trace(cache_blocks)
    assert replay_blocks(trace, policy, cache_blocks).hits <= replay_optimum(trace, cache_blocks).hits


def test_replay_request_longer_than_the_cache_finds_and_leaves_nothing() -> None:
    trace = trace_of(request(0, [0, 1]), request(1, [0, 1, 2, 3]), request(2, [0, 1]))
    assert replay_blocks(trace, "lru", 3).hits == 2
    assert replay_optimum(trace, 3).hits == 2


def test_replay_replicas_keep_a_conversation_together() -> None:
    trace = trace_of(request(0, [0]), request(1, [1]), request(2, [0, 2]), request(3, [1, 3]))
    assert replay_blocks(trace, "lru", 3, num_replicas=2).hits == 2


def test_simulate_one_request_takes_what_the_hardware_says() -> None:
    timed = simulate(trace_of(request(0.0, [0, 1], output_tokens=3)), Setup(hardware=HARDWARE))
    (record,) = timed.level.records
    assert record.ttft_s == pytest.approx(0.01 + 16 * 0.001)
    assert record.gaps_s == pytest.approx([0.011, 0.011])
    assert record.end_s == record.times_s[-1]
    assert timed.num_steps == 3


def test_simulate_cached_prefix_is_not_computed_again() -> None:
    timed = simulate(trace_of(request(0.0, [0, 1]), request(1.0, [0, 1, 2])), Setup(hardware=HARDWARE))
    first, second = timed.level.records
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * SIZE)
    assert second.ttft_s == pytest.approx(0.01 + SIZE * 0.001)


@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_simulate_every_request_gets_its_tokens(mode: str, num_replicas: int) -> None:
    trace = random_trace(1)
    setup = Setup(hardware=HARDWARE, cache_blocks=40, num_replicas=num_replicas, mode=mode, policy="conversation")
    timed = simulate(trace, setup)
    longest = sum(one.input_tokens + 1 > 40 * SIZE for one in trace.requests)
    assert timed.refused == longest
    assert len(timed.level.records) == len(trace.requests) - longest
    assert all(record.finish == "length" and record.completion_tokens > 0 for record in timed.level.records)
    assert 0 < timed.occupancy_mean <= timed.occupancy_max <= 1


def test_simulate_same_input_gives_the_same_times() -> None:
    setup = Setup(hardware=HARDWARE, cache_blocks=40, num_replicas=2)
    first, second = (simulate(random_trace(2), setup).level for _ in range(2))
    assert [r.times_s for r in first.records] == [r.times_s for r in second.records]


def test_simulate_second_replica_lowers_latency_under_load() -> None:
    trace = trace_of(*(request(0.0, [i], output_tokens=20) for i in range(32)))
    one, two = (simulate(trace, Setup(hardware=HARDWARE, num_replicas=num)).level.wall_s for num in (1, 2))
    assert two < 0.75 * one


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_hardware_is_its_arithmetic(name: str) -> None:
    assert read_hardware(name) == roofline(*name.split("-"))


def test_hardware_weights_hide_as_much_arithmetic() -> None:
    hardware = read_hardware("h100-8b")
    decode, prefill = hardware.run_s(StepLoad(rows=1, tokens=1)), hardware.run_s(StepLoad(rows=1, tokens=2048))
    assert decode == pytest.approx(hardware.step_s + hardware.weights_s)
    assert prefill == pytest.approx(hardware.step_s + 2048 * hardware.token_s)


def test_read_hardware_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        read_hardware("abacus")
    assert "h100-70b" in str(caught.value.hint)


def test_read_trace_sorts_by_arrival_and_keeps_sessions_apart(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp_s": 5.0, "input_tokens": 20, "output_tokens": 2, "block_size": 8, "block_runs": [[0, 2]]},
        {"timestamp_s": 3.0, "input_tokens": 20, "output_tokens": 2, "block_size": 8, "block_runs": [[0, 1], [7, 2]]},
        {"timestamp_s": 4.0, "input_tokens": 9, "block_size": 8, "block_runs": [[0, 1]], "session": "s"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(str(file), speed=2.0)
    assert [one.arrival_s for one in trace.requests] == [0.0, 0.5, 1.0]
    assert [one.blocks for one in trace.requests] == [[0, 1, 2], [3], [0, 4]]
    assert (trace.block_size, trace.num_blocks, trace.num_block_ids) == (8, 6, 5)


def test_read_trace_row_that_is_no_request_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_tokens": 3}\n{"input_tokens": "three"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(str(file))
