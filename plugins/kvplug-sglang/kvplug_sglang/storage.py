"""A kvplug store as SGLang's HiCache storage."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvplug import UnsupportedError, build_page_cache
from kvplug.engine import FlatPage
from kvplug.transport import Job, MissReason, Presence, PutReason
from kvplug_sglang.names import PageNames
from kvplug_sglang.pause import Pause
from kvplug_sglang.plugin import check_hooks
from kvplug_sglang.pools import HostPool
from kvplug_sglang.settings import config_of
from kvplug_sglang.speeds import Speeds

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

LIVE: weakref.WeakSet[KvplugStorage] = weakref.WeakSet()
"""The storages of this process."""
_KV: Final = str(PoolName.KV)
_LATE_S: Final = 5.0
"""How long after its deadline a call that still uses memory is logged."""


class KvplugStorage(HiCacheStorage):
    """Pages of SGLang's host memory in a kvplug store.

    Law. No call raises for a failure of the store, or waits for it longer than the config's ``timeout_s``:
    a page that cannot be loaded is a miss, and a page that cannot be stored is dropped; both are counted. One
    exception: while the store still copies from or into SGLang's memory, a call does not return, since SGLang
    reuses that memory. After unanswered calls the store is not called for a while. A page is found only by a
    worker with the same model, weights, shard, pool and layout.

    Callers. SGLang's threads for prefetch and for backup. Its scheduler's thread constructs, clears and
    closes it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """
        Raises:
            UnsupportedError: SGLang has not applied this plugin's hooks.
            ConfigError, PluginError: as :func:`kvplug.build_page_cache`.
        """
        check_hooks()
        extra = storage_config.extra_config
        self._config = storage_config
        config = config_of(
            extra, metrics=storage_config.enable_storage_metrics, split=storage_config.tp_lcm_size
        )
        if extra is not None:
            extra["interface_v1"] = 1  # SGLang reads this to decide whether to pass a page's memory
        self._timeout_s = config.timeout_s
        self.names = PageNames(storage_config, weights=config.weights)
        """The names of the pages. Hooks notify it when weights change."""
        self._pools: dict[str, HostPool] = {}
        self._pause = Pause()
        self._speeds = Speeds()
        self.cache = build_page_cache(config, engine="sglang", namespace=b"facts in keys")
        """The store of the pages."""
        LIVE.add(self)
        _log.info("KV pages are kept in the store %r", config.stores[0])

    # -- SGLang's pools --------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        known = self._pools.get(name)
        if known is None or known.pool is not pool:
            self._pools[name] = HostPool(pool, name)
            self.names.forget_pool(name)

    def _keys(self, pool: str, keys: Sequence[str]) -> list[bytes]:
        return self.names.keys(self._pools[pool], keys)

    # -- the store -------------------------------------------------------------------------------

    def _asks(self, op: str, count: int) -> bool:
        """Whether to call the store now. If not, the pages count as misses."""
        if self.names.is_suspended:
            self.cache.stats.fail(op, "refused", count=count)
        elif not self._pause.allows():
            self.cache.stats.fail(op, MissReason.STORE_GONE, count=count)
        else:
            return True
        return False

    def _wait(self, job: Job[_T], *, uses_memory: bool) -> list[_T] | None:
        """The job's results, or ``None`` at its deadline. A job that uses memory is awaited until it is done:
        it also ends by its deadline, unless a copy hangs."""
        late = self._timeout_s + _LATE_S
        try:
            return job.wait(late)
        except TimeoutError:
            if not uses_memory:
                return None
        _log.error("a store still copies %d pages, %.0f s after the call; SGLang waits", job.count, late)
        return job.wait(None)

    def _held(self, keys: list[bytes]) -> list[bool]:
        if not keys or not self._asks("lookup", len(keys)):
            return [False] * len(keys)
        job = self.cache.lookup(keys)
        found = self._wait(job, uses_memory=False) or [Presence.ABSENT] * len(keys)
        held = [each is Presence.HELD for each in found]
        self._pause.note(any(held) or not job.deadline.expired)
        return held

    def _get(self, pages: Sequence[FlatPage]) -> list[bool]:
        return self._moved("get", self.cache.get, pages, MissReason.TIMEOUT)

    def _put(self, pages: Sequence[FlatPage]) -> list[bool]:
        return self._moved("put", self.cache.put, pages, PutReason.TIMEOUT)

    def _moved(
        self, op: str, submit: Callable[..., Job[Any]], pages: Sequence[FlatPage], timeout: object
    ) -> list[bool]:
        if not pages or not self._asks(op, len(pages)):
            return [False] * len(pages)
        started = time.perf_counter()
        found = self._wait(submit(pages), uses_memory=True) or []
        done = [result is None for result in found]
        self._pause.note(any(done) or timeout not in found)
        if any(done):
            nbytes = sum(pages[0].sizes) * sum(done)
            self._speeds.note(op, sum(done), nbytes, time.perf_counter() - started)
        return done

    # -- calls for the pool of keys and values ---------------------------------------------------

    def exists(self, key: str) -> bool:
        return self._held(self._keys(_KV, [key])) == [True]

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """The number of consecutive first pages that the store holds."""
        return _num_first(self._held(self._keys(_KV, keys)))

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        return self._get(self._pools[_KV].pages(self._keys(_KV, keys), host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        return self._put(self._pools[_KV].pages(self._keys(_KV, keys), host_indices))

    # -- calls for several pools -----------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> PoolTransferResult:
        """The beginnings of the sequence that can be restored from all of these pools.

        A pool of whole sequences (``ALL_PAGES``) needs each page, a pool of states (``TRAILING_PAGES``) the
        last ones. Other policies are for pools that may hold pages in another form, and are not supported.
        """
        transfers = [each for each in pool_transfers or () if each.hit_policy in _POLICIES]
        has_kv = self._pools[_KV].has_memory
        asked = self._keys(_KV, keys) if has_kv else []
        for transfer in transfers:
            asked += self._keys(str(transfer.name), keys)
        held, count = self._held(asked), len(keys)
        kv_pages = _num_first(held[:count]) if has_kv else count
        hits = {_KV: kv_pages} if kv_pages else {}
        restorable = range(1, kv_pages + 1)
        ends = set(restorable)
        for index, transfer in enumerate(transfers, start=has_kv):
            own = held[index * count : index * count + kv_pages]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                whole = set(range(1, _num_first(own) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                whole = {end for end in restorable if all(own[max(0, end - window) : end])}
            if whole:
                hits[str(transfer.name)] = max(whole)
            ends &= whole
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: object = None) -> dict[str, list[bool]]:
        return {transfer.name: self._get(self._pages_of(transfer)) for transfer in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: object = None) -> dict[str, list[bool]]:
        return {transfer.name: self._put(self._pages_of(transfer)) for transfer in transfers}

    def _pages_of(self, transfer: PoolTransfer) -> list[FlatPage]:
        if not transfer.keys:
            return []
        name = str(transfer.name)
        return self._pools[name].pages(self._keys(name, transfer.keys), transfer.host_indices)

    # -- calls with tensors, which SGLang does not use for a backend that takes memory -----------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Fill the tensor, which has the size of a page, and return it; ``None`` for a miss."""
        (found,) = self.batch_get([key], [target_location])
        return found

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        targets = list(target_locations or ())
        if len(targets) != len(keys) or any(target is None for target in targets):
            raise ValueError(f"{len(keys)} pages need as many tensors; got {len(targets)}")
        found = self._get(self._flat(keys, targets))
        return [target if ok else None for target, ok in zip(targets, found, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._put(self._flat(keys, list(values or ()))))

    def _flat(self, keys: Sequence[str], tensors: Sequence[Tensor]) -> list[FlatPage]:
        import torch

        named = zip(self._keys(_KV, keys), tensors, strict=True)
        return [
            FlatPage(key=key, view=memoryview(tensor.view(-1).view(torch.uint8).numpy()))
            for key, tensor in named
        ]

    # -- the end ---------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all pages. A store that only this engine uses is emptied. In a shared store the pages stay,
        but the engine no longer looks for them."""
        try:
            job = self.cache.store.submit_remove(None)
        except UnsupportedError:
            self.names.renew("the storage was cleared")
            return True
        return self._wait(job, uses_memory=False) == [True]

    def get_stats(self) -> Any:
        """The transfers since the last call, for SGLang's own metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(**self._speeds.take()) if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """End every call and release all resources. Idempotent."""
        LIVE.discard(self)
        self.cache.close()


_POLICIES: Final = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)


def _num_first(held: Sequence[bool]) -> int:
    return next((index for index, each in enumerate(held) if not each), len(held))
