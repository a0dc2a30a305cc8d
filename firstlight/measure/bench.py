"""A closed-loop load: N streams, each sending its next request when its last one has ended.

A closed loop measures what the server can carry; it says nothing of waiting under a given arrival rate.
Knows requests and times; knows neither tables nor who started the server.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from firstlight.errors import BackendError, FirstlightError
from firstlight.measure.client import Endpoint, get_json, post_json, stream_events

__all__ = [
    "LevelResult",
    "LoadShape",
    "Prompt",
    "RequestRecord",
    "first_contact",
    "probe_lag",
    "prompt_source",
    "refuse_failures",
    "run_level",
    "send",
    "served_model",
    "warm_up",
]

_LAG_PROBE_S = 0.05
"""Ten times as often, the probe itself was half of the client's CPU time at one stream."""
_SYSTEM_PROMPT = "You are a helpful assistant. Answer briefly and plainly."
# Answer lengths of a chat: mostly a paragraph, sometimes a line or a page. Drawn by the seed, so that runs compare.
_OUTPUT_TOKENS = (16, 32, 48, 64, 64, 96, 96, 128)


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent: enough to send it again."""

    concurrency: tuple[int, ...]
    requests_per_level: tuple[int, ...]
    max_tokens: int
    """Above 0: every answer's limit; 0: drawn from the built-in lengths."""
    ignore_eos: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to send and the limit of its answer."""

    messages: list[dict[str, str]]
    max_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """What the client saw of one request. Written by the task that sent it; times are seconds since the run began."""

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    text: str = ""
    late_s: float = 0.0
    """How much later than planned the client sent it."""

    @property
    def ttft_s(self) -> float:
        """From sending to the first piece of text."""
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two arrivals of text."""
        return [after - before for before, after in itertools.pairwise(self.times_s)]

    @property
    def e2e_s(self) -> float:
        """From sending to the stream's end."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None below two tokens, and where all text came at once."""
        if self.completion_tokens < 2 or len(self.times_s) < 2:
            return None
        return (self.end_s - self.times_s[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One concurrency level's records, and what the client itself cost meanwhile."""

    concurrency: int
    records: list[RequestRecord]
    wall_s: float
    client_cpu_s: float
    loop_lags_s: list[float]


def prompt_source(seed: int, max_tokens: int) -> Iterator[Prompt]:
    """An endless, repeatable series of different chat prompts, from the file that ships with the package."""
    text = importlib.resources.files("firstlight.measure").joinpath("bench_prompts.json").read_text("utf-8")
    content = msgspec.json.decode(text)
    rng = random.Random(seed)
    templates: list[str] = content["prompts"]
    while True:
        for template in rng.sample(templates, len(templates)):
            user = _fill(template, content["slots"], rng)
            messages = [{"role": "system", "content": _SYSTEM_PROMPT}, {"role": "user", "content": user}]
            yield Prompt(messages, max_tokens or rng.choice(_OUTPUT_TOKENS))


def _fill(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Puts a word in each `{slot}`; `{slot2}` gets another one than `{slot}`."""
    drawn = {name: rng.sample(words, 2) for name, words in slots.items()}
    return re.sub(r"\{([a-z]+)(2?)\}", lambda match: drawn[match[1]][bool(match[2])], template)


async def served_model(endpoint: Endpoint) -> str:
    """The id of the first model that the server lists."""
    listing = await get_json(endpoint, "/v1/models")
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise BackendError(f"{endpoint.url}/v1/models lists no model") from None


async def warm_up(endpoint: Endpoint, model: str) -> None:
    """One short answer, so that no first-request cost is measured. Raises what the server answers."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "stream": True}
    async for _ in stream_events(endpoint, "/v1/chat/completions", body):
        pass


async def first_contact(endpoint: Endpoint) -> str:
    """The id of the first model that the server lists, after one short answer by it."""
    model = await served_model(endpoint)
    await warm_up(endpoint, model)
    return model


def refuse_failures(levels: Iterable[LevelResult]) -> None:
    """Raises BackendError where a request failed: figures that leave it out are not those of the load."""
    errors = [record.error for level in levels for record in level.records if record.error]
    if errors:
        raise BackendError(f"{len(errors)} requests failed, the first with: {errors[0]}")


async def run_level(
    endpoint: Endpoint,
    model: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    *,
    ignore_eos: bool,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LevelResult:
    """Sends all prompts, `concurrency` streams open at a time; a failed request is recorded and the load goes on."""
    waiting = iter(prompts)
    records: list[RequestRecord] = []
    lags_s: list[float] = []
    zero_s = time.perf_counter()

    async def stream() -> None:
        for prompt in waiting:
            record = await send(endpoint, model, prompt, ignore_eos, zero_s)
            records.append(record)
            on_done(record)

    probe = asyncio.create_task(probe_lag(lags_s))
    cpu_before_s = time.process_time()
    try:
        await asyncio.gather(*(stream() for _ in range(concurrency)))
        wall_s = time.perf_counter() - zero_s
        client_cpu_s = time.process_time() - cpu_before_s
    finally:
        probe.cancel()
    return LevelResult(concurrency, records, wall_s, client_cpu_s, lags_s)


async def send(
    endpoint: Endpoint, model: str, prompt: Prompt, ignore_eos: bool, zero_s: float, *, is_streamed: bool = True
) -> RequestRecord:
    """One request's record, whatever becomes of it. Not streamed, the whole answer arrives at once, at its end."""
    body: dict[str, Any] = {
        "model": model,
        "messages": prompt.messages,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    if ignore_eos:
        body["ignore_eos"] = True
    record = RequestRecord(time.perf_counter() - zero_s)
    try:
        if is_streamed:
            async for arrival_s, event in stream_events(endpoint, "/v1/chat/completions", body):
                _note_event(record, arrival_s - zero_s, event)
        else:
            answer = await post_json(endpoint, "/v1/chat/completions", body)
            for choice in answer["choices"]:
                choice["delta"] = choice.pop("message")
            _note_event(record, time.perf_counter() - zero_s, answer)
    except FirstlightError as error:
        record.error = error.message
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        record.error = f"the answer is not of OpenAI's form: {error!r}"
    record.end_s = time.perf_counter() - zero_s
    record.completion_tokens = record.completion_tokens or len(record.times_s)
    return record


def _note_event(record: RequestRecord, arrival_s: float, event: dict[str, Any]) -> None:
    if event.get("error"):
        record.error = str(event["error"].get("message", event["error"]))
    if usage := event.get("usage"):
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.completion_tokens = usage.get("completion_tokens") or 0
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        part = choice.get("delta") or choice
        # Servers differ: chat deltas, completions' `text`, reasoning beside the answer.
        if text := part.get("content") or part.get("reasoning_content") or part.get("text"):
            record.times_s.append(arrival_s)
            record.text += text if isinstance(text, str) else ""
        record.finish = choice.get("finish_reason") or record.finish


async def probe_lag(lags_s: list[float]) -> None:
    """Notes how late a short sleep ends: what the client's own loop adds to a measured time."""
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(_LAG_PROBE_S)
        lags_s.append(time.perf_counter() - before_s - _LAG_PROBE_S)
