"""How close the CPU backend's next-token distributions are to float32, beside llama.cpp on the same file.

The reference is the numpy executor in float32 over the file's dequantised weights. It is written as a base file of
llama.cpp's `llama-perplexity`, so both engines are held to the very same numbers at the same positions: the second half
of every passage in tests/data/quality.jsonl, as that tool does it.

    python -m benchmarks.quality MODEL.gguf --llama-bin DIR --out benchmarks/results/quality-NAME.json
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.document import conditions, version_of, write
from firstlight.backend.cpu import CpuBackend, native_pack
from firstlight.config import EngineConfig
from firstlight.models.weights import LoadedModel, load_model
from firstlight.text import ChatTemplate, Tokenizer
from tests.oracle.compare import Window, backend_logits, kl_divergence, log_softmax, windows
from tests.oracle.executor import Oracle

NUM_TOKENS = 512
FIRST = NUM_TOKENS // 2
"""First scored position; llama-perplexity scores [n_ctx / 2, n_ctx - 1)."""
BASE_RANGE_NATS = 16.0
"""A base file holds log-probabilities down to this far below the best one, in 65,535 steps."""

_STATS = {
    "mean_kl": r"Mean +KLD: +(\S+)",
    "p99_kl": r"99\.0% +KLD: +(\S+)",
    "max_kl": r"Maximum KLD: +(\S+)",
    "top1_agreement": r"Same top p: +(\S+)",
    "perplexity": r"Mean PPL\(Q\) +: +(\S+)",
}


class BaseFile:
    """Reference log-probabilities of some windows, rounded to 16 bits as llama.cpp stores them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._rows: list[bytes] = []

    def add(self, token_ids: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Adds one window. Returns: its log-probabilities as the file holds them."""
        exact = log_softmax(logits)
        low = np.maximum(exact.min(axis=1), exact.max(axis=1) - BASE_RANGE_NATS).astype(np.float32)[:, None]
        scale = ((exact.max(axis=1, keepdims=True) - low) / 65535).astype(np.float32)
        codes = np.clip(np.rint((exact - low) / scale), 0, 65535).astype("<u2")
        padding = np.zeros((len(codes), self._vocab_size % 2), "<u2")
        heads = np.concatenate([scale, low], axis=1).astype("<f4").view("<u2")
        self._tokens += token_ids
        self._rows.append(np.concatenate([heads, codes, padding], axis=1).tobytes())
        return scale.astype(np.float64) * codes + low

    def write(self, path: Path) -> None:
        """Source of the format: llama.cpp, tools/perplexity/perplexity.cpp."""
        head = struct.pack("<8sIii", b"_logits_", NUM_TOKENS, self._vocab_size, len(self._tokens) // NUM_TOKENS)
        path.write_bytes(head + np.array(self._tokens, "<i4").tobytes() + b"".join(self._rows))


class Score:
    """One engine's distance from the reference, position by position."""

    def __init__(self) -> None:
        self._kl: list[npt.NDArray[np.float64]] = []
        self._agrees: list[npt.NDArray[np.bool_]] = []
        self._nll: list[npt.NDArray[np.float64]] = []

    def add(self, reference: npt.NDArray[np.float64], logits: npt.NDArray[np.float32], next_ids: Sequence[int]) -> None:
        """One window: log-probabilities of the reference, logits of the engine, the ids that follow in the text."""
        mine = log_softmax(logits)
        self._kl.append(kl_divergence(np.where(reference > -BASE_RANGE_NATS, reference, -np.inf), mine))
        self._agrees.append(mine.argmax(axis=1) == reference.argmax(axis=1))
        self._nll.append(-np.take_along_axis(mine, np.array(next_ids)[:, None], axis=1)[:, 0])

    def summary(self) -> dict[str, float]:
        kl = np.concatenate(self._kl)
        return {
            "positions": len(kl),
            "mean_kl": float(kl.mean()),
            "p99_kl": float(np.percentile(kl, 99)),
            "max_kl": float(kl.max()),
            "top1_agreement": float(np.concatenate(self._agrees).mean()),
            "perplexity": float(np.exp(np.concatenate(self._nll).mean())),
        }


def run_llama(binary: Path, model: Path, base: Path, threads: int) -> dict[str, float]:
    """llama-perplexity's own figures against the base file."""
    command = [str(binary), "-m", str(model), "-t", str(threads), "-c", str(NUM_TOKENS), "-b", str(NUM_TOKENS)]
    command += ["--kl-divergence", "--kl-divergence-base", str(base)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    found = {}
    for name, pattern in _STATS.items():
        match = re.search(pattern, text)
        if match is None:
            raise RuntimeError(f"no {name} in what {binary} printed:\n{text[-2000:]}")
        found[name] = float(match.group(1))
    found["top1_agreement"] /= 100
    return found


def measure(kind: str, chosen: list[Window], model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """All engines on the windows of one kind."""
    oracle = Oracle(model.program, model.weights, model.constants, kv_f16=False)
    config = EngineConfig(threads=args.threads, max_step_rows=NUM_TOKENS, max_model_len=NUM_TOKENS)
    backend = CpuBackend(model, config)
    base, ours, self_score = BaseFile(backend.info.vocab_size), Score(), Score()
    for window in chosen:
        ids, next_ids = window.token_ids, window.token_ids[FIRST + 1 :]
        logits = oracle.logits(ids, range(FIRST, NUM_TOKENS - 1))
        reference = base.add(ids, logits)
        self_score.add(reference, logits, next_ids)
        ours.add(reference, backend_logits(backend, ids, FIRST)[:-1], next_ids)
        print(f"{kind} {window.id}: {json.dumps(ours.summary())}", file=sys.stderr)
    results = {"reference": self_score.summary(), "firstlight": ours.summary()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.kld"
        base.write(path)
        peers = {"llama.cpp": args.model, "llama.cpp, float32 file": args.float32}
        for name, file in peers.items():
            if args.llama_bin is not None and file is not None:
                results[name] = run_llama(args.llama_bin / "llama-perplexity", file, path, args.threads)
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-perplexity; without it llama.cpp is left out")
    parser.add_argument("--float32", type=Path, help="the same weights as an F32 GGUF, to check the reference itself")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    model = load_model(args.model, native=native_pack)
    tokenizer = Tokenizer.from_gguf(model.tokenizer.metadata)
    found = windows(tokenizer, ChatTemplate.of(tokenizer, model.chat_template), NUM_TOKENS)
    kinds = sorted({window.kind for window in found})
    document = {
        **conditions("benchmarks.quality", args.threads),
        "versions": {
            "llama.cpp": version_of([str(args.llama_bin / "llama-perplexity"), "--version"])
            if args.llama_bin
            else None,
            "numpy": np.__version__,
        },
        "model": {"file": args.model.name, "bytes": args.model.stat().st_size},
        "windows": {"tokens": NUM_TOKENS, "scored_from": FIRST, "ids": [window.id for window in found]},
        "results": {kind: measure(kind, [w for w in found if w.kind == kind], model, args) for kind in kinds},
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
