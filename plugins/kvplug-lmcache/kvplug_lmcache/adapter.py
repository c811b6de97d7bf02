"""The class that LMCache constructs: ``{"type": "plugin", "module_path": "kvplug_lmcache.adapter", ...}``."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvplug import Config, ConfigError, build_page_cache
from kvplug.engine import FlatPage
from kvplug.transport import Job, MissReason, Presence, PutReason
from kvplug_lmcache.keys import encode_key, page_of

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

_log = logging.getLogger(__name__)

ENGINE: Final = "lmcache"
_LEASE_S: Final = 60.0
"""Minimum time that a locked page is not evicted: LMCache loads it after all adapters have answered."""


class KvplugL2AdapterConfig(L2AdapterConfigBase):
    """``adapter_params``: kvplug's own configuration, and ``namespace``."""

    def __init__(self, config: Config, namespace: str = "") -> None:
        self.config = config
        self.namespace = namespace

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvplugL2AdapterConfig:
        """Raises ConfigError, which is a ValueError; lists every fault of form."""
        given = dict(d)
        namespace = given.pop("namespace", "")
        if not isinstance(namespace, str):
            raise ConfigError(
                f"namespace: {namespace!r} was given; allowed is text, such as the revision of the model",
                source="adapter_params",
            )
        return cls(Config.from_dict(given, "adapter_params"), namespace)

    @classmethod
    def help(cls) -> str:
        return (
            "kvplug L2 adapter, adapter_params:\n"
            '- stores (list): the one store, such as ["redis"]; `kvplug list` shows all (required)\n'
            '- options (dict): its options, such as {"redis": {"address": "10.0.0.7:6379"}}\n'
            "- weights (str): name of the models' weights, such as their revision; without it no chunk is"
            " found after a restart, or by another server\n"
            "- namespace (str): what chunks depend on besides weights and LMCache's keys\n"
            "- timeout_s, integrity, secret_file, ...: every key of kvplug's configuration that stores use"
        )


