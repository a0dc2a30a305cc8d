"""The table on README's first screen, written from the committed result files and from nothing else.

python -m benchmarks.readme_table            # rewrites README.md
python -m benchmarks.readme_table --check    # fails when README.md says something else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "results" / "peers-smollm2-q4_1.json"
QUALITY = ROOT / "benchmarks" / "results" / "quality-smollm2-q4_1.json"
MARKED = re.compile(r"(<!-- figures[^>]*-->\n).*?(<!-- /figures -->)", re.DOTALL)

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("decode, 16 tokens of context, tok/s", "decode_16", 1, ".0f"),
    ("decode, 2,048 tokens of context, tok/s", "decode_2048", 1, ".0f"),
    ("prefill, 512 tokens, tok/s", "prefill_512", 1, ",.0f"),
    ("prefill, 2,048 tokens, tok/s", "prefill_2048", 1, ",.0f"),
    ("time to first token, 90-token prompt, ms", "ttft_90", 1e3, ".0f"),
    ("16 streams at once, tok/s together", "streams_16", 1, ".0f"),
    ("16 streams at once, median gap, ms", "streams_16_itl_p50", 1e3, ".0f"),
    ("ready after start, s", "ready_s", 1, ".1f"),
)
"""(what it says, key in the result file, factor, format)"""


def table(peers: dict[str, Any], quality: dict[str, Any]) -> str:
    """The lines between the marks."""
    medians = peers["summary"]["medians"]
    names = ["firstlight", *sorted(name for name in medians if name != "firstlight")]
    lines = [f"| {peers['model']['file']} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for text, key, factor, form in ROWS:
        cells = [format(medians[name][key] * factor, form) for name in names]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    kl = [" / ".join(_kl(quality, kind, name) for kind in sorted(quality["results"])) for name in names]
    lines.append(f"| KL to float32, chat / plain text, 1e-3 nats | {' | '.join(kl)} |")
    hardware, load = peers["hardware"], peers["load_average"]["before"][0]
    lines += [
        "",
        f"Medians of {len(peers['rounds'])} rounds, engines in turns, one client, {hardware['threads']} threads on "
        f"{hardware['cores']} cores of {hardware['cpu']}; load before the run {load:.1f}; "
        f"{peers['measured_at'][:10]}, commit {str(peers['commit'])[:9]}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in peers['versions'].items() if version)}.",
        "llama.cpp ran with 16 slots; OpenVINO GenAI brings no server and ran behind a thin one. Figures and commands:",
        "[peers](benchmarks/results/peers-smollm2-q4_1.json), [quality](benchmarks/results/quality-smollm2-q4_1.json).",
    ]
    return "\n".join(lines) + "\n"


def _kl(quality: dict[str, Any], kind: str, name: str) -> str:
    """Mean KL of one engine; a requantised file is another model, so it has none."""
    key = {"firstlight": "firstlight", "llama.cpp Q4_1": "llama.cpp"}.get(name, "")
    figures = quality["results"][kind].get(key)
    return f"{figures['mean_kl'] * 1e3:.2f}" if figures else "–"


def rewritten(readme: str) -> str:
    """README with the table as the files have it."""
    text = table(json.loads(PEERS.read_text()), json.loads(QUALITY.read_text()))
    found, count = MARKED.subn(lambda match: match[1] + text + match[2], readme)
    assert count == 1, "README.md has no place for the table"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    args = parser.parse_args()
    path = ROOT / "README.md"
    new = rewritten(path.read_text())
    if not args.check:
        path.write_text(new)
    elif new != path.read_text():
        sys.exit("README.md differs from the result files: run `python -m benchmarks.readme_table`")


if __name__ == "__main__":
    main()
