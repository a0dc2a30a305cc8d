"""`firstlight tune` on the deterministic backend: the whole way, and stopped and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from firstlight.__main__ import main
from firstlight.cli.arguments import parse
from firstlight.cli.commands import COMMANDS
from firstlight.cli.config_file import with_file
from firstlight.config import EngineConfig, ServerConfig

LOAD = ["tune", "--backend", "fake", "--slo", "ttft_p95=9000s,itl_p95=9000s", "--requests", "3", "--max-tokens", "4"]
SPACE = ["--space", "max-step-rows=2,64", "--max-step-tokens", "256"]


def journal(folder: Path) -> dict[str, Any]:
    path = folder / "tuned.journal.json"
    found: dict[str, Any] = json.loads(path.read_text())["found"] if path.exists() else {}
    return found


def test_tune_stopped_and_run_again_keeps_its_live_runs_and_writes_what_serve_takes(tmp_path: Path) -> None:
    files = ["--output", str(tmp_path / "tuned.toml"), "--html", str(tmp_path / "tuned.html")]
    command = [sys.executable, "-m", "firstlight", *LOAD, *SPACE, "--live-runs", "2", *files]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not journal(tmp_path).get("live") and started.poll() is None:
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    assert started.wait(120) in (0, 130, -signal.SIGTERM)  # it may just end, or have ended
    before = journal(tmp_path)
    assert before["live"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = journal(tmp_path)
    assert after["hardware"] == before["hardware"]
    assert list(after["live"].items())[: len(before["live"])] == list(before["live"].items())
    assert done.stderr.count("starting a server") == len(after["live"]) - len(before["live"])
    assert "highest rate inside ttft_p95=9000s,itl_p95=9000s" in done.stdout
    assert "binds" in done.stdout

    document = json.loads((tmp_path / "tuned.json").read_text())
    assert 1 <= len(document["live"]) <= 2
    assert document["outcome"] in [each["measured"] for each in document["live"]]
    assert document["pareto_front"]
    assert (tmp_path / "tuned.html").read_text().count("<svg") == 2

    invocation = parse(COMMANDS, ["serve", "--config", "tuned.toml"])
    assert invocation is not None
    read = with_file(invocation, str(tmp_path / "tuned.toml"), (EngineConfig, ServerConfig)).config(EngineConfig)
    assert (read.backend, read.max_step_tokens) == ("fake", 256)
    own, best = document["settings_of_the_engine"]["max_step_rows"], document["settings"]["max_step_rows"]
    assert read.max_step_rows == (EngineConfig().max_step_rows if own == best else best)
    assert "live runs, after" in (tmp_path / "tuned.toml").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "needs objectives"),
        (["--slo", "fast"], "not an objective"),
        (["--slo", "ttft_p95=1s", "--live-runs", "6"], "has to be 1 to 5"),
        (["--slo", "ttft_p95=1s", "--requests", "1"], "a rate takes 2"),
        (["--slo", "ttft_p95=1s", "--workload", "synthetic"], "needs a length"),
        (["--slo", "ttft_p95=1s", "--input-tokens", "9"], "built-in chat"),
        (["--slo", "ttft_p95=1s", "--prefix-tokens", "9"], "belongs to synthetic"),
        (["--slo", "ttft_p95=1s", "--workload", "/no/such.jsonl"], "cannot be read"),
        (["--slo", "ttft_p95=1s", "--output", "/no/such/folder/x.toml"], "its folder does not exist"),
        (["--slo", "ttft_p95=1s", "--space", "rows=1"], "not a setting that can be tuned"),
        (["--slo", "ttft_p95=1s", "--space", "max-step-rows=1", "--max-step-rows", "2"], "and also in `--space`"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--backend", "fake", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert not list(tmp_path.iterdir())


def test_empty_workload_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none.jsonl").write_text("\n")
    assert main(["tune", "--backend", "fake", "--slo", "ttft_p95=1s", "--workload", "none.jsonl"]) == 2
    assert "has no row" in capsys.readouterr().err
