"""Models from a hub: the real library against a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from firstlight.errors import ModelError
from firstlight.models.hub import parse_hub_name
from firstlight.models.store import resolve_model
from firstlight.models.weights import load_model
from tests.oracle.tiny_model import write_folder, write_gguf
from tests.unit.models.fake_server import FakeServer, Page, serving

COMMIT = "a" * 40
BODY = random.Random(2).randbytes(40_000)


class Hub:
    """A fake hub with one repository, org/tiny."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server

    def add(self, files: dict[str, bytes]) -> None:
        listing = json.dumps(
            {
                "id": "org/tiny",
                "modelId": "org/tiny",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in files],
            }
        ).encode()
        tree = json.dumps(
            [{"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in files.items()]
        ).encode()
        kind = {"Content-Type": "application/json"}
        for revision in ("main", COMMIT):
            self.server.pages[f"/api/models/org/tiny/revision/{revision}"] = Page(listing, dict(kind))
            self.server.pages[f"/api/models/org/tiny/tree/{revision}"] = Page(tree, dict(kind))
        self.server.pages["/api/models/org/tiny"] = Page(listing, dict(kind))
        for name, body in files.items():
            digest = hashlib.sha256(body).hexdigest()
            for revision in ("main", COMMIT):
                page = Page(body, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})
                self.server.pages[f"/org/tiny/resolve/{revision}/{name}"] = page

    def page(self, name: str) -> Page:
        return self.server.pages[f"/org/tiny/resolve/main/{name}"]

    def gets(self, name: str) -> list[str | None]:
        return [asked for method, path, asked in self.server.log if method == "GET" and path.endswith("/" + name)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield Hub(server)
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("hf:org/name", ("org/name", None)),
        ("hf:org/name:m.gguf", ("org/name", "m.gguf")),
        ("hf:o-r.g/n_1:sub/m-Q4_0.gguf", ("o-r.g/n_1", "sub/m-Q4_0.gguf")),
    ],
)
def test_hub_name_is_taken_apart(model: str, expected: tuple[str, str | None]) -> None:
    assert parse_hub_name(model) == expected


@pytest.mark.parametrize(
    "model",
    ["hf:", "hf:name", "hf:a/b/c", "hf:a/b:", "hf:a/b:../x.gguf", "hf:a/b:/x.gguf", "hf:a/b:x.bin", "hf:a b/c"],
)
def test_malformed_hub_name_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match="hf:"):
        resolve_model(model)


def test_named_file_is_fetched(hub: Hub) -> None:
    hub.add({"one.gguf": BODY, "two.gguf": b"no"})
    assert resolve_model("hf:org/tiny:one.gguf").read_bytes() == BODY
    assert hub.gets("two.gguf") == []


def test_only_gguf_of_a_repository_is_fetched(hub: Hub, tmp_path: Path) -> None:
    body = write_gguf(tmp_path / "t.gguf").read_bytes()
    hub.add({"README.md": b"hi", "tiny.gguf": body})
    assert load_model(resolve_model("hf:org/tiny")).name == "tiny"


def test_several_gguf_files_are_listed_not_guessed(hub: Hub) -> None:
    hub.add({"q4.gguf": b"", "q8.gguf": b""})
    with pytest.raises(ModelError, match="2 GGUF files") as caught:
        resolve_model("hf:org/tiny")
    assert "q4.gguf, q8.gguf" in (caught.value.hint or "")


def test_folder_of_safetensors_is_fetched_without_code_or_pickles(hub: Hub, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", num_shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add(files | {"modeling.py": b"evil", "pytorch_model.bin": b"evil"})
    path = resolve_model("hf:org/tiny")
    assert {entry.name for entry in path.iterdir()} == set(files)
    assert load_model(path).fingerprint == load_model(folder).fingerprint


def test_repository_without_weights_is_refused(hub: Hub) -> None:
    hub.add({"README.md": b"hi"})
    with pytest.raises(ModelError, match="neither safetensors nor GGUF"):
        resolve_model("hf:org/tiny")


def test_second_fetch_comes_from_the_cache_when_the_hub_is_gone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add({"tiny.gguf": BODY})
    first = resolve_model("hf:org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.server.log.clear()
    assert resolve_model("hf:org/tiny") == first
    assert resolve_model("hf:org/tiny:tiny.gguf") == first
    assert hub.server.log == []


def test_cut_connection_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add({"tiny.gguf": BODY})
    hub.page("tiny.gguf").cuts.append(10_000)
    assert resolve_model("hf:org/tiny:tiny.gguf").read_bytes() == BODY
    assert hub.gets("tiny.gguf") == [None, "bytes=10000-"]


def test_file_of_the_wrong_size_is_refused(hub: Hub) -> None:
    hub.add({"tiny.gguf": BODY})
    hub.page("tiny.gguf").headers["X-Linked-Size"] = str(len(BODY) + 1)
    with pytest.raises(ModelError, match=r"cannot fetch `hf:org/tiny:tiny\.gguf`"):
        resolve_model("hf:org/tiny:tiny.gguf")


@pytest.mark.parametrize("model", ["hf:org/tiny", "hf:org/tiny:absent.gguf"])
def test_what_does_not_exist_is_one_clear_error(hub: Hub, model: str) -> None:
    with pytest.raises(ModelError, match=f"cannot fetch `{model}`") as caught:
        resolve_model(model)
    assert "HF_ENDPOINT" in (caught.value.hint or "")


def test_no_network_is_one_clear_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot fetch"):
        resolve_model("hf:org/tiny:one.gguf")
