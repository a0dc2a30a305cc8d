"""Health, readiness, metrics, tokens, keys, origins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firstlight.backend.fake import FakeBackend, StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.load import EngineParts
from firstlight.errors import ConfigError
from firstlight.server.run import ServerThread
from firstlight.types import StepPlan, StepResult
from tests.server.conftest import StartServer
from tests.server.raw import assert_idle_and_whole, connected, request_bytes, wait_until

TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}


def samples(server: ServerThread) -> dict[str, float]:
    """Every sample of /metrics by name; labels are left out, so the last of a name stands."""
    text = httpx.get(server.url + "/metrics").text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("text", ["", "héllo", "a<|im_end|>b", "\x00\t\n", "👩‍👩‍👧", "x" * 100_000])
def test_tokenize_then_detokenize_gives_the_text_back(http: httpx.Client, text: str) -> None:
    for field in ("content", "prompt", "text"):
        answer = http.post("/tokenize", json={field: text}).json()
        assert answer["count"] == len(answer["tokens"]) == len(text.encode())
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"content": text}


def test_tokenize_parses_special_tokens_only_where_asked(http: httpx.Client) -> None:
    plain = http.post("/tokenize", json={"content": "<|im_end|>"}).json()
    parsed = http.post("/tokenize", json={"content": "<|im_end|>", "parse_special": True}).json()
    assert plain["count"] == 10
    assert parsed["tokens"] == [257]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "text": "b"}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"contents": "a"}, "contents"),
        ("/tokenize", {"content": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_token_routes_refuse_wrong_fields_by_name(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_models_lists_the_served_name_and_aliases(start_server: StartServer) -> None:
    server = start_server(served_model_name="org/small", model_aliases=("small",))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        assert [model.id for model in client.models.list()] == ["org/small", "small"]
        assert client.models.retrieve("org/small").id == "org/small"
        answer = client.completions.create(model="small", prompt="x", max_tokens=1)
    assert answer.model == "org/small"


def test_index_names_every_route(http: httpx.Client) -> None:
    page = http.get("/").text
    for line in page.splitlines()[2:]:
        method, path = line.split()[:2]
        assert http.request(method, path, json={} if method == "POST" else None).status_code in (200, 400)
    assert http.head("/health").status_code == 200
    assert http.get("/version").json()["version"] in page


def test_metrics_count_what_was_served(start_server: StartServer) -> None:
    server = start_server(backend={"cost": StepCost(step_s=0.002)})
    for stream in (True, False):
        httpx.post(server.url + "/v1/completions", json={**TEXT, "prompt": "y" * 40, "stream": stream})
    httpx.post(server.url + "/v1/completions", json={"prompt": 5})
    wait_until(lambda: samples(server)["firstlight_request_success_total"] == 2, "both records")
    got = samples(server)
    assert got["firstlight_prompt_tokens_total"] == 80
    assert got["firstlight_generation_tokens_total"] == 16
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert got[f"firstlight_{histogram}_count"] == 2, histogram
    assert got["firstlight_inter_token_latency_seconds_count"] == 14
    assert got["firstlight_inter_token_latency_seconds_sum"] >= 14 * 0.002
    assert got["firstlight_prefix_cache_queries_total"] == 80
    assert got["firstlight_prefix_cache_hits_total"] == got["firstlight_prefix_cache_tier_hits_total"] == 39
    assert got["firstlight_prefix_cache_evictions_total"] == 0
    assert got["firstlight_request_errors_total"] == 1
    assert got["firstlight_num_requests_running"] == got["firstlight_num_requests_waiting"] == 0
    assert got["firstlight_kv_cache_usage_perc"] == 0


def num_aborts(server: ServerThread) -> float:
    """Aborts in all states together."""
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    return sum(sample.value for f in families for sample in f.samples if sample.name.endswith("request_aborts_total"))


def test_metrics_show_requests_while_they_run(slow_server: ServerThread) -> None:
    sock = connected(slow_server)
    sock.sendall(request_bytes("/v1/completions", {**TEXT, "max_tokens": 1000}))
    wait_until(lambda: samples(slow_server)["firstlight_num_requests_running"] == 1, "it to run")
    got = samples(slow_server)
    assert 0 < got["firstlight_kv_cache_usage_perc"] <= 1
    assert got["firstlight_kv_cache_blocks_used"] >= 1
    aborts = num_aborts(slow_server)
    sock.close()
    assert_idle_and_whole(slow_server)
    wait_until(lambda: num_aborts(slow_server) == aborts + 1, "the abort to be counted")


def test_full_queue_is_429_with_retry_after(start_server: StartServer) -> None:
    server = start_server(engine={"max_queue": 1, "max_step_rows": 1}, backend={"cost": StepCost(step_s=0.01)})
    socks = [connected(server) for _ in range(2)]
    for at, sock in enumerate(socks):
        sock.sendall(request_bytes("/v1/completions", {**TEXT, "max_tokens": 1000}))
        wait_until(lambda at=at: server.engine.stats().waiting == at, "all but the first to wait")
        wait_until(lambda: server.engine.stats().running == 1, "one to run")
    answer = httpx.post(server.url + "/v1/completions", json=TEXT)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "overloaded_error"
    for sock in socks:
        sock.close()
    assert_idle_and_whole(server)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "bearer first", "Basic first", "Bearer first,second"]
)
def test_key_missing_or_wrong_is_401(keyed_server: ServerThread, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    expected = 200 if header == "bearer first" else 401
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/debug/check"),
    ):
        body = {"prompt": "x", "max_tokens": 1} if "completions" in path else {"content": "x"}
        answer = httpx.request(
            method, keyed_server.url + path, headers=headers, json=body if method == "POST" else None
        )
        assert answer.status_code == expected
        if expected == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.fixture(scope="module")
def keyed_server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> ServerThread:
    """Wants one of three keys, one of them from a file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# ours\nfrom-file\n\n")
    return start_server(api_key=("first", "second"), api_key_file=str(path))


