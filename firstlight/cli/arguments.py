"""The grammar of the command line: option dataclasses in, filled config objects out.

Flags, help and checks all come from the fields' metadata (`config.option`), so an option is declared once. Knows no
command's meaning and imports nothing heavy: `--help` has to be instant.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from firstlight.errors import ConfigError

__all__ = [
    "KIND_NAMES",
    "Command",
    "Invocation",
    "describe",
    "flag_of",
    "kind_of",
    "nearest",
    "parse",
    "render_overview",
]

Config = TypeVar("Config")

KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Command:
    """One word after `firstlight`. `run` is "module:function", imported only when the command is chosen."""

    name: str
    summary: str
    run: str
    options: tuple[type, ...] = ()
    positional: str = ""
    """The field that may be given without its flag."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """What was asked for: the command, one filled config per option class, and the fields that were really typed."""

    command: Command
    configs: dict[type, Any]
    given: dict[str, Any]

    def config(self, kind: type[Config]) -> Config:
        """The filled config of one option class."""
        return typing.cast(Config, self.configs[kind])

    def given_from(self, kind: type) -> dict[str, Any]:
        """The typed options that belong to one option class."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in self.given.items() if name in names}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a mistyped one most resembles, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def flag_of(name: str) -> str:
    """The flag of a field: `max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def parse(commands: Sequence[Command], argv: Sequence[str]) -> Invocation | None:
    """The invocation in `argv`, or None when only the overview was asked for.

    Raises:
        ConfigError: an unknown command or option (with the nearest known name), or a value of the wrong kind.
        SystemExit: after printing a command's help.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        return None
    by_name = {command.name: command for command in commands}
    name = "version" if argv[0] in ("-V", "--version") else argv[0]
    if name not in by_name:
        close = nearest(name, by_name)
        hint = f"did you mean `firstlight {close}`?" if close else f"the commands are {', '.join(by_name)}"
        raise ConfigError(f"`{name}` is not a command", hint=hint)
    command = by_name[name]
    parser = _build_parser(command)
    namespace, extra = parser.parse_known_args(list(argv[1:]))
    if extra:
        _refuse(command, extra[0], parser)
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    configs: dict[type, Any] = {}
    for kind in command.options:
        names = {field.name for field in dataclasses.fields(kind)}
        configs[kind] = kind(**{name: value for name, value in given.items() if name in names})
    return Invocation(command, configs, given)


def render_overview(commands: Sequence[Command]) -> str:
    """The screen of `firstlight --help`."""
    lines = ["usage: firstlight COMMAND [options]", "", "commands:"]
    width = max(len(_usage_name(command)) for command in commands)
    lines += [f"  {_usage_name(command):<{width}}  {command.summary}" for command in commands]
    lines += ["", "`firstlight COMMAND --help` lists a command's options."]
    return "\n".join(lines)


def _usage_name(command: Command) -> str:
    return f"{command.name} [{command.positional.upper()}]" if command.positional else command.name


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} --help` lists the options")


def _build_parser(command: Command) -> _Parser:
    prog = f"firstlight {command.name}"
    positional = f" [{command.positional.upper()}]" if command.positional else ""
    parser = _Parser(
        prog=prog,
        usage=f"{prog}{positional}" + (" [options]" if command.options else ""),
        description=command.summary,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    for kind in command.options:
        group = parser.add_argument_group(_group_title(kind))
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            _add_option(parser, group, field, hints[field.name], is_positional=field.name == command.positional)
    return parser


def _group_title(kind: type) -> str:
    return f"{kind.__name__.removesuffix('Config').lower()} options"


def _add_option(
    parser: _Parser, group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, *, is_positional: bool
) -> None:
    text = describe(field).replace("%", "%%")
    if is_positional:
        convert = _converter(field.name.upper(), hint, field.metadata.get("choices", ()))
        parser.add_argument(field.name, nargs="?", metavar=field.name.upper(), help=text, type=convert)
        return
    flag = flag_of(field.name)
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    choices = field.metadata.get("choices", ())
    metavar = "|".join(choices) if choices else _metavar(hint, field.metadata.get("unit", ""))
    spellings = (flag, "-o") if field.name == "output" else (flag,)
    group.add_argument(*spellings, metavar=metavar, help=text, type=_converter(flag, hint, choices))


def describe(field: dataclasses.Field[Any]) -> str:
    """A field's help sentence with its default: "compute threads (default 0)"."""
    text = str(field.metadata["help"])
    default = field.default
    if default in ("", None, ()):
        return text
    if isinstance(default, bool):
        return f"{text} (default {'on' if default else 'off'})"
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default {shown})"


def _metavar(hint: Any, unit: str) -> str:
    kind, _ = kind_of(hint)
    return unit.upper() if unit else {int: "N", float: "X", str: "TEXT"}[kind]


def kind_of(hint: Any) -> tuple[type, bool]:
    """The element type of an annotation and whether it is a comma-separated list."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _converter(flag: str, hint: Any, choices: tuple[str, ...]) -> Callable[[str], Any]:
    kind, is_list = kind_of(hint)

    def convert_one(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"`{flag}` is {text!r}, which is not {KIND_NAMES[kind]}") from None
        if choices and value not in choices:
            close = nearest(text, choices)
            raise ConfigError(
                f"`{flag}` is {text!r}, allowed: {', '.join(choices)}", hint=f"did you mean {close}?" if close else None
            )
        return value

    def convert(text: str) -> Any:
        if not is_list:
            return convert_one(text)
        return tuple(convert_one(part.strip()) for part in text.split(",") if part.strip())

    return convert


def _refuse(command: Command, token: str, parser: _Parser) -> NoReturn:
    if not token.startswith("-"):
        raise ConfigError(
            f"`{token}` is one argument too many for `{parser.prog}`", hint=f"`{parser.prog} --help` shows the order"
        )
    flag = token.split("=", 1)[0]
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    close = nearest(flag, known)
    listing = f"`{parser.prog} --help` lists every option"
    raise ConfigError(
        f"`{flag}` is not an option of `{parser.prog}`",
        param=flag,
        hint=f"did you mean `{close}`? {listing}" if close else listing,
    )
