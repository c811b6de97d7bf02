"""The names under which this engine's pages are kept, and what they change with."""

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
    """Makes keys of SGLang's hashes. Thread-safe.

    While the weights change there are no names: what the engine's cache holds may be KV of the old ones.
    """

    def __init__(self, config: HiCacheStorageConfig, weights: str = "") -> None:
        """``weights``: the identity that the operator states, in place of the fingerprint."""
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
        """0: pages are shared with every engine that has the same facts. Others are this engine's own."""
        self._loading: str | None = None
        self.is_suspended = False
        """Whether there are no names now."""
        self._namespaces: dict[str, bytes] = {}

    def keys(self, pool: HostPool, keys: Sequence[str]) -> list[bytes]:
        """All that a page of the pool is called by."""
        with self._lock:
            namespace = self._namespaces.get(pool.name)
            if namespace is None:
                rank = rank_facts(self._config, is_replicated=self._is_replicated(pool))
                own = {"generation": [self._token.hex(), self._generation]} if self._generation else {}
                namespace = namespace_of(self._model, rank, pool_facts(pool), own)
                self._namespaces[pool.name] = namespace
        return [namespace + key.encode() for key in keys]

    def forget_pool(self, name: str) -> None:
        """Another pool has this name now."""
        with self._lock:
            self._namespaces.pop(name, None)

    def _is_replicated(self, pool: HostPool) -> bool:
        """Whether all tensor-parallel ranks have the same pages. With latent attention they do, but not of
        states, and not of a draft model that has heads."""
        return bool(self._config.is_mla_model) and pool.name != _MAMBA and not pool.has_heads

    # -- weights ---------------------------------------------------------------------------------

    def begin_weights(self, path: str | None) -> None:
        """The engine is going to load other weights: from this checkpoint, or (``None``) from elsewhere.

        There are no names until :meth:`cache_was_reset`, which most updates do.
        """
        with self._lock:
            self.is_suspended, self._loading = True, path

    def end_weights(self, is_done: bool) -> None:
        """They are loaded, or not. The cache may have been reset in between."""
        with self._lock:
            if not self.is_suspended:
                return
            if not is_done:
                self._loading = None
        _log.warning("the weights changed: no KV pages are kept or found until the cache is flushed")

    def cache_was_reset(self) -> None:
        """The engine holds no KV of earlier weights any more."""
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
        """Use names that no engine has used: it finds none of the pages that are there."""
        with self._lock:
            self._generation += 1
            self._namespaces.clear()
        _log.info("%s: this engine keeps its KV pages under names of its own from now on", why)


def _agreed_token() -> bytes:
    """16 random bytes, the same in all tensor-parallel ranks of this engine, which call this together."""
    token = os.urandom(16)
    import torch
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        agreed = torch.tensor(list(token), dtype=torch.uint8)
        torch.distributed.broadcast(agreed, src=group.ranks[0], group=group.cpu_group)
        token = bytes(agreed.tolist())
    return token
