"""firstlight beside llama.cpp's server and OpenVINO GenAI: same file, same client, in turns on one machine.

Each round starts every engine once, one at a time, and measures it alone: A B C A B C. Every figure in the summary is
the median over rounds, every ratio the median of the ratios inside a round, so that a slow minute hits both sides.

    python -m benchmarks.peers MODEL.gguf --llama-bin DIR --openvino-python PYTHON --out RESULT.json

llama.cpp also runs the file requantised (with its own llama-quantize) to Q4_0 and Q8_0, which its kernels suit best.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, version_of, write
from firstlight.backend.cpu import native_pack
from firstlight.errors import FirstlightError
from firstlight.measure.client import Endpoint, get_json, stream_events
from firstlight.models.program import GatherRows, Linear, Norm
from firstlight.models.weights import LoadedModel, load_model
from firstlight.text import Tokenizer

READY_TIMEOUT_S = 180.0
KV_TOKENS = 81_920
NUM_SLOTS = 16
PROBE_PROMPT = 16


@dataclass(slots=True)
class Answer:
    """What the client saw of one request, in seconds since it was sent."""

    times_s: list[float] = field(default_factory=list)
    text: str = ""
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first."""
        return (self.num_output - 1) / (self.times_s[-1] - self.times_s[0])


@dataclass(frozen=True, slots=True)
class Server:
    """An engine's start command; `{port}` is filled in. `ready` is a path that answers 200 once it can serve."""

    name: str
    command: list[str]
    ready: str
    model: str = "model"


class Prompts:
    """English words that are one token each, so that a prompt of n words has n tokens, and no two share a prefix."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        pieces = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
        self._words = [p for p in pieces if p[:1] == " " and p[1:].isascii() and p[1:].isalpha() and p[1:].islower()]

    def text(self, num_tokens: int) -> str:
        """A prompt of about `num_tokens` tokens (the first word may take two)."""
        return "".join(self._random.choices(self._words, k=num_tokens)).removeprefix(" ")


class Client:
    """Sends completions to one server, greedy and of fixed length."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self._endpoint = Endpoint.parse(url)
        self._model = model

    async def ask(self, prompt: str, max_tokens: int) -> Answer:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        answer = Answer()
        sent_s = time.perf_counter()
        try:
            async for arrival_s, event in stream_events(self._endpoint, "/v1/completions", body):
                if usage := event.get("usage"):
                    answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
                if piece := "".join(choice.get("text") or "" for choice in event.get("choices") or ()):
                    answer.times_s.append(arrival_s - sent_s)
                    answer.text += piece
        except FirstlightError as error:
            answer.error = error.message
        return answer


async def measure(client: Client, prompts: Prompts, args: argparse.Namespace) -> dict[str, float]:
    """All of one engine's figures in one round; rates in tokens a second, times in seconds."""
    figures: dict[str, float] = {}
    await client.ask(prompts.text(PROBE_PROMPT), 8)  # whatever an engine still does on its first request
    figures["ttft_90"] = statistics.median([(await client.ask(prompts.text(90), 2)).ttft_s for _ in range(5)])
    for length in (512, 2048):
        answers = [await client.ask(prompts.text(length), 1) for _ in range(args.repeats)]
        figures[f"prefill_{length}"] = max(answer.num_prompt / answer.ttft_s for answer in answers)
    for length in (16, 2048):
        answers = [await client.ask(prompts.text(length), args.decode_tokens) for _ in range(args.repeats)]
        figures[f"decode_{length}"] = max(answer.decode_tok_s for answer in answers)
    started_s = time.perf_counter()
    jobs = [client.ask(prompts.text(prompts._random.randint(64, 128)), 128) for _ in range(NUM_SLOTS)]
    answers = await asyncio.gather(*jobs)
    figures["streams_16"] = sum(answer.num_output for answer in answers) / (time.perf_counter() - started_s)
    figures["streams_16_ttft_p50"] = statistics.median(answer.ttft_s for answer in answers)
    gaps = [b - a for answer in answers for a, b in zip(answer.times_s, answer.times_s[1:], strict=False)]
    figures["streams_16_itl_p50"] = statistics.median(gaps)
    figures["streams_16_itl_max"] = max(gaps)
    return figures


