"""`firstlight bench` and `doctor` as processes, on the deterministic backend where that is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.machine import build_finding, cpu_features


def firstlight(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "firstlight", *argv], capture_output=True, text=True, timeout=120)


def test_open_loop_over_repeats_writes_every_file(tmp_path: Path) -> None:
    names = {kind: str(tmp_path / f"out.{kind}") for kind in ("json", "jsonl", "html")}
    files = [word for kind, name in names.items() for word in (f"--{kind}", name)]
    load = ["--rate", "50", "--requests", "6", "--max-tokens", "4", "--repeats", "2", "--slo", "ttft_p95=60s"]
    done = firstlight("bench", "--backend", "fake", *load, "--input-tokens", "30", "--prefix-tokens", "20", *files)
    assert done.returncode == 0, done.stderr
    assert "goodput/s" in done.stdout
    document = json.loads(Path(names["json"]).read_text())
    lines = [json.loads(line) for line in Path(names["jsonl"]).read_text().splitlines()]
    assert len(document["records"]) == len(lines) == 12
    assert {line["completion_tokens"] for line in lines} == {4}
    assert document["commit"] is None or len(document["commit"]) >= 40
    page = Path(names["html"]).read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--find-max"], "needs `--slo` and a first `--rate`"),
        (["--compare", "http://127.0.0.1:9"], "it takes 2"),
        (["--rate", "1", "--slo", "fast"], "not an objective"),
        (["--rate", "1", "--prefix-tokens", "4"], "give `--input-tokens` too"),
        (["--ladder", "--rate", "1"], "starts its own servers"),
        (["--ladder", "--mode", "static"], "the ladder sets"),
        (["--rate", "1", "--html", "/no/such/folder/x.html"], "its folder does not exist"),
    ],
)
def test_load_that_cannot_be_is_refused(argv: list[str], words: str) -> None:
    done = firstlight("bench", "--backend", "fake", *argv)
    assert done.returncode == 2
    assert words in done.stderr


def test_findings_on_the_build_name_what_is_wrong() -> None:
    assert "scalar kernels" in build_finding(("avx2",))[0]
    assert build_finding(("avx2", "fma", "f16c", "avx512_vnni", "avx_vnni")) == []
    assert "avx_vnni, which the AVX2" in build_finding(("avx2", "fma", "f16c", "avx_vnni"))[0]
    assert build_finding(("avx2", "fma", "f16c", "avx512_vnni", "avx_vnni", "amx_int8")) == []
    assert build_finding(("avx2", "fma", "f16c")) == []
    assert set(cpu_features()) <= {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"}
