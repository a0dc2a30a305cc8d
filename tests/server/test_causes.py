"""Causes of real requests over HTTP: they sum to what was measured, and name what was in the way."""

from __future__ import annotations

import json
import socket
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.__main__ import main
from firstlight.backend.fake import StepCost
from firstlight.measure.causes.advice import FAMILIES
from firstlight.measure.percentile import percentile
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import connected, read_all, read_briskly, request_bytes, wait_until

TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def timed_server(start_server: StartServer) -> ServerThread:
    """Steps take 2 ms and 0.05 ms a token."""
    return start_server(
        backend={"cost": StepCost(step_s=0.002, token_s=0.00005)},
        engine={"num_blocks": 1024, "max_step_tokens": 128, "max_model_len": 8192},
    )


def sent(server: ServerThread, name: str, **fields: Any) -> None:
    httpx.post(server.url + "/v1/completions", json=TEXT | fields, headers={"x-request-id": name}, timeout=60)


def explained(server: ServerThread, name: str) -> Any:
    def answer() -> httpx.Response:
        return httpx.get(f"{server.url}/debug/requests/{name}")

    wait_until(lambda: answer().status_code == 200, f"{name} to be kept")
    return answer().json()


def assert_whole(view: Any) -> None:
    spans = view["spans"]
    assert spans[0][1] == 0
    assert spans[-1][2] == view["e2e_ms"]
    assert all(before[2] == after[1] for before, after in pairwise(spans))
    assert sum(view["totals_ms"].values()) == pytest.approx(view["e2e_ms"], abs=0.1)
    if view["ttft_ms"]:
        assert sum(view["ttft_totals_ms"].values()) == pytest.approx(view["ttft_ms"], abs=0.1)


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"n": 3}, {"max_tokens": 1}, {"prompt": ["a", "bc"]}])
def test_causes_sum_to_the_requests_time(timed_server: ServerThread, fields: dict[str, Any]) -> None:
    sent(timed_server, "sums", **fields)
    view = explained(timed_server, "sums")
    assert_whole(view)
    assert {"receive", "parse"} <= view["totals_ms"].keys()
    assert any(cause.startswith(("prefill", "machine")) for cause in view["totals_ms"])


def test_causes_of_chat_name_template_and_tokeniser(timed_server: ServerThread) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    httpx.post(timed_server.url + "/v1/chat/completions", json=body, headers={"x-request-id": "chat"})
    view = explained(timed_server, "chat")
    assert_whole(view)
    assert {"template", "tokenise"} <= view["totals_ms"].keys()


def test_causes_agree_with_timings_and_usage(timed_server: ServerThread) -> None:
    body = TEXT | {"stream": False, "timings": True, "prompt": "y" * 40}
    answer = httpx.post(timed_server.url + "/v1/completions", json=body, headers={"x-request-id": "agree"}).json()
    view = explained(timed_server, "agree")
    assert (view["prompt_tokens"], view["output_tokens"]) == (40, 8)
    assert view["id"] == answer["id"]
    assert view["ttft_ms"] == pytest.approx(answer["timings"]["ttft_ms"], abs=1)
    assert view["e2e_ms"] >= answer["timings"]["e2e_ms"]


def test_refused_request_has_causes_too(timed_server: ServerThread) -> None:
    sent(timed_server, "refused", prompt="x" * 100_000)
    view = explained(timed_server, "refused")
    assert_whole(view)
    assert view["status"] == 400
    assert view["ttft_ms"] is None


def test_request_of_a_client_that_left_has_causes_too(timed_server: ServerThread) -> None:
    sock = connected(timed_server)
    body = TEXT | {"max_tokens": 2000, "prompt": "z"}
    sock.sendall(request_bytes("/v1/completions", body, headers="x-request-id: left\r\n"))
    sock.recv(1000)
    sock.close()
    view = explained(timed_server, "left")
    assert_whole(view)
    assert (view["status"], view["finish"]) == (499, "client_gone")


