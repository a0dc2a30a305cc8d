"""Ways to end a request from outside, to go on with a message, and what a key may take."""

from __future__ import annotations

import hashlib
import json
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.errors import ConfigError
from firstlight.server.access import keys_of_file
from firstlight.server.quotas import KeyLimits, Quota, RateLimited
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == code
    return error


def test_timeout_ends_a_whole_answer_with_408(slow_server: ServerThread) -> None:
    answer = httpx.post(slow_server.url + TEXT, json={**ENDLESS, "timeout": 0.05})
    assert "`timeout` is 0.05 s" in error_of(answer, 408, "timeout")["message"]
    assert answer.headers["x-should-retry"] == "false"
    wait_until(lambda: slow_server.engine.stats().running == 0, "the abort")


def test_timeout_ends_a_stream_with_an_error_event(slow_server: ServerThread) -> None:
    answer = httpx.post(slow_server.url + TEXT, json={**ENDLESS, "stream": True, "timeout": 0.2})
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "soon"])
def test_wrong_timeout_is_refused(http: httpx.Client, timeout: Any) -> None:
    assert http.post(TEXT, json={"prompt": "x", "timeout": timeout}).json()["error"]["param"] == "timeout"


def test_timeout_that_is_not_reached_changes_nothing(http: httpx.Client) -> None:
    body = {"prompt": "x", "seed": 1}
    assert (
        http.post(TEXT, json={**body, "timeout": 60}).json()["choices"] == http.post(TEXT, json=body).json()["choices"]
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cancel_ends_the_request_by_its_request_id(slow_server: ServerThread, stream: bool) -> None:
    name = f"mine-{stream}"
    with httpx.Client(base_url=slow_server.url, timeout=30) as http, ThreadPoolExecutor(1) as pool:
        body = {**ENDLESS, "stream": stream}
        open_one = pool.submit(http.post, TEXT, json=body, headers={"X-Request-Id": name})
        wait_until(lambda: slow_server.engine.stats().running == 1, "it to run")
        assert http.post("/v1/cancel", json={"id": name}).json() == {"id": name, "cancelled": 1}
        ended = open_one.result(20)
        assert '"code":"cancelled"' in ended.text
        assert "[DONE]" not in ended.text
        error_of(http.post("/v1/cancel", json={"id": name}), 404, "not_found")
        wait_until(lambda: slow_server.engine.stats().running == 0, "the abort")


def test_cancel_is_for_the_same_key_only(start_server: StartServer) -> None:
    server = start_server(api_key=("one", "two"))
    with httpx.Client(base_url=server.url, timeout=30) as http, ThreadPoolExecutor(1) as pool:
        one, two = ({"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in ("one", "two"))
        open_one = pool.submit(http.post, TEXT, json=ENDLESS, headers=one)
        wait_until(lambda: server.engine.stats().running == 1, "it to run")
        assert http.post("/v1/cancel", json={"id": "same"}, headers=two).status_code == 404
        http.post("/v1/cancel", json={"id": "same"}, headers=one)
        assert open_one.result(20).status_code in (200, 409)


def test_continuation_goes_on_with_the_assistant_message(http: httpx.Client) -> None:
    """The same ids, and so the same answer, as the template's text with the message left open."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "seed": 5, "max_tokens": 12, "continue_final_message": True}
    answer = http.post(CHAT, json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(b"user\nhi\nassistant\nWell, ") + 3
    again = http.post(CHAT, json={**body, "add_generation_prompt": False}).json()
    assert again["choices"] == answer["choices"]
    closed = http.post(CHAT, json={**body, "continue_final_message": False}).json()
    assert closed["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]


def test_continuation_of_a_user_message_is_refused(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True}
    assert http.post(CHAT, json=body).json()["error"]["param"] == "continue_final_message"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_refill_evenly_and_tokens_are_paid_at_the_end() -> None:
    clock = Clock()
    quota = Quota(KeyLimits(requests_per_min=2, tokens_per_min=100), clock)
    quota.enter().close(150)
    with pytest.raises(RateLimited, match="tokens_per_min") as caught:
        quota.enter()
    assert caught.value.retry_after_s == pytest.approx(51 * 0.6)
    clock.now_s = 31
    quota.enter()
    clock.now_s = 1000
    quota.enter()
    quota.enter()
    with pytest.raises(RateLimited, match="requests_per_min"):
        quota.enter()


def test_concurrency_and_sequences_are_given_back_once() -> None:
    quota = Quota(KeyLimits(concurrency=1, queued=4))
    first = quota.enter()
    first.hold(3)
    with pytest.raises(RateLimited, match="concurrency"):
        quota.enter()
    first.close(0)
    first.close(0)
    second = quota.enter()
    with pytest.raises(RateLimited, match="queued"):
        second.hold(5)
    second.close(0)
    assert (quota.num_open, quota.num_sequences) == (0, 0)


def test_key_over_its_limit_gets_429_while_another_is_served(start_server: StartServer, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hashed").hexdigest()
    path = tmp_path / "keys"
    path.write_text(f"# keys\nsmall requests_per_min=1\nsha256:{digest}\n")
    server = start_server(api_key_file=str(path))
    with httpx.Client(base_url=server.url) as http:
        small, hashed = ({"Authorization": f"Bearer {key}"} for key in ("small", "hashed"))
        assert http.post(TEXT, json={"prompt": "x"}, headers=small).status_code == 200
        refused = http.post(TEXT, json={"prompt": "x"}, headers=small)
        error_of(refused, 429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert http.post(TEXT, json={"prompt": "x"}, headers=hashed).status_code == 200
        embedded = http.post("/v1/embeddings", json={"input": "x"}, headers=small)
        error_of(embedded, 429, "rate_limit_exceeded")


@pytest.mark.parametrize("line", ["key rpm=3", "key concurrency=-1", "key concurrency", "sha256:12"])
def test_wrong_line_of_the_key_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        keys_of_file(str(path), KeyLimits())


def test_tls_serves_https(start_server: StartServer, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {key} -out {cert}"
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command.split(), *subject], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    server = start_server(tls_cert=str(cert), tls_key=str(key))
    assert server.url.startswith("https://")
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(cert))) as http:
        answer = http.post(TEXT, json={"prompt": "x", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


def test_certificate_that_is_none_is_a_config_error(start_server: StartServer, tmp_path: Path) -> None:
    for options in ({"tls_cert": str(tmp_path / "no.pem")}, {"tls_key": "x"}):
        with pytest.raises(ConfigError, match="tls_cert"):
            start_server(**options)