class KvplugL2Adapter(L2AdapterInterface):
    """Keeps LMCache's objects in a kvplug store.

    LMCache calls it from its controllers' threads; no method waits. Every task ends by ``timeout_s`` of the
    config. After its end, the store no longer accesses the memory of its objects. A failure of the store is a
    miss or a failed store task, never an exception.

    Raises (the constructor):
        kvplug.ConfigError: the configuration is wrong; lists every fault.
        kvplug.KvplugError: any other error of ``kvplug.build_page_cache``.
    """

    def __init__(self, config: KvplugL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        """``l1_memory_desc`` is not needed: objects have the addresses of their bytes."""
        super().__init__()
        encode_key(ObjectKey(chunk_hash=b"", model_name="", kv_rank=0))  # raises if it cannot encode keys
        self._name = config.config.stores[0] if config.config.stores else ""
        self._lease_s = max(_LEASE_S, 2 * config.config.timeout_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._sizes: dict[ObjectKey, int] = {}
        """Bytes of each object that was stored here, while LMCache evicts by size."""
        self._is_closed = False
        self._cache = build_page_cache(config.config, engine=ENGINE, namespace=config.namespace.encode())
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()

    # -- events --------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    def _complete(self, task: int, results: dict[int, Any], result: Any, event: Any) -> None:
        with self._lock:
            if not self._is_closed:
                results[task] = result
                event.notify()

    # -- store ---------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = next(self._numbers)
        pages = self._pages(keys, objects)
        if pages is None:
            self._complete(task, self._stored, L2StoreResult(False, 0), self._store_event)
            return task

        def ended(job: Job[PutReason | None]) -> None:
            results = job.results() or []
            kept = [index for index, reason in enumerate(results) if reason is None]
            try:
                self._account([keys[index] for index in kept], [pages[index].view.nbytes for index in kept])
            except Exception:
                _log.exception("a listener of LMCache failed")
            finally:
                nbytes = sum(pages[index].view.nbytes for index in kept)
                result = L2StoreResult(len(kept) == len(keys), nbytes)
                self._complete(task, self._stored, result, self._store_event)

        self._cache.put(pages).add_done_callback(ended)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            popped = dict(self._stored)
            self._stored.clear()
        return popped

    def _account(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Notify LMCache of stored objects; of each only once if listeners evict by these notifications."""
        if self._listeners:
            with self._lock:
                new = [index for index, key in enumerate(keys) if key not in self._sizes]
                self._sizes.update((keys[index], sizes[index]) for index in new)
            keys, sizes = [keys[index] for index in new], [sizes[index] for index in new]
        if keys:
            self._notify_keys_stored(keys, sizes)

    # -- lookup and lock -----------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task = next(self._numbers)

        def ended(job: Job[Presence]) -> None:
            held = [index for index, found in enumerate(job.results() or ()) if found is Presence.HELD]
            try:
                if held:
                    self._notify_keys_accessed([keys[index] for index in held])
            except Exception:
                _log.exception("a listener of LMCache failed")
            finally:
                self._complete(task, self._found, _bitmap(len(keys), held), self._lookup_event)

        encoded = [encode_key(key) for key in keys]
        self._cache.lookup(encoded, lease_s=self._lease_s).add_done_callback(ended)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._cache.release([encode_key(key) for key in keys])

    # -- load ----------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = next(self._numbers)
        pages = self._pages(keys, objects)
        if pages is None:
            self._complete(task, self._loaded, Bitmap(len(keys)), self._load_event)
            return task

        def ended(job: Job[MissReason | None]) -> None:
            loaded = [index for index, reason in enumerate(job.results() or ()) if reason is None]
            self._complete(task, self._loaded, _bitmap(len(keys), loaded), self._load_event)

        self._cache.get(pages).add_done_callback(ended)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _pages(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[FlatPage] | None:
        """The objects as pages; ``None``, after a log line, if one has no bytes in this process's memory."""
        try:
            return [page_of(key, obj) for key, obj in zip(keys, objects, strict=True)]
        except Exception as e:
            _log.error("cannot use LMCache's objects: %s: %s", type(e).__name__, e)
            return None

    # -- delete, figures -----------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete the objects, except locked ones. Does not wait: listeners are notified of the end."""
        free = [(key, encoded) for key in keys if not self._cache.is_leased(encoded := encode_key(key))]

        def ended(job: Job[bool]) -> None:
            gone = [key for (key, _), done in zip(free, job.results() or (), strict=True) if done]
            with self._lock:
                sizes = [self._sizes.pop(key, 0) for key in gone]
            if gone:
                self._notify_keys_deleted(gone, sizes)

        if free:
            self._cache.remove([encoded for _, encoded in free]).add_done_callback(ended)

    def get_usage(self) -> AdapterUsage:
        """The store's usage, including other users' pages; by salt, only objects that were stored here."""
        usage, counted = self._cache.usage(), super().get_usage()
        return AdapterUsage(
            total_bytes_used=usage.used_bytes,
            total_capacity_bytes=usage.budget_bytes or 0,
            bytes_by_cache_salt=counted.bytes_by_cache_salt,
        )

    def report_status(self) -> dict[str, Any]:
        usage, figures = self._cache.usage(), self._cache.stats.snapshot()
        return {
            "is_healthy": not self._cache.store.is_lost,
            "type": type(self).__name__,
            "store": self._name,
            "route": self._cache.store.route,
            "num_pages": usage.num_pages,
            "used_bytes": usage.used_bytes,
            "budget_bytes": usage.budget_bytes,
            "locked_key_count": self._cache.num_leased,
            "succeeded": {op: counted["count"] for op, counted in figures["ops"].items()},
            "failed": figures["failures"],
        }

    def close(self) -> None:
        """End every task and release all resources. Idempotent. Waits at most ``timeout_s`` for stores."""
        with self._lock:
            if self._is_closed:
                return
        if not self._cache.close():
            _log.error("a copy from or into LMCache's memory hangs; do not use that memory again")
        with self._lock:
            self._is_closed = True
            for event in (self._store_event, self._lookup_event, self._load_event):
                event.close()


def _bitmap(size: int, ones: Sequence[int]) -> Bitmap:
    made = Bitmap(size)
    made.batched_set(ones)
    return made
