"""The store of the lookup buffer "simple": entries in this process's memory."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvplug import CapacityError, ClosedError, TimeoutError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    DeviceMark,
    Entry,
    LookupBuffer,
    LookupEndpoint,
    NamedExhaustion,
    Pipe,
    Timeout,
    close_after_fork,
)
from kvplug_lookup.buffer.entries import Entries, HeldEntry, Lease
from kvplug_lookup.buffer.entry import Description, Query, copy_of, entry_of, layers_of
from kvplug_lookup.buffer.session import Session


class SimpleStore(LookupEndpoint.Store):
    """Holds copies of inserted entries, up to ``buffer_size`` bytes of tensors.

    At this end, ``drop_select`` returns the entry itself, unless a transfer that was given up still reads its
    memory; ``select`` returns a copy. Callers that wait to take an entry are served first come, first served.
    Inserts that wait for room have no order: the first entry that fits goes in.

    Not promised. Entries do not outlive the process or ``close``. The store has no thread of its own: an
    entry past its ``ttl_s`` is evicted when room is needed, not before.
    """

    def __init__(
        self,
        *,
        buffer_size: int,
        evict: str = "never",
        ttl_s: float | None = None,
        device: str = "cpu",
        timeout_s: float = 30.0,
    ) -> None:
        self._buffer_size = buffer_size
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._entries = Entries(buffer_size, evict=evict, ttl_s=ttl_s)
        self._sessions: set[Session] = set()
        self._sessions_lock = threading.Lock()
        close_after_fork(self)

    def __len__(self) -> int:
        """Entries held, including leased ones."""
        return len(self._entries)

    @property
    def is_lost(self) -> bool:
        return self._entries.closed

    @property
    def bytes_used(self) -> int:
        """Bytes of the budget in use by entries, inserts under way, and transfers of removed entries."""
        return self._entries.bytes_used

    # -- the buffer ----------------------------------------------------------------------------

    @NamedExhaustion("inserting an entry")
    def insert(
        self,
        input_tokens: Any,
        roi: Any | None,
        key: Tensor | None,
        value: Tensor | None,
        hidden: Tensor | None,
        *,
        extra: bytes = b"",
        metadata: dict[str, Any] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> int:
        deadline = Deadline.after(timeout, self._timeout_s)
        description = Description.of(input_tokens, roi, extra, metadata, key, value, hidden)
        if not description.ids():
            raise ValueError("the entry's roi selects no token: the entry could never be found")
        nbytes = description.nbytes
        if nbytes > self._buffer_size:
            raise CapacityError(
                f"cannot store an entry of {nbytes} bytes: the whole buffer has {self._buffer_size} bytes"
                " (buffer_size)"
            )
        self._entries.reserve(nbytes, deadline)
        try:
            parts = [copy_of(part, self._device) for part in (key, value, hidden)]
            DeviceMark(self._device).wait()  # other threads read the copies, on other streams
            return self._entries.add(HeldEntry(description, *parts))
        except BaseException:
            self._entries.return_bytes(nbytes)
            raise

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        return self._entries.match(Query.of(input_tokens, roi, extra))

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        query = Query.of(input_tokens, roi, extra)
        ready: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        lease, taken = self._entries.find(query, ready.put), False
        try:
            with suppress(queue.Empty):
                ready.get(timeout=deadline.remaining())
            entry = lease.entry
            if entry is None:
                raise lease.error or TimeoutError(f"no entry for {query} arrived in time")
            header = entry.description.header(entry.entry_id)
            parts = [entry.key, entry.value, entry.hidden]
            if entry.users > 1:
                parts = [copy_of(part, self._device) for part in parts]
            taken = True
            return entry_of(header, *parts)
        finally:
            self._entries.end(lease, taken=taken)

    def select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: LookupBuffer.Sink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        query = Query.of(input_tokens, roi, extra, max(1, min_tokens))
        lease = self._entries.find(query, lambda _: None)
        try:
            entry = lease.entry
            if entry is None:
                raise lease.error or ClosedError("this lookup store is closed")
            header = entry.description.header(entry.entry_id)
            hidden = copy_of(entry.hidden, self._device)
            if sink is None:
                key, value = (copy_of(part, self._device) for part in (entry.key, entry.value))
                return entry_of(header, key, value, hidden)
            sink.begin(header)
            for index, layer in enumerate(layers_of(entry.key, entry.value)):
                if deadline.expired:
                    raise TimeoutError(f"entry {entry.entry_id}: only {index} layers were read in time")
                sink.layer(index, *layer)
            return entry_of(header, hidden=hidden)
        finally:
            self._entries.end(lease)

    # -- reaching ends -------------------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        session = Session(self._entries, signal, data, on_end=self._forget)
        try:
            with self._sessions_lock:
                if self._entries.closed:
                    raise ClosedError("this lookup store is closed")
                session.start()
                self._sessions.add(session)  # it cannot end earlier: that needs the lock
        except BaseException:
            session.abort()  # or the other end would wait for this one
            raise

    def _forget(self, session: Session) -> None:
        with self._sessions_lock:
            self._sessions.discard(session)

    # -- ending --------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        sessions = self._shut()
        self._entries.wait_until_idle(deadline)
        for session in sessions:
            session.close(deadline)
        self._entries.clear()
        for session in sessions:
            session.join(deadline)

    def abort(self) -> None:
        for session in self._shut():
            session.abort()
        self._entries.clear()

    def _shut(self) -> list[Session]:
        with self._sessions_lock:
            self._entries.close()
            return list(self._sessions)

    def _after_fork_in_child(self) -> None:
        self._entries = Entries(0, evict="never", ttl_s=None)
        self._entries.close()
        self._sessions = set()
