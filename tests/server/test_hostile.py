"""Hundreds of hostile requests: the server stays up, blames the client, answers as before (benchmarks/hostile.py)."""

from __future__ import annotations

import pytest

from benchmarks.hostile import GOOD, request_of, run
from tests.server.conftest import StartServer


@pytest.mark.parametrize("seed", [11, 12])
def test_hostile_requests_leave_no_trace(start_server: StartServer, seed: int) -> None:
    result = run(start_server(read_timeout_s=2.0).url, range(500), seed)
    assert result["findings"] == [], f"seed {seed}"
    assert {"200", "400", "404", "431"} <= set(result["statuses"])


def test_request_follows_from_seed_and_index() -> None:
    assert request_of(1, 5) == request_of(1, 5) != request_of(1, 6)
    assert {route for route in GOOD if any(route.encode() in request_of(1, i)[0] for i in range(200))} == set(GOOD)
