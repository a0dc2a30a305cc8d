"""How the terminal speaks: results on stdout, everything else on stderr, errors as two lines.

Knows streams and colours, not what is said.
"""

from __future__ import annotations

import os
import sys

from firstlight.errors import ConfigError, FirstlightError, OverloadedError, RequestError

__all__ = ["bold", "dim", "exit_code_of", "note", "print_error"]


def note(text: str) -> None:
    """Writes one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def bold(text: str) -> str:
    """`text` in bold where stderr is a terminal."""
    return _styled(text, "1")


def dim(text: str) -> str:
    """`text` dimmed where stderr is a terminal."""
    return _styled(text, "2")


def print_error(error: FirstlightError) -> None:
    """Writes "error: what was wrong" and, where there is one, "hint: what next"."""
    note(f"{_styled('error:', '1;31')} {error.message}")
    if error.hint:
        note(f"{_styled('hint:', '1;36')} {error.hint}")


def exit_code_of(error: FirstlightError) -> int:
    """2 for what the caller can change (options, files, requests), 75 for "try again later", 1 for our own failures."""
    if isinstance(error, OverloadedError):
        return os.EX_TEMPFAIL
    return 2 if isinstance(error, ConfigError | RequestError) else 1


def _styled(text: str, code: str) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{code}m{text}\x1b[0m"
