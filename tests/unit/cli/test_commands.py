"""The commands end to end, as processes, on the fake backend."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "firstlight"]


def firstlight(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], input=stdin, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """(address, start-up screen) of `firstlight serve`, which must stop cleanly when told to."""
    argv = [*COMMAND, "serve", "--backend", "fake", "--port", "0", "--served-model-name", "toy"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        while "curl" not in "".join(lines) and (line := server.stderr.readline()):
            lines.append(line)
        screen = "".join(lines)
        address = re.search(r"address +(\S+)", screen)
        assert address, screen
        yield address[1], screen
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    assert server.returncode == 0


def test_serve_says_what_it_runs_on_and_where(served: tuple[str, str]) -> None:
    url, screen = served
    for words in ("ready in", "toy", "fake backend, 1 thread", "blocks x 16 tokens", url, "curl -N"):
        assert words in screen
    with urllib.request.urlopen(f"{url}/ready", timeout=30) as answer:
        assert answer.status == 200


def test_bench_of_a_running_server_writes_table_and_report(served: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = ["--concurrency", "1,3", "--requests", "4", "--max-tokens", "6", "--json", str(file)]
    done = firstlight("bench", served[0], *argv)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["1", "4"], ["3", "4"]]
    report = json.loads(file.read_text())
    assert report["server"] == {"url": served[0], "model": "toy", "is_started_for_the_run": False}
    assert [record["completion_tokens"] for record in report["records"]] == [6] * 8
    assert [summary["errors"] for summary in report["summary"]] == [0, 0]


def test_bench_without_an_address_measures_a_server_of_its_own() -> None:
    done = firstlight("bench", "--backend", "fake", "--concurrency", "2", "--requests", "2", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["2", "2"]


@pytest.mark.parametrize("option", ["--repeats 3", "--prompts some.jsonl", "--slo ttft_p95=1s", "--html page.html"])
def test_bench_refuses_options_that_a_closed_loop_has_no_use_for(option: str) -> None:
    done = firstlight("bench", "http://127.0.0.1:9", *option.split())
    assert done.returncode == 2
    assert option.split()[0] in done.stderr


def test_bench_tells_why_its_own_server_did_not_start() -> None:
    done = firstlight("bench", "--model", "/no/such.gguf", "--concurrency", "1")
    assert done.returncode == 2
    assert "/no/such.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_whose_requests_fail_says_so_and_fails() -> None:
    load = ["--concurrency", "1", "--requests", "2", "--max-tokens", "4"]
    done = firstlight("bench", "--backend", "fake", "--max-model-len", "96", *load)
    assert done.returncode == 1
    assert "(2 failed)" in done.stdout
    assert "error: 2 requests failed, the first with: " in done.stderr
    assert "96 tokens" in done.stderr


@pytest.mark.parametrize("where", ["in this process", "on a server"])
def test_chat_through_a_pipe_answers_every_line(where: str, served: tuple[str, str]) -> None:
    argv = ["--backend", "fake"] if where == "in this process" else ["--url", served[0]]
    done = firstlight("chat", *argv, "--max-tokens", "5", stdin="hello\n/reset\nand again\n")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\[TTFT .* 5 tokens", done.stderr)) == 2
    assert done.stdout.strip()
