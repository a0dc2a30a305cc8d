"""A thin streaming server over OpenVINO GenAI's continuous batching, so that one client can drive every engine.

OpenVINO GenAI brings no server. This one adds as little as it can: /v1/completions streamed, one event per token with
the token's own text, greedy. Run it with a Python that has `openvino-genai`:

    python benchmarks/openvino_server.py MODEL.gguf PORT THREADS
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from typing import Any

import openvino_genai

CACHE_GB = 2
MAX_STEP_TOKENS = 512
MAX_STEP_ROWS = 32


class Core:
    """One thread that steps the pipeline while anything is open."""

    def __init__(self, model: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size = CACHE_GB
        config.max_num_batched_tokens = MAX_STEP_TOKENS
        config.max_num_seqs = MAX_STEP_ROWS
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, config, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._loop = loop
        self._inbox: queue.SimpleQueue[tuple[dict[str, Any], asyncio.Queue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, body: dict[str, Any]) -> asyncio.Queue[Any]:
        """Events of one request: (text, is_last, number of prompt tokens)."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put((body, events))
        return events

    def _serve(self) -> None:
        num_requests = 0
        streams: list[list[Any]] = []  # handle, events, tokens left, prompt tokens
        while True:
            while not streams or not self._inbox.empty():
                body, events = self._inbox.get()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = body["max_tokens"]
                config.ignore_eos = bool(body.get("ignore_eos"))
                config.do_sample = False
                ids = self._tokenizer.encode(body["prompt"]).input_ids
                handle = self._pipeline.add_request(num_requests, ids, config)
                num_requests += 1
                streams.append([handle, events, body["max_tokens"], ids.shape[1]])
            self._pipeline.step()
            for stream in streams:
                handle, events, _, num_prompt = stream
                while handle.can_read():
                    for output in handle.read().values():
                        stream[2] -= len(output.generated_ids)
                        text = self._tokenizer.decode(output.generated_ids)
                        self._loop.call_soon_threadsafe(events.put_nowait, (text, stream[2] <= 0, num_prompt))
            streams = [stream for stream in streams if stream[2] > 0]


async def main() -> None:
    model, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    core = Core(model, threads, asyncio.get_running_loop())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
        body = await reader.readexactly(length)
        kind = b"text/event-stream" if length else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: " + kind + b"\r\n\r\n")
        if length:
            events = core.submit(json.loads(body))
            num, is_last = 0, False
            while not is_last:
                text, is_last, num_prompt = await events.get()
                num += 1
                event: dict[str, Any] = {"choices": [{"index": 0, "text": text or " "}]}
                if is_last:
                    event["usage"] = {"prompt_tokens": num_prompt, "completion_tokens": num}
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
            writer.write(b"data: [DONE]\n\n")
        else:
            writer.write(b'{"status": "ok"}')
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
