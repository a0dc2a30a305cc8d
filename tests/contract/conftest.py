"""Every backend this machine can build, over a model of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from firstlight.backend.base import Backend
from firstlight.backend.fake import FakeBackend
from firstlight.config import EngineConfig

CONTEXT = 256
MakeBackend = Callable[..., Backend]


@pytest.fixture(scope="session")
def make_cpu(tmp_path_factory: pytest.TempPathFactory) -> MakeBackend:
    """Builds CPU backends over one tiny model; skips where the native module is not built."""
    cpu = pytest.importorskip("firstlight.backend.cpu", reason="the native module is not built")
    if not hasattr(cpu.backend._native, "Runner"):
        pytest.skip("the native module is not built")
    from firstlight.models.weights import load_model
    from tests.oracle.tiny_model import TinyShape, write_gguf

    path = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyShape(context=CONTEXT), types="Q4_1")
    model = load_model(path)

    def make(**options: Any) -> Backend:
        backend: Backend = cpu.CpuBackend(model, EngineConfig(**options))
        return backend

    return make


@pytest.fixture(params=["fake", "cpu"])
def make_backend(request: pytest.FixtureRequest) -> Iterator[MakeBackend]:
    """`make_backend(num_blocks=..., max_step_tokens=..., max_step_rows=..., threads=...)`; blocks hold 16 tokens."""
    built: list[Backend] = []
    make_cpu = request.getfixturevalue("make_cpu") if request.param == "cpu" else None

    def make(*, num_blocks: int = 64, max_step_tokens: int = 256, max_step_rows: int = 64, threads: int = 1) -> Backend:
        sizes = {"num_blocks": num_blocks, "max_step_tokens": max_step_tokens, "max_step_rows": max_step_rows}
        if make_cpu is not None:
            built.append(make_cpu(threads=threads, block_size=16, **sizes))
        else:
            built.append(FakeBackend(block_size=16, max_model_len=CONTEXT, **sizes))
        return built[-1]

    yield make
    for backend in built:
        backend.close()
