"""The thread team under stress: the same bits whoever runs, wherever called from, and beside a busy neighbour."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from firstlight.backend.cpu import CpuBackend
from firstlight.models.weights import LoadedModel
from tests.kernel.layouts import bits
from tests.kernel.models import RECIPES, build
from tests.kernel.test_runner import backend_of, prompt, row, run

BURN = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
NUM_STEPS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return build(RECIPES["llama-mixed"], Path(tmp_path_factory.mktemp("threads")))


@pytest.fixture(scope="module")
def wanted(model: LoadedModel) -> list[bytes]:
    """The logits of each step, computed on one thread."""
    backend = backend_of(model)
    return [one_step(backend, model, step) for step in range(NUM_STEPS)]


@pytest.fixture
def neighbours() -> Iterator[None]:
    """Two processes that keep two cores busy."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2)]
    yield
    for process in burning:
        process.kill()
        process.wait()


def one_step(backend: CpuBackend, model: LoadedModel, step: int) -> bytes:
    """A step of one of several shapes: one token, two, a tile, a chunk, several rows."""
    num = (1, 2, 5, 9, 40)[step % 5]
    tokens = prompt(model, num, step)
    rows = [row(tokens, 0, [0, 1, 2])] if step % 2 else [row(tokens, 0, [0, 1, 2]), row(tokens[:3], 0, [5])]
    return b"".join(bits(part) for part in run(backend, *rows))


def test_steps_each_from_a_fresh_thread_give_the_same_bits(model: LoadedModel, wanted: list[bytes]) -> None:
    for threads in (1, 2, 3, 4):
        backend = backend_of(model, threads=threads)
        for step in range(threads - 1, NUM_STEPS, 4):
            with ThreadPoolExecutor(1) as fresh:
                assert fresh.submit(one_step, backend, model, step).result(60) == wanted[step], (threads, step)
        backend.close()


@pytest.mark.usefixtures("neighbours")
def test_steps_beside_a_busy_neighbour_give_the_same_bits(model: LoadedModel, wanted: list[bytes]) -> None:
    for threads in (2, 3, 4):
        backend = backend_of(model, threads=threads)
        for step in range(NUM_STEPS):
            assert one_step(backend, model, step) == wanted[step], (threads, step)
        backend.close()


def test_teams_made_and_dropped_at_once_leave_no_thread(model: LoadedModel) -> None:
    """A team may end before its threads ever ran, and after one step."""
    before = num_threads()
    for i in range(20):
        backend = backend_of(model, threads=4)
        if i % 2:
            one_step(backend, model, i)
        backend.close()
    end_s = time.monotonic() + 60  # the system may list a thread for a moment after it was joined
    while num_threads() > before and time.monotonic() < end_s:
        time.sleep(0.005)
    assert num_threads() <= before


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_teams_of_several_backends_run_side_by_side(model: LoadedModel, wanted: list[bytes]) -> None:
    backends = [backend_of(model, threads=threads) for threads in (1, 2, 3)]

    def steps(backend: CpuBackend) -> list[bytes]:
        return [one_step(backend, model, step) for step in range(60)]

    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(steps, backends):
            assert got == wanted[:60]
    for backend in backends:
        backend.close()
