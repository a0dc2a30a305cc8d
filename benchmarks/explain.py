"""Faults put in on purpose: how often does `explain` name the right cause?

Each fault gets a server of its own. The same kind of request is sent first without the fault; with it, the requests
that took 1.5 times their baseline median or more (to the first token or to the end, as the client measured) are the
affected ones, whatever explain says of them. The name given is the verdict's family at /debug/requests/ID.

    python -m benchmarks.explain MODEL.gguf --out benchmarks/results/explain-NAME.json
    python -m benchmarks.explain MODEL.gguf --fault cpu_hog --num 34 --out FILE   (one fault; adds to FILE)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, write
from firstlight.cli.own_server import own_server
from firstlight.measure.causes.advice import COLD_CACHE
from firstlight.measure.client import Endpoint

AFFECTED = 1.5
NUM_BASELINE = 5
NUM_CLIENTS = 8
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
"""Makes an answer of 80 tokens some 60 KB, which fits into the sockets' buffers: no write ever waits."""
SLOW_BYTES_PER_S = 25_600
WORDS = tuple("the tide brought the old boat home and nobody on the pier could say where it had been".split())  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Timed:
    """One request as its client saw it."""

    name: str
    ttft_s: float
    e2e_s: float


def text_of(num_words: int, seed: int) -> str:
    """Words that no other seed begins with."""
    return f"{seed}: " + " ".join(WORDS[(at * 7 + seed) % len(WORDS)] for at in range(num_words))


