"""`firstlight pull`: a model onto this machine, checked; its path to stdout."""

from __future__ import annotations

from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import PullConfig
from firstlight.cli.console import dim, note
from firstlight.cli.download import progress_bar
from firstlight.models.hub import fetch_from_hub
from firstlight.models.store import pull

__all__ = ["run"]


def run(invocation: Invocation) -> int:
    """Prints where the model is, after fetching what is missing."""
    name = invocation.config(PullConfig).name
    if name.startswith("hf:"):
        path = fetch_from_hub(name)
    else:
        with progress_bar(name) as progress:
            path = pull(name, progress)
    if path.is_file():
        note(dim(f"{name}: {path.stat().st_size / 1e6:.0f} MB, checked"))
    print(path)
    return 0
