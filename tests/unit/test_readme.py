"""What the README shows is run: Python and curl for real, shell lines through the parser that will read them."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from firstlight.cli.arguments import parse
from firstlight.cli.commands import COMMANDS
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import ServerThread

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md")
ADDRESS = "http://127.0.0.1:8000"
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Snippet:
    page: str
    language: str
    text: str


def snippets(*languages: str) -> list[Snippet]:
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [Snippet(page, *match.groups()) for page in PAGES for match in pattern.finditer((ROOT / page).read_text())]
    return [snippet for snippet in found if not languages or snippet.language in languages]


def shell_lines(first_word: str) -> list[list[str]]:
    """The words of each command that begins with `first_word`, comments and continuations taken off."""
    text = "\n".join(snippet.text for snippet in snippets("sh")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in lines if words and words[0] == first_word]


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    """A live server over the fake backend that answers to the README's model name."""
    config = ServerConfig(port=0, served_model_name=MODEL)
    with ServerThread(lambda: AsyncEngine(EngineConfig(backend="fake"), load=fake_parts), config) as server:
        yield server.url


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def engine_snippets() -> list[Snippet]:
    return [snippet for snippet in snippets("python") if f'Engine("{MODEL}"' in snippet.text]


def client_snippets() -> list[Snippet]:
    return [snippet for snippet in snippets("python") if ADDRESS in snippet.text]


def test_every_snippet_is_of_a_kind_that_is_run() -> None:
    assert {snippet.language for snippet in snippets()} == {"sh", "python"}
    assert len(engine_snippets()) + len(client_snippets()) == len(snippets("python"))
    assert engine_snippets()
    assert client_snippets()
    kinds = sum(len(shell_lines(word)) for word in ("make", "firstlight", "curl"))
    lines = "\n".join(snippet.text for snippet in snippets("sh")).replace("\\\n", " ").splitlines()
    assert kinds == len([line for line in lines if line.strip()])


@pytest.mark.parametrize("snippet", engine_snippets(), ids=lambda snippet: snippet.page)
def test_engine_snippet_runs_on_the_fake_backend(snippet: Snippet) -> None:
    code = snippet.text.replace(f'Engine("{MODEL}"', f'Engine("{MODEL}", backend="fake"')
    assert run_python(code).strip()


@pytest.mark.parametrize("snippet", engine_snippets(), ids=lambda snippet: snippet.page)
def test_engine_snippet_runs_on_the_real_model(snippet: Snippet, smollm2_path: Path) -> None:
    assert "Paris" in run_python(snippet.text.replace(MODEL, str(smollm2_path)))


@pytest.mark.parametrize("snippet", client_snippets(), ids=lambda snippet: snippet.page)
def test_client_snippet_runs_against_a_live_server(snippet: Snippet, fake_url: str) -> None:
    assert run_python(snippet.text.replace(ADDRESS, fake_url)).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
@pytest.mark.parametrize("words", shell_lines("curl"), ids=lambda words: words[0])
def test_curl_line_streams_to_its_end(words: list[str], fake_url: str) -> None:
    # --fail: a status from 400 up is exit code 22.
    command = [*(word.replace(ADDRESS, fake_url) for word in words), "--fail", "--silent", "--show-error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"' in done.stdout.replace(" ", "")


@pytest.mark.parametrize("words", shell_lines("firstlight"), ids=lambda words: " ".join(words[:3]))
def test_firstlight_line_is_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert parse(COMMANDS, words[1:]) is not None
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")
@pytest.mark.parametrize("words", shell_lines("make"), ids=lambda words: " ".join(words[:2]))
def test_make_line_names_a_target_and_variables_it_uses(words: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *words[1:]], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for word in words[1:]:
        name, is_variable, value = word.partition("=")
        assert not is_variable or value in done.stdout, f"{name} does not reach the command"


@pytest.mark.parametrize("page", [*PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
def test_source_files_named_in_prose_exist(page: str) -> None:
    """A path in backticks that begins at the root, `firstlight/x.py` or `tests/y`, is really there."""
    text = (ROOT / page).read_text("utf-8")
    for name in re.findall(r"`((?:firstlight|csrc|tests|docs|benchmarks)/[\w./]+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_architecture_names_functions_that_exist_in_the_file_of_their_step() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    steps = re.findall(r"^## \d+\. [^`\n]*`([\w./]+)`\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 10
    for file, text in steps:
        source = (ROOT / file).read_text("utf-8")
        for name in re.findall(r"`([\w.:]+)\(\)`", text):
            assert f"{name}(" in source, f"{file} has no {name}"
        for (
            owner,
            name,
        ) in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
            homes = [
                path for path in (ROOT / "firstlight").rglob("*.py") if f"class {owner}" in path.read_text("utf-8")
            ]
            assert any(f"def {name}(" in path.read_text("utf-8") for path in homes), f"no {owner}.{name}"


def test_readme_figures_are_those_of_the_result_files() -> None:
    """The table is written from benchmarks/results; nobody edits a number by hand."""
    from benchmarks.readme_table import rewritten

    readme = (ROOT / "README.md").read_text()
    assert rewritten(readme) == readme
