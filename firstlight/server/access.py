"""Who may call: API keys, and browsers by their origin. Knows headers, not routes."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from urllib.parse import urlsplit

from firstlight.config import ServerConfig
from firstlight.errors import AuthError, ConfigError, RequestError
from firstlight.server.asgi import Exchange, Headers
from firstlight.server.quotas import KeyLimits, Quota, parsed_limits

__all__ = ["Access", "ForbiddenOrigin"]

_SALT_CONTEXT = b"firstlight prefix-cache tenant\0"


_HEADER_LIST = re.compile(rb"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
_DEFAULT_HEADERS = b"Authorization, Content-Type, Last-Event-ID, X-Request-Id"
_HEX_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class ForbiddenOrigin(RequestError):
    """A browser page of another origin that the operator has not allowed."""

    status = 403
    code = "forbidden_origin"


class Access:
    """The keys and origins of one server.

    Raises:
        ConfigError: a key is empty, or the key file cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        default = KeyLimits(
            requests_per_min=config.key_requests_per_min,
            tokens_per_min=config.key_tokens_per_min,
            concurrency=config.key_concurrency,
            queued=config.key_queued,
        )
        if any(not key.strip() for key in config.api_key):
            raise ConfigError("`api_key` is empty: give a key, or leave the option out", param="api_key")
        known = {_digest(key): default for key in config.api_key} | keys_of_file(config.api_key_file, default)
        self._digests = list(known)
        self._key_ids = {_salt(digest): digest[:4].hex() for digest in known}
        self._quotas = {_salt(digest): Quota(limits) for digest, limits in known.items()} or {b"": Quota(default)}
        self.is_loopback = _LOOPBACK.fullmatch(config.host) is not None
        """Only this machine can connect."""
        self._origins = frozenset(origin.rstrip("/") for origin in config.cors_origins)

    def tenant_salt(self, exchange: Exchange) -> bytes:
        """The prefix-cache salt of the key that the client sent; empty where no keys are set.

        Every key is compared in full, so time tells nothing. Raises AuthError when the key is missing or wrong.
        """
        if not self._digests:
            return b""
        scheme, _, token = exchange.headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "wrong" if token else "missing"
            raise AuthError(f"the API key is {what}: send `Authorization: Bearer KEY`", param="Authorization")
        return _salt(digest)

    def key_id(self, salt: bytes) -> str:
        """How metrics name the key with this salt: the first 8 hex digits of its SHA-256; empty without keys."""
        return self._key_ids.get(salt, "")

    def quota(self, salt: bytes) -> Quota:
        """What the key with this salt may take. Without keys all clients share one."""
        return self._quotas[salt]

    def admit_origin(self, exchange: Exchange) -> None:
        """Adds CORS headers for an allowed origin, and keeps pages of other origins from using a server they can reach.

        Raises ForbiddenOrigin for a POST from a page that is neither allowed nor served by this host.
        """
        raw = exchange.headers.get(b"origin")
        if raw is None:
            return
        origin = raw.decode("latin-1").rstrip("/")
        if origin in self._origins or "*" in self._origins:
            exchange.base_headers += [(b"access-control-allow-origin", raw), (b"vary", b"Origin")]
            exchange.base_headers.append((b"access-control-expose-headers", b"X-Request-Id, Retry-After"))
        elif exchange.method == "POST" and not self._is_own(origin, exchange):
            raise ForbiddenOrigin(
                f"origin {origin[:128]!r} is not allowed here: restart with `--cors-origins {origin[:128]}`",
                param="Origin",
            )

    def _is_own(self, origin: str, exchange: Exchange) -> bool:
        """The page came from this server. On loopback a foreign name is not ours, even where it leads here."""
        try:
            parts = urlsplit(origin)
            host = parts.hostname or ""
        except ValueError:
            return False
        if self.is_loopback and not _LOOPBACK.fullmatch(host):
            return False
        return bool(host) and parts.netloc.encode("latin-1", "replace") == exchange.headers.get(b"host")

    def preflight_headers(self, exchange: Exchange) -> Headers | None:
        """The answer to a browser's OPTIONS question, None where it is not one or the origin is not allowed."""
        allowed = any(name == b"access-control-allow-origin" for name, _ in exchange.base_headers)
        if not allowed or b"access-control-request-method" not in exchange.headers:
            return None
        wanted = exchange.headers.get(b"access-control-request-headers", b"")
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted if _HEADER_LIST.fullmatch(wanted) else _DEFAULT_HEADERS),
            (b"access-control-max-age", b"600"),
        ]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _salt(digest: bytes) -> bytes:
    return hashlib.sha256(_SALT_CONTEXT + digest).digest()[:16]


def keys_of_file(path: str, default: KeyLimits) -> dict[bytes, KeyLimits]:
    """Digest and limits of every key in the file: a line has a key, or `sha256:` and its digest in hex, then limits.

    Raises:
        ConfigError: the file cannot be read or has no key, or a line is not valid.
    """
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`api_key_file` {path} cannot be read: {error}", param="api_key_file") from None
    keys: dict[bytes, KeyLimits] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"`api_key_file` {path} line {number}"
        hashed = words[0].startswith("sha256:")
        if hashed and not _HEX_DIGEST.fullmatch(words[0]):
            raise ConfigError(f"{where}: `sha256:` needs 64 hex digits", param="api_key_file")
        digest = bytes.fromhex(words[0][7:]) if hashed else _digest(words[0])
        keys[digest] = parsed_limits(words[1:], default, where)
    if not keys:
        raise ConfigError(f"`api_key_file` {path} has no key: put one on each line", param="api_key_file")
    return keys
