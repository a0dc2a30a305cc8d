"""Fixtures shared by every tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from firstlight.models.store import find_local

# How long an example took to draw says what else the machine was doing. Where the suite is a gate, the same tree gets
# the same examples; everywhere else each run looks at others.
settings.register_profile(
    "firstlight", suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize="CI" in os.environ
)
settings.load_profile("firstlight")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared workloads beside the repository (or in FIRSTLIGHT_SHARED); skips where it is absent."""
    path = Path(os.environ.get("FIRSTLIGHT_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (path / "workloads").is_dir():
        pytest.skip(f"no shared workloads at {path}")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; skips where it is neither cached nor named by FIRSTLIGHT_TEST_MODEL."""
    local = find_local("smollm2-135m")
    if local:
        return local
    named = os.environ.get("FIRSTLIGHT_TEST_MODEL")
    if not named or not Path(named).is_file():
        pytest.skip("the default model is not here: run `firstlight pull smollm2-135m` or set FIRSTLIGHT_TEST_MODEL")
    return Path(named)
