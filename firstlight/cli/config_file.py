"""Options in a TOML file, by the names they have on the command line; what was typed wins over the file.

Knows options as declared; knows no command's meaning.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.cli.arguments import KIND_NAMES, Invocation, flag_of, kind_of, nearest
from firstlight.errors import ConfigError

__all__ = ["render_file", "with_file"]


def with_file(invocation: Invocation, path: str, kinds: tuple[type, ...]) -> Invocation:
    """The invocation with what the file says where nothing was typed.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a name or value that is not an option of `kinds`.
    """
    known = {_key(field.name): (kind, field) for kind in kinds for field in dataclasses.fields(kind)}
    given = dict(invocation.given)
    for key, value in _read(path).items():
        if key not in known:
            close = nearest(key, known)
            raise ConfigError(
                f"`{path}`: `{key}` is not an option",
                param=key,
                hint=f"did you mean `{close}`?"
                if close
                else "docs/options.md lists them: `--max-queue` is `max-queue`",
            )
        kind, field = known[key]
        checked = _checked(f"`{path}`: `{key}`", value, typing.get_type_hints(kind)[field.name], field)
        given.setdefault(field.name, checked)
    configs = dict(invocation.configs)
    for kind in kinds:
        names = {field.name for field in dataclasses.fields(kind)}
        configs[kind] = kind(**{name: value for name, value in given.items() if name in names})
    return Invocation(invocation.command, configs, given)


def render_file(options: Mapping[str, object], notes: str) -> str:
    """A file that `with_file` reads: the notes as comments, then one option (by its field's name) a line."""
    lines = [f"# {line}".rstrip() for line in notes.splitlines()]
    return "\n".join([*lines, "", *(f"{_key(name)} = {_literal(value)}" for name, value in options.items())]) + "\n"


def _key(name: str) -> str:
    return flag_of(name)[2:]


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        escaped = "".join(
            f"\\u{ord(char):04x}" if char in '"\\' or ord(char) < 32 or ord(char) == 127 else char for char in value
        )
        return f'"{escaped}"'
    return repr(value)


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"`--config {path}` cannot be read: {error.strerror or error}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`--config {path}` is not TOML: {error}", param="config", hint='write `threads = 2` or `host = "0.0.0.0"`'
        ) from None


def _checked(place: str, value: Any, hint: Any, field: dataclasses.Field[Any]) -> Any:
    kind, is_list = kind_of(hint)
    if not is_list:
        return _checked_one(place, value, kind, field)
    if not isinstance(value, list):
        raise ConfigError(f"{place} is {value!r}, which is not a list", hint='write ["a", "b"]')
    return tuple(_checked_one(place, part, kind, field) for part in value)


def _checked_one(place: str, value: Any, kind: type, field: dataclasses.Field[Any]) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{place} is {value!r}, which is not {KIND_NAMES[kind]}")
    choices = field.metadata.get("choices", ())
    if choices and value not in choices:
        close = nearest(str(value), choices)
        raise ConfigError(
            f"{place} is {value!r}, allowed: {', '.join(choices)}", hint=f"did you mean {close}?" if close else None
        )
    return value
