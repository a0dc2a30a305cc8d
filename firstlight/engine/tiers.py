"""Builds the tiers below KV memory from the options. Knows configuration and backend, not how blocks are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from firstlight.backend.base import Backend, BackendInfo
from firstlight.cache import KVCache
from firstlight.cache.tiers import DiskTier, Tiers
from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.scheduler import SchedulerLimits

__all__ = ["attach_tiers", "space_of"]


def space_of(info: BackendInfo) -> bytes:
    """Names weights, kernels and KV layout: blocks of another space are foreign. 32 bytes."""
    parts = (info.name.encode(), info.fingerprint, str(info.block_size).encode(), str(info.kv_bytes_per_block).encode())
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=32).digest()


def attach_tiers(
    cache: KVCache, backend: Backend, config: EngineConfig, limits: SchedulerLimits, *, on_read: Callable[[], None]
) -> None:
    """Gives the cache the tiers that `config` names, if any.

    Raises:
        ConfigError: they need the prefix cache, or the directory cannot be used.
    """
    if not config.host_cache_mb and not config.disk_cache:
        return
    if not config.prefix_cache:
        raise ConfigError("`host_cache_mb` and `disk_cache` need the prefix cache", hint="leave out --no-prefix-cache")
    info = backend.info
    space = space_of(info)
    disk = None
    if config.disk_cache:
        disk = DiskTier(Path(config.disk_cache).expanduser(), space, config.disk_cache_mb * 1_000_000)
    tiers = Tiers(
        backend,
        space,
        info.kv_bytes_per_block,
        host_bytes=config.host_cache_mb * 1_000_000,
        disk=disk,
        on_read=on_read,
    )
    cache.attach(tiers, backend, reserve=limits.max_step_tokens // info.block_size + limits.max_step_rows)