def test_keys_of_all_sources_work_and_open_routes_need_none(keyed_server: ServerThread) -> None:
    for key in ("first", "second", "from-file"):
        with openai.OpenAI(base_url=keyed_server.url + "/v1", api_key=key) as client:
            assert client.completions.create(model="fake", prompt="x", max_tokens=1).choices
    for path in ("/health", "/ready", "/metrics", "/version", "/"):
        assert httpx.get(keyed_server.url + path).status_code == 200


def test_keys_do_not_share_cached_prefixes(keyed_server: ServerThread) -> None:
    def cached(key: str) -> int:
        answer = httpx.post(
            keyed_server.url + "/v1/completions",
            json={"prompt": "a prompt of more than one block of sixteen", "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}"},
        )
        count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached("first"), cached("second"), cached("first"), cached("second")] == [0, 0, 41, 41]


def test_unusable_key_options_are_config_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for options in ({"api_key": ("",)}, {"api_key_file": str(tmp_path / "none")}, {"api_key_file": str(empty)}):
        with pytest.raises(ConfigError, match="api_key"):
            ServerThread(lambda: AsyncEngine(EngineConfig()), ServerConfig(port=0, **options)).__enter__()  # type: ignore[arg-type]


def test_foreign_origin_is_refused_and_gets_no_cors_headers(http: httpx.Client, server: ServerThread) -> None:
    foreign = http.post("/v1/completions", json=TEXT, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    assert http.post("/v1/completions", json=TEXT, headers={"Origin": server.url}).status_code == 200
    rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert http.post("/v1/completions", json=TEXT, headers=rebound).status_code == 403
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert http.options("/v1/completions", headers=preflight).status_code == 405


def test_allowed_origin_gets_cors_headers(start_server: StartServer) -> None:
    server = start_server(cors_origins=("http://app.example",))
    headers = {
        "Origin": "http://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    preflight = httpx.options(server.url + "/v1/completions", headers=headers)
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    answer = httpx.post(server.url + "/v1/completions", json=TEXT, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "http://app.example"
    assert httpx.post(server.url + "/v1/completions", json=TEXT, headers={"Origin": "null"}).status_code == 403


def test_debug_routes_can_be_switched_off(start_server: StartServer) -> None:
    server = start_server(debug_routes="off")
    assert httpx.get(server.url + "/debug/check").status_code == 404


class StallingBackend(FakeBackend):
    """Steps wait while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def run(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        return super().run(plan)


def parts_with(backend: FakeBackend) -> EngineParts:
    """The fake parts over another backend."""
    parts = fake_parts(EngineConfig(backend="fake"))
    return type(parts)(
        backend=backend, tokenizer=parts.tokenizer, chat_template=parts.chat_template, model_name=parts.model_name
    )


def test_ready_says_no_while_steps_stall_and_recovers() -> None:
    backend = StallingBackend()
    engine = AsyncEngine(EngineConfig(backend="fake"), load=lambda config: parts_with(backend))
    with ServerThread(lambda: engine, ServerConfig(port=0, stall_s=0.05)) as server:
        assert httpx.get(server.url + "/ready").status_code == 200
        backend.gate.clear()
        sock = connected(server)
        sock.sendall(request_bytes("/v1/completions", TEXT))
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503, "the stall to be seen")
        assert "no step" in httpx.get(server.url + "/ready").json()["status"]
        assert httpx.get(server.url + "/health").status_code == 200
        backend.gate.set()
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 200, "recovery")
        sock.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_failing_core_ends_requests_with_an_error_and_readiness(stream: bool) -> None:
    backend = FakeBackend(cost=StepCost(step_s=0.001))
    engine = AsyncEngine(EngineConfig(backend="fake", max_restarts=0), load=lambda config: parts_with(backend))
    with ServerThread(lambda: engine, ServerConfig(port=0)) as server:
        backend._fail_at_step = backend.num_runs + 20
        answer = httpx.post(server.url + "/v1/completions", json={**TEXT, "max_tokens": 500, "stream": stream})
        if stream:
            assert answer.status_code == 200
            assert '"code":"backend_error"' in answer.text.strip().split("\n\n")[-1]
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "backend_error"
        assert httpx.get(server.url + "/ready").status_code == 503
        assert httpx.get(server.url + "/health").status_code == 503
        later = httpx.post(server.url + "/v1/completions", json=TEXT)
        assert later.status_code == 500
        assert "has failed" in later.json()["error"]["message"]
