"""How long a step's events take from the core to the loop, a thread of the same process, and to another process.

Both are measured in one run: every batch that the core hands to the loop also goes to a process that does nothing but
read and decode it. 16 streams, so that both cores of a small machine compute.

    python -m benchmarks.handover MODEL.gguf --out benchmarks/results/handover-NAME.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.document import conditions, write
from benchmarks.streams import Bench, some_words, spread, stream_body
from firstlight.engine.relay import LoopRelay
from firstlight.types import TokenEvent

_STAMP = struct.Struct("d")
_MAX_MESSAGE = 1 << 20
_END = b"end"


def _read_all(sock: socket.socket, pipe: Connection) -> None:
    """The other process: notes when each batch was there, decoded."""
    decoder, took_s = msgspec.msgpack.Decoder(list[TokenEvent]), []
    while (message := sock.recv(_MAX_MESSAGE)) != _END:
        decoder.decode(message[_STAMP.size :])
        took_s.append(time.monotonic() - _STAMP.unpack(message[: _STAMP.size])[0])
    pipe.send(took_s)


class Watched:
    """What the relay's two ends note, from when `install` is called on."""

    def __init__(self, sock: socket.socket) -> None:
        self.to_loop_s: list[float] = []
        self.encode_s: list[float] = []
        self._sock = sock
        self._put_s: list[float] = []
        self._encoder = msgspec.msgpack.Encoder()

    def install(self) -> None:
        put, take = LoopRelay.put, LoopRelay._take
        num_taken = 0

        def watched_put(relay: LoopRelay, events: list[TokenEvent]) -> None:
            now_s = time.monotonic()
            message = _STAMP.pack(now_s) + self._encoder.encode(events)
            self.encode_s.append(time.monotonic() - now_s)
            relay._write(self._sock.fileno(), message, len(message))
            self._put_s.append(now_s)
            put(relay, events)

        def watched_take(relay: LoopRelay) -> None:
            nonlocal num_taken
            now_s = time.monotonic()
            self.to_loop_s += [now_s - put_s for put_s in self._put_s[num_taken : num_taken + len(relay._batches)]]
            num_taken = len(self.to_loop_s)
            take(relay)

        LoopRelay.put, LoopRelay._take = watched_put, watched_take  # type: ignore[method-assign]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds from the core's hand to either reader."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context = multiprocessing.get_context("spawn")
    pipe, their_pipe = context.Pipe()
    process = context.Process(target=_read_all, args=(theirs, their_pipe), daemon=True)
    process.start()
    watched, source = Watched(ours), random.Random(args.seed)
    watched.install()
    with Bench(args) as bench:
        for _ in range(args.rounds):
            bodies = [stream_body(some_words(source, 24), max_tokens=64) for _ in range(16)]
            bench.ask("crowd", bodies=bodies, kills=[None] * len(bodies))
    ours.send(_END)
    to_process_s = pipe.recv()
    process.join()
    return {
        "to_thread_ms": spread([1e3 * s for s in watched.to_loop_s]),
        "to_process_ms": spread([1e3 * s for s in to_process_s]),
        "encode_ms": round(1e3 * statistics.median(watched.encode_s), 3),
        "batches": len(to_process_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    args = parser.parse_args()
    write({**conditions("benchmarks.handover", args.threads), "result": measure(args)}, args.out)


if __name__ == "__main__":
    main()