async def measure_neighbour(client: Client, prompts: Prompts, num_tokens: int) -> dict[str, float]:
    """Decode alone, then with another process that never leaves a core."""
    undisturbed = (await client.ask(prompts.text(PROBE_PROMPT), num_tokens)).decode_tok_s
    with hog():
        beside = (await client.ask(prompts.text(PROBE_PROMPT), num_tokens)).decode_tok_s
    return {"decode_beside_neighbour": beside, "decode_kept_beside_neighbour": beside / undisturbed}


@contextlib.contextmanager
def hog() -> Iterator[None]:
    """One core kept busy by another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[tuple[Client, int, float]]:
    """Starts the server; gives (client, process id, seconds until ready); ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started_s = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        command = [word.replace("{port}", str(port)) for word in server.command]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while True:
                if process.poll() is not None or time.perf_counter() - started_s > READY_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"{server.name} did not start:\n{log.read()[-2000:].decode(errors='replace')}")
                with contextlib.suppress(FirstlightError):
                    await get_json(Endpoint.parse(url), server.ready)
                    break
                await asyncio.sleep(0.02)
            yield Client(url, server.model), process.pid, time.perf_counter() - started_s
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def memory_mb(pid: int) -> dict[str, float]:
    """Resident set now and at its highest, in MB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {"rss_mb": int(status["VmRSS"].split()[0]) / 1e3, "rss_peak_mb": int(status["VmHWM"].split()[0]) / 1e3}


async def run_round(servers: Sequence[Server], prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """One turn of every engine, and of the machine itself."""
    done = subprocess.run([str(args.limits), str(args.threads)], capture_output=True, check=True)
    results: dict[str, Any] = {"limits": json.loads(done.stdout)}
    for server in servers:
        async with running(server) as (client, pid, ready_s):
            figures = {"ready_s": ready_s, **await measure(client, prompts, args)}
            if server.name == "firstlight" or (server.name == "llama.cpp Q4_1" and args.neighbour_tokens):
                num = 64 if server.name == "firstlight" else args.neighbour_tokens
                figures |= await measure_neighbour(client, prompts, num)
            figures |= memory_mb(pid)
        results[server.name] = {name: round(value, 4) for name, value in figures.items()}
        print(f"{server.name}: {json.dumps(results[server.name])}", file=sys.stderr, flush=True)
    return results


def chosen_servers(args: argparse.Namespace, folder: Path) -> list[Server]:
    """firstlight first, then each peer that was named; requantises for llama.cpp."""
    mine = [sys.executable, "-m", "firstlight", "serve", str(args.model), "--port", "{port}"]
    mine += ["--threads", str(args.threads), "--served-model-name", "model"]
    servers = [Server("firstlight", mine, "/ready")]
    if args.llama_bin is not None:
        files = {"Q4_1": args.model}
        for kind in ("Q4_0", "Q8_0"):
            files[kind] = folder / f"{kind}.gguf"
            command = [args.llama_bin / "llama-quantize", "--allow-requantize", args.model, files[kind], kind]
            subprocess.run([str(word) for word in command], check=True, capture_output=True)
        for kind, file in files.items():
            command = [str(args.llama_bin / "llama-server"), "-m", str(file), "--port", "{port}", "-np", str(NUM_SLOTS)]
            command += ["-t", str(args.threads), "-tb", str(args.threads), "-cb", "-c", str(KV_TOKENS)]
            servers.append(Server(f"llama.cpp {kind}", [*command, "--no-kv-unified"], "/health"))
    if args.openvino_python is not None:
        script = Path(__file__).with_name("openvino_server.py")
        command = [str(args.openvino_python), str(script), str(args.model), "{port}", str(args.threads)]
        servers.append(Server("OpenVINO GenAI", command, "/health"))
    return servers


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, and firstlight against each peer; above 1 is ahead, also where less is better."""
    figures = {
        name: {key: statistics.median(turn[name][key] for turn in rounds) for key in rounds[0][name]}
        for name in rounds[0]
        if name != "limits"
    }
    ratios: dict[str, dict[str, float]] = {}
    for peer in figures.keys() - {"firstlight"}:
        for key in figures[peer].keys() & figures["firstlight"].keys():
            each = [turn["firstlight"][key] / turn[peer][key] for turn in rounds]
            is_less_better = not key.startswith(("prefill", "decode")) and key != "streams_16"
            ratios.setdefault(peer, {})[key] = round(statistics.median(1 / r if is_less_better else r for r in each), 3)
    return {"medians": figures, "firstlight_ahead": {peer: dict(sorted(r.items())) for peer, r in ratios.items()}}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file that every engine reads")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-server and llama-quantize")
    parser.add_argument("--openvino-python", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, default=2, help="requests per prefill and decode figure; the best counts"
    )
    parser.add_argument("--decode-tokens", type=int, default=129)
    parser.add_argument(
        "--neighbour-tokens", type=int, default=4, help="llama.cpp's tokens beside a busy core; 0 = skip"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    return parser.parse_args()


def build_limits(folder: Path) -> Path:
    """Compiles benchmarks/limits.cpp for this machine."""
    program = folder / "limits"
    source = Path(__file__).with_name("limits.cpp")
    flags = ["-O3", "-std=c++20", "-mavx2", "-mfma", "-pthread"]
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
    return program


def shares(model: LoadedModel, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """How much of what the machine can do decode and prefill reach; limits and figures of the same round."""
    gathered: set[str] = set()
    num_macs = 0
    for op in model.program.ops:
        if isinstance(op, GatherRows) or (isinstance(op, Norm) and op.x in gathered):
            gathered.add(op.out)
        elif isinstance(op, Linear) and op.x not in gathered:
            num_macs += model.weights[op.weight].rows * model.weights[op.weight].cols
    num_bytes = sum(weight.data.nbytes for weight in model.weights.values())

    def median(figure: str, limit: str, per_token: float) -> float:
        return statistics.median(
            turn["firstlight"][figure] * per_token / (turn["limits"][limit] * 1e9) for turn in rounds
        )

    return {
        "weight_bytes": num_bytes,
        "prefill_macs_per_token": num_macs,
        "decode_16_of_dram_bandwidth": round(median("decode_16", "dram_gb_s", num_bytes), 3),
        "prefill_512_of_int8_peak": round(median("prefill_512", "int8_gmac_s", num_macs), 3),
        "prefill_2048_of_int8_peak": round(median("prefill_2048", "int8_gmac_s", num_macs), 3),
    }


async def run(args: argparse.Namespace, servers: list[Server], prompts: Prompts) -> list[dict[str, Any]]:
    return [await run_round(servers, prompts, args) for _ in range(args.rounds)]


def main() -> None:
    args = parse_args()
    model = load_model(args.model, native=native_pack)
    prompts = Prompts(Tokenizer.from_gguf(model.tokenizer.metadata), args.seed)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        args.limits = build_limits(Path(folder))
        servers = chosen_servers(args, Path(folder))
        rounds = asyncio.run(run(args, servers, prompts))
    llama = version_of([str(args.llama_bin / "llama-server"), "--version"]) if args.llama_bin else None
    ask = "import openvino_genai; print(openvino_genai.__version__)"
    openvino = version_of([str(args.openvino_python), "-c", ask]) if args.openvino_python else None
    document = {
        **conditions("benchmarks.peers", args.threads),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "versions": {"llama.cpp": llama, "OpenVINO GenAI": openvino, "python": platform.python_version()},
        "model": {"file": args.model.name, "bytes": args.model.stat().st_size},
        "servers": {server.name: [Path(word).name for word in server.command] for server in servers},
        "summary": summarise(rounds) | {"firstlight_of_limits": shares(model, rounds)},
        "rounds": rounds,
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
