from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstlight.__main__ import main


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp_s": i / 2,
            "input_tokens": 40,
            "output_tokens": 4,
            "block_size": 16,
            "block_runs": [[0, 1], [2 * i, 2]],
        }
        for i in range(1, 12)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_simulate_json_is_one_object_with_hit_rate_and_times(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [trace, "--hardware", "h100-8b", "--policy", "lru", "--cache-blocks", "12", "--slo", "ttft_p95=1s", "--json"]
    assert main(["simulate", *argv]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prefix_blocks"] == 33
    assert found["prefix_block_hit_rate"] == pytest.approx(10 / 33)
    assert found["timed"]["requests"] == 11
    assert found["timed"]["goodput_per_s"] > 0
    assert found["setup"]["hardware"]["assumptions"]["chips"] == 1


def test_simulate_optimum_counts_hits_only(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", trace, "--hardware", "h100-8b", "--policy", "optimum", "--cache-blocks", "12", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["prefix_block_hits"] == 10
    assert found["timed"] is None


def test_simulate_page_holds_table_and_plots(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["simulate", trace, "--hardware", "h200-70b", "--html", str(page)]) == 0
    assert page.read_text().count("<svg") == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "needs a trace"),
        (["TRACE"], "cache has no size"),
        (["TRACE", "--cache-blocks", "4", "--png", "x.png"], "plots are of times"),
        (["TRACE", "--cache-blocks", "4", "--policy", "optimum", "--replicas", "2"], "one cache"),
        (["TRACE", "--cache-blocks", "4", "--policy", "mru"], "mru"),
    ],
)
def test_simulate_options_that_make_no_sense_are_refused(
    trace: str, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *(trace if word == "TRACE" else word for word in argv)]) == 2
    assert words in capsys.readouterr().err
