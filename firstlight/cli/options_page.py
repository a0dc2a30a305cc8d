"""`docs/options.md`, written from the options themselves: `python -m firstlight.cli.options_page > docs/options.md`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, get_type_hints

from firstlight.cli.arguments import flag_of
from firstlight.cli.commands import COMMANDS

__all__ = ["render"]


def render() -> str:
    """The whole page: the commands, then one table per group of options."""
    lines = [
        "# Options",
        "",
        "Written by `make docs` from the option dataclasses; a test holds it to them. Do not edit by hand.",
        "",
        "| Command | What it does | Options |",
        "|---|---|---|",
    ]
    kinds: list[type] = []
    for command in COMMANDS:
        positional = f" [{command.positional.upper()}]" if command.positional else ""
        groups = ", ".join(f"[{_title(kind)}](#{_title(kind)})" for kind in command.options) or "-"
        lines.append(f"| `firstlight {command.name}{positional}` | {command.summary} | {groups} |")
        kinds += [kind for kind in command.options if kind not in kinds]
    for kind in kinds:
        lines += _table(kind)
    return "\n".join(lines) + "\n"


def _title(kind: type) -> str:
    return kind.__name__.removesuffix("Config").lower()


def _table(kind: type) -> list[str]:
    summary = (kind.__doc__ or "").strip().splitlines()[0]
    lines = [
        "",
        f"## {_title(kind)}",
        "",
        summary,
        "",
        "| Option | Default | Unit | What it does |",
        "|---|---|---|---|",
    ]
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = flag_of(field.name)
        spelling = f"`{flag}`, `--no-{flag[2:]}`" if hints[field.name] is bool else f"`{flag}`"
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(
            f"| {spelling} | {_default(field.default)} | {field.metadata['unit']} | {field.metadata['help']}{choices} |"
        )
    return lines


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", None, ()):
        return "none"
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
