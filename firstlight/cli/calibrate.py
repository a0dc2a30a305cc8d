"""`firstlight calibrate`: what steps cost on this machine, as a hardware file for `firstlight simulate`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from firstlight.backend.base import BackendInfo
from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import CalibrateConfig
from firstlight.cli.console import dim, note
from firstlight.cli.download import fetch_if_missing
from firstlight.config import EngineConfig
from firstlight.engine.calibrate import MeasuredSteps, measure_steps
from firstlight.engine.load import load_parts
from firstlight.errors import ConfigError
from firstlight.simulate import Hardware

__all__ = ["calibrated", "run"]


def run(invocation: Invocation) -> int:
    """Loads the model, measures, writes the file."""
    calibration, config = invocation.config(CalibrateConfig), invocation.config(EngineConfig)
    path = Path(calibration.output)
    if calibration.rounds < 1:
        raise ConfigError(f"`--rounds` is {calibration.rounds}: at least 1 is needed", param="rounds")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`{path}`: its folder does not exist", param="output", hint="create the folder first")
    hardware, steps = calibrated(config, calibration.rounds)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(hardware), indent=1) + b"\n")
    alone_ms, prompt_ms = 1e3 * steps.step_s(100, 1), 1e3 * steps.step_s(0, 512)
    print(f"{path}: a token alone {alone_ms:.2f} ms, a prompt of 512 tokens {prompt_ms:.0f} ms")
    return 0


def calibrated(config: EngineConfig, num_rounds: int) -> tuple[Hardware, MeasuredSteps]:
    """Loads the model, runs every load `num_rounds` times, closes it. Raises ConfigError."""
    if config.backend == "cpu":
        fetch_if_missing(config.model)
    parts = load_parts(config)
    try:
        note(dim(f"measuring steps of {parts.model_name}"))
        steps = measure_steps(parts.backend, config, num_rounds)
        return _hardware(parts.model_name, parts.backend.info, steps), steps
    finally:
        parts.backend.close()


def _hardware(model_name: str, info: BackendInfo, steps: MeasuredSteps) -> Hardware:
    cost, limits = steps.coefficients, steps.limits
    return Hardware(
        name=f"{info.name}, {model_name}",
        assumptions={
            "what": "measured on this machine by `firstlight calibrate`; HTTP and text are not in it",
            "threads": info.num_threads,
            "steps": steps.num_steps,
            "mean_error": round(steps.mean_error, 3),
        },
        step_s=cost.step_s,
        row_s=cost.row_s,
        token_s=cost.token_s,
        context_s=cost.context_s,
        pair_s=cost.pair_s,
        kv_tokens=info.num_blocks * info.block_size,
        block_size=info.block_size,
        max_step_rows=limits.max_step_rows,
        max_step_tokens=limits.max_step_tokens,
        max_model_len=limits.max_model_len,
    )
