"""The names of this engine's pages, and when they change."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug.engine import ModelInfo
from kvplug_sglang.facts import model_facts, namespace_of, pool_facts, rank_facts
from kvplug_sglang.pools import HostPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

_log = logging.getLogger(__name__)

_MAMBA: Final = "mamba"


class PageNames:
    """Makes keys from SGLang's hashes. Thread-safe.

    While the weights change, names are suspended: the engine's cache may hold KV of the old weights.
    """

    def __init__(self, config: HiCacheStorageConfig, weights: str = "") -> None:
        """``weights``: the operator's name for the weights, instead of the fingerprint."""
        self._config = config
        self._model = model_facts()
        self._token = _agreed_token()
        if weights or not self._model["weights"]:
            is_first = config.tp_rank == config.pp_rank == 0
            self._model["weights"] = weights or ModelInfo.unknown_weights(
                config.model_name or "", self._token.hex(), warns=is_first
            )
        self._lock = threading.Lock()
        self._generation = 0
        """0: pages are shared with every engine that has the same facts. Else they are this engine's."""
        self._loading: str | None = None
        self.is_suspended = False
        """Whether pages can be neither stored nor found now."""
        self._namespaces: dict[str, bytes] = {}

    def keys(self, pool: HostPool, keys: Sequence[str]) -> list[bytes]:
        """The store's keys of pages in the pool."""
        with self._lock:
            namespace = self._namespaces.get(pool.name)
            if namespace is None:
                rank = rank_facts(self._config, is_replicated=self._is_replicated(pool))
                own = {"generation": [self._token.hex(), self._generation]} if self._generation else {}
                namespace = namespace_of(self._model, rank, pool_facts(pool), own)
                self._namespaces[pool.name] = namespace
        return [namespace + key.encode() for key in keys]

    def forget_pool(self, name: str) -> None:
        """Drop what is cached for this name, which another pool has now."""
        with self._lock:
            self._namespaces.pop(name, None)

    def _is_replicated(self, pool: HostPool) -> bool:
        """Whether all tensor-parallel ranks have the same pages. They do with latent attention, except for
        states and for a draft model with heads."""
        return bool(self._config.is_mla_model) and pool.name != _MAMBA and not pool.has_heads

    # -- weights ---------------------------------------------------------------------------------

    def begin_weights(self, path: str | None) -> None:
        """Call before the engine loads other weights, from this checkpoint or (``None``) another source.

        Names are suspended until :meth:`cache_was_reset`, which most updates cause.
        """
        with self._lock:
            self.is_suspended, self._loading = True, path

    def end_weights(self, is_done: bool) -> None:
        """Call after the weights were loaded, or loading failed. The cache may have been reset meanwhile."""
        with self._lock:
            if not self.is_suspended:
                return
            if not is_done:
                self._loading = None
        _log.warning("the weights changed: no KV pages are stored or found until the cache is flushed")

    def cache_was_reset(self) -> None:
        """Call when the engine no longer holds KV of earlier weights."""
        with self._lock:
            if not self.is_suspended:
                return
            path, self._loading = self._loading, None
        model: dict[str, Any] | None = None if path is None else model_facts(path)
        if model is not None and model["weights"]:
            with self._lock:
                self._model, self._generation = model, 0
            _log.info("the weights changed: KV pages are those of %s from now on", path)
        else:
            self.renew("the weights changed")
        with self._lock:
            self._namespaces.clear()
            self.is_suspended = False

    def renew(self, why: str) -> None:
        """Use names that no engine has used, so that no existing page is found."""
        with self._lock:
            self._generation += 1
            self._namespaces.clear()
        _log.info("%s: this engine stores its KV pages under its own names from now on", why)


def _agreed_token() -> bytes:
    """16 random bytes, equal in all tensor-parallel ranks of this engine. All of them must call this."""
    token = os.urandom(16)
    import torch
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        agreed = torch.tensor(list(token), dtype=torch.uint8)
        torch.distributed.broadcast(agreed, src=group.ranks[0], group=group.cpu_group)
        token = bytes(agreed.tolist())
    return token
