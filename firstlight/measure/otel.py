"""One OpenTelemetry span per finished request, with children for waiting, prefill and decoding. Never holds text.

Names follow the GenAI semantic conventions. Needs the `otel` extra; spans leave in batches on a thread of the SDK.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firstlight.errors import ConfigError
from firstlight.measure.causes import FinishedRequest, totals_s

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

__all__ = ["SpanSender"]

_Value = str | int | float | bool | list[str]
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
BATCH_MS = 1000
FLUSH_TIMEOUT_MS = 3000


class SpanSender:
    """Sends spans to an OTLP collector over HTTP. `add` from one thread.

    Args:
        endpoint: the collector's address without a path, as http://127.0.0.1:4318.

    Raises:
        ConfigError: the `otel` extra is not installed.
    """

    def __init__(self, endpoint: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "`otlp_endpoint` needs OpenTelemetry, which is not installed",
                param="otlp_endpoint",
                hint="pip install 'firstlight[otel]'",
            ) from None
        resource = Resource.create({"service.name": "firstlight", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_MS))
        self._tracer: Tracer = self._provider.get_tracer("firstlight", version)

    def add(self, request: FinishedRequest, model_name: str) -> None:
        """Queues the request's spans. Where the collector does not keep up, the SDK drops the oldest."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def unix_ns(at_s: float) -> int:
            return int((request.arrival_unix_s + at_s - request.stamps.arrival_s) * 1e9)

        operation = _OPERATIONS.get(request.route, request.route)
        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        span = self._tracer.start_span(
            f"{operation} {model_name}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=unix_ns(request.stamps.arrival_s),
            attributes=_attributes(request, operation, model_name),
        )
        if request.status >= 400:
            span.set_attribute("error.type", request.finish)
            span.set_status(Status(StatusCode.ERROR, request.finish))
        inside = set_span_in_context(span)
        for name, start_s, end_s in _phases(request):
            self._tracer.start_span(name, context=inside, start_time=unix_ns(start_s)).end(unix_ns(end_s))
        span.end(unix_ns(request.stamps.end_s))

    def close(self) -> None:
        """Sends what is queued, for at most a few seconds."""
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()


def _attributes(request: FinishedRequest, operation: str, model_name: str) -> dict[str, _Value]:
    out: dict[str, _Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "firstlight",
        "gen_ai.request.model": model_name,
        "gen_ai.request.stream": request.is_stream,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.answer_id,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "http.response.status_code": request.status,
        "firstlight.request_id": request.request_id,
    }
    if request.status < 400 and request.finish:
        out["gen_ai.response.finish_reasons"] = request.finish.split(",")
    if request.ttft_s is not None:
        out["gen_ai.response.time_to_first_chunk"] = request.ttft_s
    for cause, seconds in totals_s(request.spans()).items():
        out[f"firstlight.cause.{cause}_ms"] = round(seconds * 1e3, 3)
    return out


def _phases(request: FinishedRequest) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of the request's phases in the core, on the monotonic clock."""
    trace = request.trace
    if trace is None or not trace.steps:
        return
    first_s, end_s = trace.steps[0].start_s, trace.end_s or request.stamps.end_s
    own = ((step.start_s, share) for step in trace.steps for share in step.shares if share.request_id == trace.core_id)
    decode_s = next((start_s for start_s, share in own if not share.is_prefill), None)
    yield "queue", trace.submitted_s, first_s
    yield "prefill", first_s, end_s if decode_s is None else decode_s
    if decode_s is not None:
        yield "decode", decode_s, end_s
