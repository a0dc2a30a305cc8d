"""Asks a server's /debug routes. Knows URLs, keys and JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from firstlight.errors import BackendError, ConfigError

__all__ = ["fetched_json"]

_TIMEOUT_S = 30.0


def fetched_json(url: str, path: str, api_key: str, extra_s: float = 0.0) -> Any:
    """What GET `path` answers, waiting `extra_s` longer than usual.

    Raises:
        ConfigError: there is no server, or it refuses, in its own words.
        BackendError: the server failed.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S + extra_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raw = error.read()
        try:
            message = json.loads(raw)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{url} answered {error.code}"
        if error.code >= 500:
            raise BackendError(message) from None
        raise ConfigError(message) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"no firstlight server at {url}: {error}", hint="give its address with --url") from None