def test_explain_names_the_neighbours_prompt(timed_server: ServerThread) -> None:
    big = threading.Thread(target=sent, args=(timed_server, "big"), kwargs={"prompt": "q" * 7000, "max_tokens": 1})
    big.start()
    wait_until(lambda: timed_server.engine.stats().running == 1, "the long prompt to be begun")
    sent(timed_server, "felt", max_tokens=30)
    big.join()
    view, big_view = explained(timed_server, "felt"), explained(timed_server, "big")
    assert_whole(view)
    others = {cause: ms for cause, ms in view["totals_ms"].items() if cause in FAMILIES["others' prompts"]}
    assert sum(others.values()) > view["totals_ms"].get("decode.shared", 0), view["totals_ms"]
    assert view["beside"][0]["id"] == big_view["id"]
    assert view["beside"][0]["prefill_tokens"] > 0


def test_explain_names_full_kv_memory(start_server: StartServer) -> None:
    server = start_server(
        backend={"cost": StepCost(step_s=0.002)}, engine={"num_blocks": 8, "max_model_len": 128, "prefix_cache": False}
    )
    first = threading.Thread(target=sent, args=(server, "holds"), kwargs={"prompt": "a" * 60, "max_tokens": 60})
    first.start()
    wait_until(lambda: server.engine.stats().running == 1, "the first to run")
    sent(server, "waits", prompt="b" * 60, max_tokens=2)
    first.join()
    view = explained(server, "waits")
    assert_whole(view)
    assert view["totals_ms"]["queue.kv"] > 0.5 * (view["e2e_ms"] - view["totals_ms"].get("machine", 0))


def test_explain_names_a_client_that_does_not_read(start_server: StartServer) -> None:
    server = start_server(slow_reader_s=30.0)
    sock = connected(server, receive_buffer=4096)
    body = TEXT | {"max_tokens": 2000, "logprobs": 5, "prompt": "z"}
    raw = request_bytes("/v1/completions", body, headers="x-request-id: slow\r\nconnection: close\r\n")
    sock.sendall(raw)
    wait_until(lambda: server.engine.stats().scheduler.finished["length"] == 1, "the core to be done")
    threading.Event().wait(0.2)
    read_briskly(sock)
    read_all(sock)
    sock.close()
    view = explained(server, "slow")
    assert_whole(view)
    assert view["verdict"]["cause"] == "client_slow", view["totals_ms"]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells what a client has taken")
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_explain_names_a_slow_client_whose_answer_fits_the_sockets_buffers(
    start_server: StartServer, connection: str, is_stream: bool
) -> None:
    server = start_server(slow_reader_s=30.0)
    sock = connected(server, receive_buffer=4096)
    body = TEXT | {"max_tokens": 150, "logprobs": 5, "prompt": "z", "stream": is_stream}
    sock.sendall(request_bytes("/v1/completions", body, headers=f"x-request-id: fits\r\nconnection: {connection}\r\n"))
    explained(server, "fits")
    wait_until(lambda: explained(server, "fits")["verdict"]["cause"] == "client_slow", "the wait to outweigh the rest")
    assert explained(server, "fits")["delivery_ms"] > 0
    if connection == "close":
        read_briskly(sock)
        assert read_all(sock).rstrip().endswith(b"0" if is_stream else b"}"), "its connection ends when it has all"
    sock.close()
    assert_whole(explained(server, "fits"))


def test_answers_that_are_taken_at_once_have_no_delivery(timed_server: ServerThread) -> None:
    sent(timed_server, "taken")
    assert explained(timed_server, "taken")["delivery_ms"] == 0


def test_slowest_come_first_and_counts_are_bounded(timed_server: ServerThread) -> None:
    listed = httpx.get(timed_server.url + "/debug/requests?by=ttft&num=3").json()["requests"]
    ranks = [view["ttft_ms"] or view["e2e_ms"] for view in listed]
    assert ranks == sorted(ranks, reverse=True)
    assert len(listed) == 3
    for query in ("num=0", "num=x", "by=luck", "numb=3"):
        assert httpx.get(f"{timed_server.url}/debug/requests?{query}").status_code == 400, query
    assert httpx.get(timed_server.url + "/debug/requests/nobody").status_code == 404


