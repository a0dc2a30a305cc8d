from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.__main__ import main
from firstlight.backend.fake import FakeBackend, StepCost, VirtualClock
from firstlight.config import EngineConfig
from firstlight.engine.calibrate import measure_steps
from firstlight.scheduler import StepLoad
from firstlight.simulate import read_hardware


def test_calibrate_writes_a_file_that_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "this.json"
    assert main(["calibrate", "--backend", "fake", "--output", str(out)]) == 0
    hardware = read_hardware(str(out))
    assert hardware.block_size == 16
    assert hardware.kv_tokens > 0
    assert "steps" in hardware.assumptions
    assert str(out) in capsys.readouterr().out


def test_calibrate_into_a_missing_folder_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--backend", "fake", "--output", str(tmp_path / "no" / "x.json")]) == 2
    assert "folder does not exist" in capsys.readouterr().err


def test_calibrate_no_rounds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--backend", "fake", "--rounds", "0", "--output", str(tmp_path / "x.json")]) == 2
    assert "`--rounds` is 0: at least 1" in capsys.readouterr().err


def test_measured_steps_are_those_of_the_backend() -> None:
    clock = VirtualClock()
    cost = StepCost(step_s=0.004, row_s=0.0002, token_s=0.001, attended_s=2e-7)
    backend = FakeBackend(num_blocks=1024, max_model_len=4096, cost=cost, sleep=clock.advance)
    steps = measure_steps(backend, EngineConfig(backend="fake"), 2, clock)
    for rows, start, num in ((1, 100, 1), (16, 300, 1), (1, 0, 512), (1, 2000, 64)):
        load = StepLoad()
        for _ in range(rows):
            load.add(start, num)
        real_s = cost.step_s + cost.row_s * rows + cost.token_s * load.tokens + cost.attended_s * load.attended
        assert steps.predict_s(load) == pytest.approx(real_s, rel=0.02)
