"""What prefix caches save beside the peers: a shared prefix, and conversations; same file, same client, in turns.

    python -m benchmarks.caching_peers shared MODEL.gguf --llama-bin DIR --openvino-python PYTHON --out RESULT.json
    python -m benchmarks.caching_peers turns MODEL.gguf --llama-bin DIR --openvino-python PYTHON --out RESULT.json

Raw completions, so that no chat template stands between: every engine gets the same prompts and is asked for as many
tokens. llama.cpp also runs the file requantised to Q4_0, its fastest, unless `--llama-kinds` says otherwise.
Exits 1 where firstlight does not reach what REACH says of the best peer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, version_of, write
from benchmarks.peers import Answer, Client, chosen_servers, running
from benchmarks.scheduling import percentile, words

REACH = {"shared": {"wall_s": 1 / 4, "ttft_p95_s": 1 / 4}, "turns": {"wall_s": 1 / 3, "later_ttft_p50_s": 1 / 2}}
"""At most this share of the best peer's figure."""


async def ask(client: Client, prompt: str, num_tokens: int) -> Answer:
    answer = await client.ask(prompt, num_tokens)
    if answer.error is not None or not answer.times_s:
        raise RuntimeError(f"a request failed: {answer.error}")
    return answer


async def shared(client: Client, args: argparse.Namespace) -> list[list[Answer]]:
    """`--requests` prompts, `--concurrency` at a time, whose first `--prefix` tokens are the same."""
    rng = random.Random(args.seed)
    prefix = words(rng, args.prefix)
    waiting = [f"{prefix} {words(rng, 30)}" for _ in range(args.requests)]
    answers: list[Answer] = []

    async def worker() -> None:
        while waiting:
            answers.append(await ask(client, waiting.pop(), args.tokens))

    await asyncio.gather(*(worker() for _ in range(args.concurrency)))
    return [[answer] for answer in answers]


async def turns(client: Client, args: argparse.Namespace) -> list[list[Answer]]:
    """`--conversations` at once, `--turns` each; every prompt goes on from the answer before it."""
    rng = random.Random(args.seed)
    asked = [[words(rng, 200 if at == 0 else 40) for at in range(args.turns)] for _ in range(args.conversations)]

    async def conversation(texts: list[str]) -> list[Answer]:
        prompt, answers = "", []
        for text in texts:
            prompt = f"{prompt}\n{text}\n"
            answers.append(await ask(client, prompt, args.tokens))
            prompt += answers[-1].text
        return answers

    return await asyncio.gather(*(conversation(texts) for texts in asked))


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Each engine's figures, in seconds."""
    figures = {}
    for server in chosen_servers(args, folder):
        if server.name.startswith("llama.cpp") and server.name.split()[1] not in args.llama_kinds:
            continue
        async with running(server) as (client, _, _):
            await ask(client, "Hello", 4)
            begin_s = time.perf_counter()
            answers = await {"shared": shared, "turns": turns}[args.scenario](client, args)
            wall_s = time.perf_counter() - begin_s
        first = [one.ttft_s for own in answers for one in own]
        later = [one.ttft_s for own in answers for one in own[1:]]
        figures[server.name] = {
            "wall_s": wall_s,
            "ttft_p50_s": percentile(first, 0.5),
            "ttft_p95_s": percentile(first, 0.95),
            **(
                {"later_ttft_p50_s": percentile(later, 0.5), "later_ttft_p95_s": percentile(later, 0.95)}
                if later
                else {}
            ),
            "output_tokens": sum(one.num_output for own in answers for one in own),
            "ttft_s": [round(one.ttft_s, 4) for own in answers for one in own],
        }
        print(server.name, {name: figure for name, figure in figures[server.name].items() if name != "ttft_s"})
    return figures


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("shared", "turns"))
    parser.add_argument("model", type=Path, help="GGUF file that every engine reads")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-server and llama-quantize")
    parser.add_argument("--llama-kinds", nargs="+", default=["Q4_0"], help="of Q4_1, Q4_0, Q8_0")
    parser.add_argument("--openvino-python", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    return parser.parse_args()


def main() -> int:
    """Runs one scenario on every engine, prints and saves its result."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args, Path(folder)))
    peers = [name for name in figures if name != "firstlight"]
    share_of_best = {
        name: figures["firstlight"][name] / min(figures[peer][name] for peer in peers)
        for name in REACH[args.scenario]
        if peers
    }
    ask_version = "import openvino_genai; print(openvino_genai.__version__)"
    document = {
        **conditions("benchmarks.caching_peers", args.threads),
        "scenario": args.scenario,
        "versions": {
            "llama.cpp": version_of([str(args.llama_bin / "llama-server"), "--version"]) if args.llama_bin else None,
            "OpenVINO GenAI": version_of([str(args.openvino_python), "-c", ask_version])
            if args.openvino_python
            else None,
        },
        "engines": figures,
        "firstlight_share_of_best_peer": share_of_best,
        "reach": REACH[args.scenario],
        "kept": all(
            share_of_best[name] <= most for name, most in REACH[args.scenario].items() if name in share_of_best
        ),
    }
    write(document, args.out)
    return 0 if document["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