def test_steps_say_what_was_in_them(timed_server: ServerThread) -> None:
    sent(timed_server, "steps", prompt="s" * 20, max_tokens=3)
    steps = httpx.get(timed_server.url + "/debug/steps?num=3").json()["steps"]
    assert [(s["prefill_tokens"], s["decode_tokens"]) for s in steps] == [(20, 0), (0, 1), (0, 1)]
    assert all(s["ms"] >= s["run_ms"] > 0 and s["predicted_ms"] > 0 for s in steps)
    assert all(s["op_ms"] is None for s in steps), "nobody traces"


def test_traces_that_overlap_each_have_op_times_until_the_last_ends(start_server: StartServer) -> None:
    server = start_server()
    engine = server.engine
    engine.trace_ops(True)
    engine.trace_ops(True)
    engine.trace_ops(False)
    sent(server, "one-traces")
    assert engine.step_records()[-1].op_times_s is not None
    engine.trace_ops(False)
    sent(server, "none-traces")
    assert engine.step_records()[-1].op_times_s is None


def test_live_figures_agree_with_requests(start_server: StartServer) -> None:
    server = start_server(backend={"cost": StepCost(step_s=0.001)}, engine={"num_blocks": 64})
    for at in range(3):
        sent(server, f"live-{at}", prompt=f"{at}" * 40)
    explained(server, "live-2")
    live = httpx.get(server.url + "/debug/live").json()
    views = httpx.get(server.url + "/debug/requests").json()["requests"]
    assert live["requests"] == len(views) == 3
    assert live["output_tokens"] == sum(view["output_tokens"] for view in views) == 24
    assert live["ttft_ms"]["num"] == 3
    assert live["ttft_ms"]["p99"] == pytest.approx(percentile([view["ttft_ms"] for view in views], 99), abs=0.01)
    assert live["itl_ms"]["num"] + 3 == 24 or live["itl_ms"]["num"] < 24  # tokens that left together are one gap
    kv = live["kv"]
    assert kv["free"] + kv["cached"] + kv["running"] + kv["pinned"] == kv["blocks"] == 64
    assert kv["cached"] >= 6
    assert len(kv["map"]) == 64


def test_debug_routes_want_a_key_where_keys_are_on(start_server: StartServer) -> None:
    server = start_server(api_key=("secret",))
    for path in ("requests", "requests/x", "steps", "live", "trace?seconds=0"):
        assert httpx.get(f"{server.url}/debug/{path}").status_code == 401, path
    assert httpx.get(server.url + "/debug/live", headers={"authorization": "Bearer secret"}).status_code == 200


def test_debug_routes_can_be_off(start_server: StartServer) -> None:
    assert httpx.get(start_server(debug_routes="off").url + "/debug/live").status_code == 404


def test_trace_command_writes_what_explain_reads(
    timed_server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    is_over = threading.Event()

    def keep_sending() -> None:
        while not is_over.is_set():
            sent(timed_server, "traced")

    during = threading.Thread(target=keep_sending)
    during.start()
    try:
        assert main(["trace", "--seconds", "0.6", "-o", str(path), "--url", timed_server.url]) == 0
    finally:
        is_over.set()
        during.join()
    trace = json.loads(path.read_text())
    causes = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cause"}
    assert {"prefill.own", "decode.own"} <= causes
    assert any(event.get("cat") == "step" for event in trace["traceEvents"])
    assert any(event.get("cat") == "op" for event in trace["traceEvents"])
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")
    capsys.readouterr()
    assert main(["explain", "traced", "--trace-file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "prefill.own" in shown
    assert "to change:" in shown


def test_explain_command_shows_the_last_and_the_slowest(
    timed_server: ServerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    sent(timed_server, "shown")
    explained(timed_server, "shown")
    assert main(["explain", "--last", "--url", timed_server.url]) == 0
    assert "(shown)" in capsys.readouterr().out
    assert main(["explain", "--slowest", "2", "--json", "--url", timed_server.url]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["e2e_ms"] >= second["e2e_ms"]
    assert main(["explain", "nobody", "--url", timed_server.url]) == 2
    assert main(["explain", "--url", "http://127.0.0.1:9"]) == 2
