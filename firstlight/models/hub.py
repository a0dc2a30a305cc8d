"""Models from a Hugging Face hub, through `huggingface_hub`: its cache, its resume, its tokens, its HF_ENDPOINT.

Knows repositories and file names, not what is in the files. The library is imported on use: it is slow to import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from firstlight.errors import ModelError

__all__ = ["HubName", "fetch_from_hub", "parse_hub_name"]

FOLDER_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
"""What a folder of weights needs; no code and no pickles."""
MAX_NAMES_SHOWN = 12

HubName = tuple[str, str | None]
T = TypeVar("T")


def parse_hub_name(model: str) -> HubName:
    """("org/name", file or None) of `hf:org/name[:file]`. Raises ModelError on any other form."""
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?::([\w./-]+))?", model, re.ASCII)
    file = match.group(2) if match else None
    if not match or (file and (file.startswith("/") or ".." in file.split("/"))):
        raise ModelError(f"`{model}` is not of the form hf:org/name[:file]", param="model")
    if file and not file.endswith(".gguf"):
        raise ModelError(f"`{model}` names `{file}`, which is no .gguf file", param="model")
    return match.group(1), file


def fetch_from_hub(model: str) -> Path:
    """The local path of `hf:org/name[:file]`: the file named, the only GGUF file of the repository, or its folder.

    Raises:
        ModelError: the name, the repository or the file does not exist, or the hub cannot be reached and the cache has
            nothing.
    """
    repository, file = parse_hub_name(model)
    endpoint = os.environ.get("HF_ENDPOINT") or None
    if file is None:
        file = _choose(model, _list_files(model, repository, endpoint))
    if file is None:
        return _snapshot(model, repository, endpoint)
    return _cached(repository, file) or _download(model, repository, file, endpoint)


def _list_files(model: str, repository: str, endpoint: str | None) -> list[str]:
    """Names of the repository's files; without a network, of those that are cached."""
    import huggingface_hub

    try:
        return list(_call(model, lambda: huggingface_hub.HfApi(endpoint=endpoint).list_repo_files(repository)))
    except ModelError:
        try:
            folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
        except (OSError, ValueError):
            folder = None
        if folder is None:
            raise
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _choose(model: str, names: list[str]) -> str | None:
    """The GGUF file to fetch, or None when the repository is a folder of safetensors."""
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return None
    files = sorted(name for name in names if name.endswith(".gguf"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelError(f"`{model}` holds neither safetensors nor GGUF files", hint="choose another repository")
    shown = ", ".join(files[:MAX_NAMES_SHOWN]) + (", ..." if len(files) > MAX_NAMES_SHOWN else "")
    raise ModelError(f"`{model}` holds {len(files)} GGUF files", hint=f"name one, {model}:FILE, of: {shown}")


def _cached(repository: str, file: str) -> Path | None:
    """The file in the library's cache; a file that is here is not asked for again."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(repository, file)
    return Path(found) if isinstance(found, str) else None


def _download(model: str, repository: str, file: str, endpoint: str | None) -> Path:
    import huggingface_hub

    return Path(_call(model, lambda: huggingface_hub.hf_hub_download(repository, file, endpoint=endpoint)))


def _snapshot(model: str, repository: str, endpoint: str | None) -> Path:
    import huggingface_hub

    def download() -> Any:
        return huggingface_hub.snapshot_download(repository, allow_patterns=FOLDER_PATTERNS, endpoint=endpoint)

    return Path(_call(model, download))


def _call(model: str, call: Callable[[], T]) -> T:
    """Runs one call of the library and turns whatever it raises into a ModelError."""
    try:
        return call()
    except Exception as error:  # the library's errors come from three HTTP stacks and have no common base
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot fetch `{model}`: {first_line}",
            hint="check the name and the network; private repositories need HF_TOKEN, mirrors HF_ENDPOINT",
        ) from error
