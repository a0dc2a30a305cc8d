"""Options from a TOML file: names and kinds of the command line, which wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from firstlight.__main__ import main
from firstlight.cli.arguments import Invocation, parse
from firstlight.cli.commands import COMMANDS
from firstlight.cli.config_file import render_file, with_file
from firstlight.config import EngineConfig, ServerConfig
from firstlight.errors import ConfigError

KINDS = (EngineConfig, ServerConfig)


def serve(tmp_path: Path, text: str, *argv: str) -> Invocation:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    invocation = parse(COMMANDS, ["serve", *argv, "--config", str(file)])
    assert invocation is not None
    return with_file(invocation, str(file), KINDS)


def test_file_fills_options_of_engine_and_server(tmp_path: Path) -> None:
    text = 'max-step-rows = 16\nitl-slo-ms = 40\nprefix-cache = false\nport = 0\napi-key = ["a", "b"]\neviction = "lfu"'
    invocation = serve(tmp_path, text)
    engine, server = invocation.config(EngineConfig), invocation.config(ServerConfig)
    assert (engine.max_step_rows, engine.itl_slo_ms, engine.prefix_cache, engine.eviction) == (16, 40.0, False, "lfu")
    assert (server.port, server.api_key) == (0, ("a", "b"))
    assert engine.max_step_tokens == EngineConfig().max_step_tokens


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    text = 'model = "file.gguf"\nthreads = 2\nprefix-cache = true\nport = 1'
    argv = ("typed.gguf", "--threads", "0", "--no-prefix-cache")
    invocation = serve(tmp_path, text, *argv)
    engine = invocation.config(EngineConfig)
    assert (engine.model, engine.threads, engine.prefix_cache) == ("typed.gguf", 0, False)
    assert invocation.config(ServerConfig).port == 1


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("max-step-row = 4", "`max-step-row` is not an option", "max-step-rows"),
        ("max_step_rows = 4", "`max_step_rows` is not an option", "max-step-rows"),
        ("config = 'x'", "`config` is not an option", ""),
        ("[engine]\nthreads = 2", "`engine` is not an option", ""),
        ("threads = 2.5", "`threads` is 2.5, which is not a whole number", ""),
        ("threads = true", "`threads` is True, which is not a whole number", ""),
        ("threads = '2'", "`threads` is '2', which is not a whole number", ""),
        ("prefix-cache = 1", "`prefix-cache` is 1, which is not true or false", ""),
        ("model = 3", "`model` is 3, which is not text", ""),
        ("api-key = 'one'", "which is not a list", '["a", "b"]'),
        ("eviction = 'lruu'", "allowed: lru", "did you mean lru?"),
        ("threads 2", "is not TOML", "threads = 2"),
    ],
)
def test_wrong_file_is_refused_with_the_nearest_right_thing(tmp_path: Path, text: str, words: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(tmp_path, text)
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


def test_serve_with_a_missing_file_ends_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--backend", "fake", "--config", "/no/such/file.toml"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_written_file_reads_back_as_it_was(tmp_path: Path, kind: type) -> None:
    odd = {str: 'a "quoted"\\ Ünï\n\x7f', tuple: ('x"', "y")}
    options = {
        field.name: field.metadata["choices"][-1]
        if field.metadata["choices"]
        else odd.get(type(field.default), field.default)
        for field in dataclasses.fields(kind)
    }
    assert serve(tmp_path, render_file(options, "first\n\nthird")).given_from(kind) == options
