"""Fetching a model with a progress bar on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from firstlight.cli.console import note
from firstlight.models.store import MODELS, find_local, resolve_model

if TYPE_CHECKING:
    from firstlight.models.download import Progress

__all__ = ["fetch_if_missing", "progress_bar"]


def fetch_if_missing(model: str) -> None:
    """Downloads a short name's file that is not on this machine yet; anything else is left to whoever loads it."""
    if model in MODELS and find_local(model) is None:
        with progress_bar(model) as progress:
            resolve_model(model, progress)


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A callback (bytes so far, bytes in all) that draws a bar on a terminal, and a line per tenth elsewhere."""
    if not sys.stderr.isatty():
        yield _line_per_tenth(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _line_per_tenth(name: str) -> Progress:
    last = -1

    def report(done: int, total: int | None) -> None:
        nonlocal last
        tenth = 10 * done // total if total else 0
        if tenth != last:
            last = tenth
            note(f"{name}: {done / 1e6:.0f} of {(total or 0) / 1e6:.0f} MB")

    return report
