"""The command `firstlight`: runs the command that was asked for, and turns errors into two lines and a code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from firstlight.cli.arguments import parse, render_overview
from firstlight.cli.commands import COMMANDS
from firstlight.cli.console import exit_code_of, note, print_error
from firstlight.errors import FirstlightError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 2: the caller can fix it; 1: ours; 75: try later; 130: Ctrl-C."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, not at exit, where a closed pipe could only be complained about
    except FirstlightError as error:
        print_error(error)
        return exit_code_of(error)
    except KeyboardInterrupt:
        note("")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing more to say, and nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str]) -> int:
    invocation = parse(COMMANDS, argv)
    if invocation is None:
        print(render_overview(COMMANDS))
        return 0
    module, _, function = invocation.command.run.partition(":")
    code: int = getattr(importlib.import_module(module), function)(invocation)
    return code


if __name__ == "__main__":
    sys.exit(main())