def ask(
    endpoint: Endpoint,
    prompt: str,
    max_tokens: int,
    *,
    read: Callable[[socket.socket], bytes] | None = None,
    **more: Any,
) -> Timed:
    """One streamed answer on a socket of its own; `read` takes bytes from it."""
    name = uuid.uuid4().hex
    body = {"max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True} | more
    if "logprobs" in more:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {name}\r\n"
    start_s = time.monotonic()
    first_s = None
    with socket.socket() as sock:
        if read is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((endpoint.host, endpoint.port))
        sock.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
        while got := (read or _quick)(sock):
            if first_s is None and b"data:" in got:
                first_s = time.monotonic()
    end_s = time.monotonic()
    return Timed(name, (first_s or end_s) - start_s, end_s - start_s)


def _quick(sock: socket.socket) -> bytes:
    return sock.recv(65536)


def _slow(sock: socket.socket) -> bytes:
    """SLOW_BYTES_PER_S, in pieces of 20 ms."""
    time.sleep(0.02)
    return sock.recv(SLOW_BYTES_PER_S // 50)


def verdict_of(endpoint: Endpoint, name: str) -> dict[str, Any]:
    """What explain says, once the request is kept."""
    for _ in range(200):
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=30)
        connection.request("GET", f"/debug/requests/{name}")
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        if answer.status == 200:
            verdict: dict[str, Any] = found["verdict"]
            return verdict
        time.sleep(0.05)
    raise RuntimeError(f"request {name} was not kept")


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Three busy processes per core."""
    code = "while True: pass"
    num = 3 * (os.cpu_count() or 1)
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class Throttle:
    """A proxy on loopback that passes answers on at `bytes_per_s`, through small buffers."""

    def __init__(self, to: Endpoint, bytes_per_s: float) -> None:
        self._to = to
        self._pause_s = 1024 / bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket() as server, contextlib.suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            server.connect((self._to.host, self._to.port))
            server.sendall(client.recv(1 << 20))
            while got := server.recv(1024):
                client.sendall(got)
                time.sleep(self._pause_s)

    def close(self) -> None:
        self._listener.close()


Trial = tuple[list[Timed], list[Timed]]


def cpu_hog(endpoint: Endpoint, num: int) -> Trial:
    before = [ask(endpoint, text_of(20, at), 12) for at in range(NUM_BASELINE)]
    with hogs():
        return before, [ask(endpoint, text_of(20, 100 + at), 12) for at in range(num)]


def tiny_kv(model: str, endpoint: Endpoint, num: int) -> Trial:
    """Eight clients where blocks suffice for three requests; before, on a server where they suffice for all."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        with own_server({"model": model}) as ample:
            before = list(pool.map(lambda at: ask(ample, text_of(50, at), 48), range(2 * NUM_CLIENTS)))
        met = list(pool.map(lambda at: ask(endpoint, text_of(50, 100 + at), 48), range(num)))
    return before, met


def slow_client(endpoint: Endpoint, num: int) -> Trial:
    before = [ask(endpoint, text_of(20, at), 80, **LOGPROBS) for at in range(NUM_BASELINE)]
    with ThreadPoolExecutor(4) as pool:
        slow = pool.map(lambda at: ask(endpoint, text_of(20, 100 + at), 80, read=_slow, **LOGPROBS), range(num))
        return before, list(slow)


def throttling_proxy(endpoint: Endpoint, num: int) -> Trial:
    before = [ask(endpoint, text_of(20, at), 80, **LOGPROBS) for at in range(NUM_BASELINE)]
    proxy = Throttle(endpoint, SLOW_BYTES_PER_S)
    try:
        with ThreadPoolExecutor(4) as pool:
            slow = pool.map(lambda at: ask(proxy.endpoint, text_of(20, 100 + at), 80, **LOGPROBS), range(num))
            return before, list(slow)
    finally:
        proxy.close()


def huge_neighbour(endpoint: Endpoint, num: int) -> Trial:
    """Each stream meets a prompt of some 750 tokens half way."""
    before = [ask(endpoint, text_of(20, at), 24) for at in range(NUM_BASELINE)]
    met = []
    with ThreadPoolExecutor(2) as pool:
        for at in range(num):
            big = pool.submit(ask, endpoint, text_of(700, 1000 + at), 1)
            time.sleep(0.05)
            met.append(ask(endpoint, text_of(20, 100 + at), 24))
            big.result()
    return before, met


def cold_cache(endpoint: Endpoint, num: int) -> Trial:
    """A long prompt whose KV was cached, then pushed out by others."""
    warm = text_of(300, 1)
    ask(endpoint, warm, 4)
    before = [ask(endpoint, warm, 4) for _ in range(NUM_BASELINE)]
    met = []
    with ThreadPoolExecutor(2) as pool:
        for at in range(num):
            list(pool.map(lambda seed: ask(endpoint, text_of(300, seed), 8), range(100 + 10 * at, 102 + 10 * at)))
            met.append(ask(endpoint, warm, 4))
    return before, met


FAULTS: dict[str, tuple[Callable[[Endpoint, int], Trial], dict[str, object], str]] = {
    "cpu_hog": (cpu_hog, {}, "machine"),
    "slow_client": (slow_client, {}, "client"),
    "throttling_proxy": (throttling_proxy, {}, "client"),
    "huge_neighbour": (huge_neighbour, {}, "others' prompts"),
    "cold_cache": (cold_cache, {"num_blocks": 48, "max_model_len": 512}, COLD_CACHE),
}
"""What is done, the server's options, and the family that is right."""


def fault_of(name: str, model: str) -> tuple[Callable[[Endpoint, int], Trial], dict[str, object], str]:
    if name == "tiny_kv":
        return partial(tiny_kv, model), {"num_blocks": 24, "max_model_len": 256}, "KV memory"
    return FAULTS[name]


NAMES = ("tiny_kv", *FAULTS)


def trial(model: str, fault: str, num: int) -> dict[str, Any]:
    """One fault on a server of its own."""
    run, options, right = fault_of(fault, model)
    with own_server({"model": model, **options}) as endpoint:
        before, met = run(endpoint, num)
        ttft_s = statistics.median(timed.ttft_s for timed in before)
        e2e_s = statistics.median(timed.e2e_s for timed in before)
        affected = [t for t in met if t.ttft_s >= AFFECTED * ttft_s or t.e2e_s >= AFFECTED * e2e_s]
        verdicts = [verdict_of(endpoint, timed.name) for timed in affected]
    said = Counter(f"{verdict['family']}: {verdict['cause']}" for verdict in verdicts)
    num_right = sum(verdict["family"] == right for verdict in verdicts)
    return {
        "fault": fault,
        "right": right,
        "requests": len(met),
        "affected": len(affected),
        "named_right": num_right,
        "said": dict(said),
        "baseline_ttft_ms": ttft_s * 1e3,
        "baseline_e2e_ms": e2e_s * 1e3,
        "median_ttft_ms": statistics.median(t.ttft_s for t in met) * 1e3,
        "median_e2e_ms": statistics.median(t.e2e_s for t in met) * 1e3,
        "sentence": verdicts[0]["sentence"] if verdicts else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--fault", choices=sorted(NAMES), action="append")
    parser.add_argument("--num", type=int, default=34)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["faults"] if arguments.fault and arguments.out.exists() else []
    faults = arguments.fault or NAMES
    found = [entry for entry in known if entry["fault"] not in faults]
    for fault in faults:
        found.append(trial(arguments.model, fault, arguments.num))
        print(json.dumps(found[-1], indent=1))
    affected, right = (sum(entry[key] for entry in found) for key in ("affected", "named_right"))
    print(f"{right} of {affected} affected requests: {right / max(1, affected):.1%}")
    document = conditions("benchmarks.explain", os.cpu_count() or 1) | {"model": Path(arguments.model).name}
    write(document | {"affected": affected, "named_right": right, "faults": found}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
