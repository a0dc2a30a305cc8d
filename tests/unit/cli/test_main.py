"""The command as a process: exit codes, streams, no tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli import options_page


def firstlight(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "firstlight", *argv], input=stdin, capture_output=True, text=True, timeout=60
    )


def test_version_goes_to_stdout() -> None:
    done = firstlight("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("firstlight ")


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--prot", "1"],
        ["serve", "/no/such/file.gguf"],
        ["pull", "no-such-name"],
        ["chat", "--url", "http://127.0.0.1:9", "--threads", "2"],
        ["bench", "http://127.0.0.1:9"],
        ["bench", "--concurrency", "0"],
        ["bench", "http://127.0.0.1:9", "--threads", "2"],
        ["bench", "ftp://somewhere"],
    ],
)
def test_mistake_gives_error_and_hint_lines_and_exit_code_two(argv: list[str]) -> None:
    done = firstlight(*argv)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert [line.split(":")[0] for line in lines if line][-2:] == ["error", "hint"], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["version"]])
def test_output_into_a_closed_pipe_is_no_error(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-m", "firstlight", *argv]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_page_is_current() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "options.md"
    assert page.read_text("utf-8") == options_page.render(), "run `make docs`"
