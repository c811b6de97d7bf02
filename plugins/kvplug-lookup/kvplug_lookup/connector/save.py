"""Gathering a prompt's KV step by step, hashing it, storing it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvplug import CapacityError, ClosedError, TimeoutError
from kvplug.engine import EntryGoneError, KVLayout, TransferStats, gather
from kvplug.net.wire import memory_of
from kvplug.transport import BackgroundThread, LookupStore, digest
from kvplug_lookup.connector.device import Mark, wait_for_device
from kvplug_lookup.connector.plan import SavePlan

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Gathered:
    """One prompt's KV on its way into the store."""

    token_ids: tuple[int, ...]
    extra: bytes
    key: Tensor
    """[num_layers, num_tokens, num_kv_heads, head_size]"""
    value: Tensor | None
    nbytes: int
    num_resets: int
    """Of the saver, when its first tokens were gathered."""
    started: float
    complete: Mark | None = None
    """Behind the copies of its last tokens, once they are queued."""


class Saver:
    """Gathers on the model's thread, layer by layer; hashes and stores on one of its own.

    What was gathered and is not yet stored is bounded by ``max_bytes`` (one prompt passes alone), since
    the store's own budget counts what it holds; ``None``: by ``store_bytes``.

    A save that does not succeed costs nothing but a later recomputation: it is counted, with its
    reason, and never raised.
    """

    def __init__(
        self,
        store: LookupStore,
        layout: KVLayout,
        num_layers: int,
        *,
        checksum: str | None,
        timeout_s: float,
        max_bytes: int | None,
        store_bytes: int,
        stats: TransferStats,
    ) -> None:
        self._store = store
        self._layout = layout
        self._num_layers = num_layers
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._store_bytes = store_bytes
        self._max_bytes = store_bytes if max_bytes is None else max_bytes
        self._stats = stats
        self._gathering: dict[str, _Gathered] = {}
        self._lock = threading.Condition()
        self._pending: deque[_Gathered] = deque()
        self._num_taken = self._num_stored = 0
        self._num_resets = 0
        self._bytes = 0
        self._closed = False
        self._thread = BackgroundThread(self._store_all, name="kvplug-lookup-save", stop=self._leave)
        self._thread.start()

    # -- on the model's thread -----------------------------------------------------------------

    def begin(self, plans: tuple[SavePlan, ...], dtype: torch.dtype, device: torch.device) -> None:
        """A step begins: make room for prompts whose first tokens it computes."""
        for plan in plans:
            if plan.start == 0:
                self.forget(plan.request_id)
                if self._store.match(plan.token_ids, extra=plan.extra) >= len(plan.token_ids):
                    continue  # held already
                gathered = self._room_for(plan, dtype, device)
                if gathered is not None:
                    self._gathering[plan.request_id] = gathered

    def _room_for(self, plan: SavePlan, dtype: torch.dtype, device: torch.device) -> _Gathered | None:
        layout, num_tokens = self._layout, len(plan.token_ids)
        shape = (self._num_layers, num_tokens, layout.num_kv_heads, layout.head_size)
        nbytes = math.prod(shape) * dtype.itemsize * (2 if layout.has_values else 1)
        if nbytes > self._store_bytes:
            self._give_up(f"{num_tokens} tokens are {nbytes} bytes, more than the whole store", "too_large")
            return None
        with self._lock:
            used = self._bytes
            if used and used + nbytes > self._max_bytes:
                self._give_up(f"{used} bytes are gathered and not yet stored (max_unsaved)", "no_room")
                return None
            self._bytes += nbytes
        try:
            key = torch.empty(shape, dtype=dtype, device=device)
            value = torch.empty(shape, dtype=dtype, device=device) if layout.has_values else None
        except (MemoryError, RuntimeError) as e:
            self._return_bytes(nbytes)
            self._give_up(e, "no_room")
            return None
        return _Gathered(
            plan.token_ids, plan.extra, key, value, nbytes, self._num_resets, time.perf_counter()
        )

    @property
    def bytes_unsaved(self) -> int:
        """Of prompts that are being gathered, or wait to be stored."""
        with self._lock:
            return self._bytes

    def _return_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._bytes -= nbytes

    def gather_layer(self, plans: tuple[SavePlan, ...], index: int, cache: Tensor) -> None:
        """Copy this step's tokens of one layer out of the paged cache."""
        for plan in plans:
            gathered = self._gathering.get(plan.request_id)
            if gathered is None:
                continue
            value = gathered.value
            gather(
                cache,
                self._layout,
                plan.block_ids,
                plan.start,
                plan.end,
                out_key=gathered.key[index, plan.start : plan.end],
                out_value=None if value is None else value[index, plan.start : plan.end],
            )

    def end(self, plans: tuple[SavePlan, ...]) -> None:
        """The step is over: prompts that are complete go into the store.

        Their copies may only be queued yet. What this thread queues next comes after them, so that the blocks
        may be overwritten; the saving thread, which would overtake them, waits.
        """
        complete = [self._gathering.pop(plan.request_id, None) for plan in plans if plan.is_last]
        ready = [gathered for gathered in complete if gathered is not None]
        if not ready:
            return
        mark = Mark(ready[0].key)
        for gathered in ready:
            gathered.complete = mark
        with self._lock:
            self._pending += ready
            self._num_taken += len(ready)
            self._lock.notify_all()

    def forget(self, request_id: str) -> bool:
        """It ended, was preempted, or its KV is not to be trusted. Returns whether it was being gathered."""
        gathered = self._gathering.pop(request_id, None)
        if gathered is not None:
            self._return_bytes(gathered.nbytes)
        return gathered is not None

    def reset(self) -> None:
        """Nothing that was gathered by now is stored, nor will be. Does not wait for the one in hand."""
        for request_id in list(self._gathering):
            self.forget(request_id)
        with self._lock:
            self._num_resets += 1
            self._bytes -= sum(gathered.nbytes for gathered in self._pending)
            self._num_stored += len(self._pending)
            self._pending.clear()
            self._lock.notify_all()
        self._store.clear()

    # -- from other threads --------------------------------------------------------------------

    def settle(self) -> None:
        """Return when everything handed over by now is stored or given up."""
        with self._lock:
            goal = self._num_taken
            self._lock.wait_for(lambda: self._closed or self._num_stored >= goal)

    def stop(self) -> None:
        """Nothing more is stored; who waits for it is woken. The store must be closed before ``join``."""
        with self._lock:
            self._closed = True
            self._pending.clear()
            self._lock.notify_all()

    def _leave(self) -> None:
        """The program leaves."""
        self.stop()
        self._store.abort()

    def join(self) -> None:
        self._thread.join(timeout=5)

    # -- the thread ----------------------------------------------------------------------------

    def _store_all(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._pending)
                if self._closed:
                    return
                gathered = self._pending.popleft()
            try:
                self._store_one(gathered)
            except ClosedError:
                self.stop()
                return
            except EntryGoneError:
                _log.debug("a prompt is not stored: the store was cleared")
            except TimeoutError as e:
                self._give_up(e, "no_room")
            except CapacityError as e:
                self._give_up(e, "too_large")
            except Exception as e:
                self._give_up(e, "other")
            finally:
                with self._lock:
                    self._num_stored += 1
                    self._bytes -= gathered.nbytes
                    self._lock.notify_all()

    def _store_one(self, gathered: _Gathered) -> None:
        if self._store.match(gathered.token_ids, extra=gathered.extra) >= len(gathered.token_ids):
            return  # the same prompt came twice at about the same time
        assert gathered.complete is not None
        gathered.complete.wait()
        metadata: dict[str, Any] = {}
        if self._checksum is not None:
            metadata = {
                "checksum": self._checksum,
                "layers": [
                    hash_of(self._checksum, gathered.key[index], _layer(gathered.value, index))
                    for index in range(self._num_layers)
                ],
            }
        if gathered.num_resets != self._num_resets:
            return
        self._store.insert(
            gathered.token_ids,
            None,
            gathered.key,
            gathered.value,
            None,
            extra=gathered.extra,
            metadata=metadata,
            timeout=self._timeout_s,
        )
        wait_for_device(gathered.key)  # the store has copied it; now its memory may be another's
        if gathered.num_resets != self._num_resets:
            self._store.clear()  # it came after the reset did; what this thread stores next is newer
            return
        self._stats.record("save", gathered.nbytes, time.perf_counter() - gathered.started)

    def _give_up(self, error: Exception | str, reason: str) -> None:
        _log.warning("a prompt is not stored: %s", error)
        self._stats.fail("save", reason)


def _layer(tensor: Tensor | None, index: int) -> Tensor | None:
    return None if tensor is None else tensor[index]


def hash_of(name: str, key: Tensor, value: Tensor | None) -> bytes:
    """The hash of one layer of an entry: its keys' bytes, then its values'."""
    parts = [memory_of(key.cpu())]
    if value is not None:
        parts.append(memory_of(value.cpu()))
    return digest(name, *parts)
