"""Spans of requests, as a real OTLP collector in this process receives them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from firstlight.errors import ConfigError
from firstlight.measure import otel
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import wait_until

collector_pb2 = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra `otel` is not installed"
)

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps every span that is posted to it, by span name."""

    def __init__(self) -> None:
        received = self.spans = {}  # type: dict[str, list[Any]]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                message = collector_pb2.ExportTraceServiceRequest()
                message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            received.setdefault(span.name, []).append(span)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        out[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return out


def serve(start_server: StartServer, collector: Collector) -> ServerThread:
    return start_server(otlp_endpoint=collector.url)


def test_an_answer_becomes_a_span_under_its_callers(start_server: StartServer, collector: Collector) -> None:
    server = serve(start_server, collector)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        json=body,
        headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-Id": "mine"},
    ).json()
    wait_until(lambda: "chat fake" in collector.spans, "the span")
    (span,) = collector.spans["chat fake"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    got = attributes(span)
    assert got["gen_ai.operation.name"] == "chat"
    assert got["gen_ai.request.model"] == "fake"
    assert got["gen_ai.response.id"] == answer["id"]
    assert got["gen_ai.response.finish_reasons"] == ["length"]
    assert got["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert got["gen_ai.usage.output_tokens"] == 5
    assert got["firstlight.request_id"] == "mine"
    causes_ms = sum(value for name, value in got.items() if name.startswith("firstlight.cause."))
    assert causes_ms == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e6, abs=0.1)
    phases = [collector.spans[name][0] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent_span_id == span.span_id for phase in phases)
    bounds = [span.start_time_unix_nano, *(p.start_time_unix_nano for p in phases), phases[-1].end_time_unix_nano]
    assert bounds == sorted(bounds)
    assert phases[-1].end_time_unix_nano <= span.end_time_unix_nano


def test_a_refused_request_is_a_span_with_its_error(start_server: StartServer, collector: Collector) -> None:
    server = serve(start_server, collector)
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
    wait_until(lambda: "text_completion fake" in collector.spans, "the span")
    (span,) = collector.spans["text_completion fake"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "invalid_request"


def test_a_collector_that_is_away_costs_no_answer(start_server: StartServer) -> None:
    server = start_server(otlp_endpoint="http://127.0.0.1:9")
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_without_the_extra_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        otel.SpanSender("http://127.0.0.1:4318", "1")
