"""Arguments become configs; mistakes become one error that names the nearest right thing."""

from __future__ import annotations

import dataclasses

import pytest

from firstlight.cli.arguments import Command, Invocation, flag_of, nearest, parse, render_overview
from firstlight.cli.commands import COMMANDS, BenchConfig, ChatConfig
from firstlight.config import EngineConfig, ServerConfig, option
from firstlight.errors import ConfigError


def invoke(*argv: str) -> Invocation:
    invocation = parse(COMMANDS, argv)
    assert invocation is not None
    return invocation


def test_serve_without_options_gives_the_defaults() -> None:
    invocation = invoke("serve")
    assert invocation.config(EngineConfig) == EngineConfig()
    assert invocation.config(ServerConfig) == ServerConfig()
    assert invocation.given == {}


def test_serve_with_options_fills_both_configs() -> None:
    invocation = invoke("serve", "some.gguf", "--threads", "3", "--port=0", "--no-prefix-cache", "--itl-slo-ms", "2.5")
    engine = invocation.config(EngineConfig)
    assert (engine.model, engine.threads, engine.prefix_cache, engine.itl_slo_ms) == ("some.gguf", 3, False, 2.5)
    assert invocation.config(ServerConfig).port == 0
    assert invocation.given_from(ServerConfig) == {"port": 0}


def test_bench_with_a_list_gives_a_tuple_of_numbers() -> None:
    assert invoke("bench", "--concurrency", "1, 2,32").config(BenchConfig).concurrency == (1, 2, 32)
    assert invoke("bench", "http://h:1").config(BenchConfig).url == "http://h:1"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_option_of_a_command_can_be_typed(command: Command) -> None:
    """No field is missing from the command line and none collides with another class's field of the same name."""
    names = [field.name for kind in command.options for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names))
    for kind in command.options:
        for field in dataclasses.fields(kind):
            if field.name == command.positional:
                continue
            value = field.metadata["choices"][0] if field.metadata["choices"] else "1"
            argv = [flag_of(field.name)] if isinstance(field.default, bool) else [flag_of(field.name), value]
            assert field.name in invoke(command.name, *argv).given


@pytest.mark.parametrize(
    ("argv", "wrong", "right"),
    [
        (["sevre"], "sevre", "firstlight serve"),
        (["serve", "--max-modle-len", "9"], "--max-modle-len", "--max-model-len"),
        (["serve", "--thread=2"], "--thread", "--threads"),
        (["serve", "--backend", "cpuu"], "--backend", "cpu"),
        (["chat", "--temprature", "1"], "--temprature", "--temperature"),
        (["serve", "--no-prefx-cache"], "--no-prefx-cache", "--no-prefix-cache"),
    ],
)
def test_mistyped_name_fails_with_the_nearest_known_one(argv: list[str], wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS, argv)
    assert wrong in caught.value.message
    assert right in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--threads", "many"], "`--threads` is 'many', which is not a whole number"),
        (["chat", "--temperature", "warm"], "`--temperature` is 'warm', which is not a number"),
        (["bench", "--concurrency", "1,x"], "`--concurrency` is 'x', which is not a whole number"),
        (["serve", "--threads"], "--threads"),
        (["serve", "a", "b"], "`b` is one argument too many"),
        (["version", "--loud"], "`--loud` is not an option of `firstlight version`"),
    ],
)
def test_wrong_value_fails_saying_what_was_wrong(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS, argv)
    assert words in caught.value.message


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_no_command_asks_for_the_overview(argv: list[str]) -> None:
    assert parse(COMMANDS, argv) is None
    overview = render_overview(COMMANDS)
    assert all(command.name in overview and command.summary in overview for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_names_every_option(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(COMMANDS, [command.name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for kind in command.options:
        for field in dataclasses.fields(kind):
            assert (field.name.upper() if field.name == command.positional else flag_of(field.name)) in shown
            assert field.metadata["help"].split()[0] in shown


def test_optional_field_takes_its_inner_kind() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class LimitConfig:
        limit: int | None = option(None, "a limit")

    commands = (Command("go", "Goes.", "x:y", (LimitConfig,)),)
    # get_type_hints looks annotations up in the module, where this class's `int | None` needs nothing else.
    first, second = parse(commands, ["go"]), parse(commands, ["go", "--limit", "4"])
    assert first is not None
    assert second is not None
    assert (first.config(LimitConfig).limit, second.config(LimitConfig).limit) == (None, 4)


def test_nearest_of_something_unlike_everything_is_none() -> None:
    assert nearest("zzz", ["serve", "chat"]) is None
    assert ChatConfig().temperature == 0.7
