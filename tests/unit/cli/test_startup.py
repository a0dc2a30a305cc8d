"""The start-up screen says the numbers it was given, and its curl line is a real one."""

from __future__ import annotations

import json
import shlex

import msgspec

from firstlight.backend.base import BackendInfo
from firstlight.cli.startup import StartupFacts, example_curl, render_startup


def facts(**changes: object) -> StartupFacts:
    backend = BackendInfo(
        name="cpu (avx2)",
        vocab_size=49152,
        num_blocks=2048,
        block_size=16,
        max_model_len=8192,
        max_step_tokens=512,
        max_step_rows=64,
        kv_bytes_per_block=368640,
        weight_bytes=99_000_000,
        num_threads=2,
        fingerprint=b"x",
        layouts={"byte": 9_000_000, "nibble": 90_000_000},
    )
    values = {
        "version": "1.2.3", "model": "tiny", "backend": backend, "num_parameters": 134_515_008,
        "file_bytes": 98_362_432, "url": "http://127.0.0.1:8000", "load_s": 1.26, "warm_up_s": 0.5,
    }  # fmt: skip
    return StartupFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_screen_says_every_number_and_fits_a_terminal() -> None:
    screen = render_startup(facts())
    for words in (
        "firstlight 1.2.3: ready in 1.8 s (load 1.3 s, warm-up 0.5 s)",
        "tiny, 135 M parameters, 98 MB file, context 8,192 tokens",
        "99 MB in memory: nibble 90 MB, byte 9.0 MB",
        "cpu (avx2) backend, 2 threads",
        "2,048 blocks x 16 tokens = 32,768 tokens (4.0 full contexts), 755 MB",
        "http://127.0.0.1:8000",
    ):
        assert words in screen
    assert len(screen.splitlines()) <= 24
    assert max(map(len, screen.splitlines())) <= 120


def test_screen_leaves_out_what_is_not_known() -> None:
    plain = msgspec.structs.replace(facts().backend, layouts={}, weight_bytes=0)
    screen = render_startup(facts(num_parameters=0, file_bytes=0, backend=plain))
    assert "parameters" not in screen
    assert "file" not in screen
    assert "weights" not in screen


def test_screen_tells_when_a_key_is_needed() -> None:
    assert "(needs an API key)" in render_startup(facts(needs_key=True))
    assert "Authorization: Bearer" in example_curl("http://h:1", "m", needs_key=True)


def test_example_curl_is_one_shell_command_with_a_json_body() -> None:
    words = shlex.split(example_curl("http://h:1", "m"))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "m"
