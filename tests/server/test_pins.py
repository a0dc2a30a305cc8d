"""`cache_control`, declared prefixes and what the answers say of the cache, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.server.run import ServerThread

StartServer = Callable[..., ServerThread]
SYSTEM = "You answer in verse, and never use more than a line of it. " * 4
NO_END = {"256": -100, "257": -100}


def chat(client: httpx.Client, user: str, key: str = "one", **members: Any) -> httpx.Response:
    messages = [{"role": "system", "content": SYSTEM, **members}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 2, "timings": True, "logit_bias": NO_END}
    return client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"firstlight_{name}{{")))


@pytest.fixture
def small(start_server: StartServer) -> Iterator[httpx.Client]:
    server = start_server(engine={"num_blocks": 200}, backend={"max_model_len": 1024}, max_pin_s=60.0)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def test_pin_of_a_message_keeps_its_blocks_through_other_traffic(small: httpx.Client) -> None:
    pinned = chat(small, "first", cache_control={"type": "pin", "ttl": 60}).json()
    assert pinned["timings"]["pinned_tokens"] >= len(SYSTEM) // 16 * 16
    assert metric(small, "prefix_cache_pinned_blocks") == pinned["timings"]["pinned_tokens"] // 16
    for i in range(10):
        small.post("/v1/completions", json={"prompt": f"{i}" * 900, "max_tokens": 1}).raise_for_status()
    again = chat(small, "second").json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(SYSTEM) // 16 * 16


def test_timings_name_where_a_prompt_left_what_was_cached(small: httpx.Client) -> None:
    first = chat(small, "What is it that you want to know of the sea?").json()
    assert first["timings"]["cache_miss"] in ("not_cached", "diverged", "evicted")
    other = chat(small, "What is it that you want to know of a sea? ").json()
    assert other["timings"]["cache_miss"] == "diverged"
    prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is it that you want to know of "
    num = len(small.post("/tokenize", json={"content": prompt, "parse_special": True}).json()["tokens"])
    assert other["timings"]["first_uncached_token"] == num


@pytest.mark.parametrize(
    ("control", "param"),
    [
        ({"type": "pin", "ttl": 0}, "messages[0].cache_control.ttl"),
        ({"type": "pin", "ttl": 61}, "messages[0].cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 5}, "messages[0].cache_control.type"),
        ({"type": "pin"}, "messages[0].cache_control.ttl"),
        ({"type": "pin", "ttl": 5, "scope": "all"}, "messages[0].cache_control.scope"),
        ("pin", "messages[0].cache_control"),
    ],
)
def test_wrong_cache_control_is_refused_by_name(small: httpx.Client, control: Any, param: str) -> None:
    refused = chat(small, "x", cache_control=control)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_pin_where_nothing_is_cached_is_refused(start_server: StartServer) -> None:
    server = start_server(engine={"prefix_cache": False})
    with httpx.Client(base_url=server.url, timeout=30) as client:
        refused = chat(client, "x", cache_control={"type": "pin", "ttl": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].cache_control"


def test_declared_prefix_is_cached_from_the_start_and_shared_by_keys(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM + "\n")
    server = start_server(engine={"shared_prefix": (str(path),)}, api_key=("one", "two"))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for key in ("one", "two"):
            usage = chat(client, f"{key}: a question that is long enough", key).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= len(SYSTEM) // 16 * 16
        before = metric(client, "prefix_cache_hits_total")
        answer = chat(client, "one: a question that is long enough", "two").json()
        own = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert own < len(SYSTEM) + 32, "what another key asked was a hit"
        assert metric(client, "prefix_cache_hits_total") == before + own
        assert client.get("/debug/check", headers={"Authorization": "Bearer one"}).status_code == 200
