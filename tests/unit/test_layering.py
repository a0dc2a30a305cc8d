"""The import rule: arrows between the rooms point down only, and the pure rooms stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "firstlight"
CONTRACTS = {"errors", "types", "config"}
# What each room may import of firstlight besides itself. `backend.base` is a contract: data and a Protocol.
ALLOWED = {
    "errors": set(),
    "types": set(),
    "config": {"errors"},
    "cache": CONTRACTS,
    "text": CONTRACTS,
    "models": CONTRACTS,
    "measure": CONTRACTS,
    "backend": CONTRACTS | {"models"},
    "scheduler": CONTRACTS | {"cache", "measure", "backend.base"},
    "simulate": CONTRACTS | {"cache", "measure", "scheduler"},
    "tune": CONTRACTS | {"measure", "simulate"},
    "engine": CONTRACTS | {"cache", "text", "models", "measure", "scheduler", "backend.base"},
    "server": CONTRACTS | {"measure", "text", "engine", "backend.base"},
    "cli": CONTRACTS | {"models", "measure", "engine", "server", "simulate", "tune", "backend.base"},
}
# The one place where a backend is picked, and the parts for tests and trials.
MAY_ALSO = {"engine/load.py": {"backend"}, "engine/fake.py": {"backend.fake"}, "cli/doctor.py": {"backend.cpu"}}
PURE = ("cache", "scheduler", "text", "measure")
HEAVY = {"torch", "uvicorn", "starlette", "firstlight.backend.cpu", "firstlight.backend.fake"}


def imports(path: Path) -> Iterator[str]:
    """Every module name that the file imports, at any depth of its tree; relative imports made absolute."""
    package = ("firstlight", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_files(room: str) -> list[Path]:
    path = ROOT / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@pytest.mark.parametrize("room", ALLOWED)
def test_room_imports_point_down_only(room: str) -> None:
    for path in room_files(room):
        also = MAY_ALSO.get(path.relative_to(ROOT).as_posix(), set())
        roots = {f"firstlight.{name}" for name in ALLOWED[room] | {room} | also}
        for name in imports(path):
            if name.split(".")[0] == "firstlight" and name != "firstlight":
                fits = any(name == root or name.startswith(root + ".") for root in roots)
                # `from firstlight.backend import base` first yields the package, then the module that counts.
                fits = fits or any(root.startswith(name + ".") for root in roots)
                assert fits, f"{path.relative_to(ROOT.parent)} imports {name}: {room} may not"


def test_every_room_has_a_rule() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"__init__", "__main__"} <= set(ALLOWED)


@pytest.mark.parametrize("room", PURE)
def test_pure_room_imports_nothing_heavy(room: str) -> None:
    for path in room_files(room):
        found = {
            name for name in imports(path) if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)
        }
        assert not found, f"{path.relative_to(ROOT.parent)} imports {found}"


@pytest.mark.parametrize("module", ["firstlight", "firstlight.cli.commands", "firstlight.__main__"])
def test_light_imports_load_nothing_heavy(module: str) -> None:
    heavy = [
        "torch",
        "numpy",
        "tokenizers",
        "uvicorn",
        "starlette",
        "rich",
        "huggingface_hub",
        "firstlight.backend.cpu",
    ]
    code = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
