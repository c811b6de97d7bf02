"""The store of the lookup buffer "simple": entries in this process's memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvplug import CapacityError, ClosedError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.net.wire import decode, encode
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    Entry,
    LookupBuffer,
    LookupEndpoint,
    NamedExhaustion,
    Pipe,
    Timeout,
    close_after_fork,
)
from kvplug_lookup.buffer.entries import Entries, HeldEntry, Waiter
from kvplug_lookup.buffer.messages import layers_of
from kvplug_lookup.buffer.parts import (
    copy_of,
    count_layers,
    describe_query,
    extra_bytes,
    key_under,
    mask_array,
    nbytes_of,
    owned_tokens,
)
from kvplug_lookup.buffer.server import Session


class SimpleStore(LookupEndpoint.Store):
    """Holds copies of inserted entries, up to ``buffer_size`` bytes of tensors.

    At this end, ``drop_select`` returns the entry itself, and ``select`` a copy. Callers that wait to take an
    entry are served first come, first served. Inserts that wait for room have no order: the first entry that
    fits goes in.

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

    # -- putting in ----------------------------------------------------------------------------

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
        tokens = owned_tokens(input_tokens)
        mask = mask_array(roi, tokens.numel())
        kept_roi = torch.from_numpy(np.ones(tokens.numel(), np.bool_) if mask is None else mask.copy())
        key_tokens = tokens.numpy() if mask is None else tokens.numpy()[mask]
        if not key_tokens.size:
            raise ValueError("the entry's roi selects no token: the entry could never be found")
        num_layers = count_layers(tokens.numel(), key, value, hidden)
        extra_as_bytes = extra_bytes(extra)
        # Copies the metadata, and refuses it here rather than at the end that asks for the entry.
        plain = decode(encode(dict(metadata or {})))
        nbytes = nbytes_of(tokens, kept_roi, key, value, hidden)
        if nbytes > self._buffer_size:
            raise CapacityError(
                f"cannot store an entry of {nbytes} bytes: the whole buffer has {self._buffer_size} bytes"
                " (buffer_size)"
            )
        self._entries.reserve(nbytes, deadline)
        try:
            copies = [copy_of(part, self._device) for part in (key, value, hidden)]

            def make(entry_id: int) -> HeldEntry:
                header = Entry.Header(
                    entry_id=entry_id, tokens=tokens, roi=kept_roi, num_layers=num_layers, metadata=plain
                )
                return HeldEntry(
                    header=header,
                    extra=extra_as_bytes,
                    key_tokens=key_tokens,
                    key=copies[0],
                    value=copies[1],
                    hidden=copies[2],
                    nbytes=nbytes,
                    born=time.monotonic(),
                )

            return self._entries.add(make)
        except BaseException:
            self._entries.return_bytes(nbytes)
            raise

    # -- finding -------------------------------------------------------------------------------

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        return self._entries.match(key_under(input_tokens, roi), extra_bytes(extra))

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        key = None if input_tokens is None else key_under(input_tokens, roi)
        came = threading.Event()
        waiter = Waiter(key=key, extra=extra_bytes(extra), wake=lambda _: came.set())
        self._entries.take(waiter)
        try:
            came.wait(deadline.remaining())
        except BaseException:
            lease = self._entries.withdraw(waiter)
            if lease is not None:
                self._entries.end(lease)
            raise
        lease = self._entries.withdraw(waiter)
        if lease is None:
            raise waiter.error or TimeoutError(f"no entry for {describe_query(key)} arrived in time")
        self._entries.end(lease, taken=True)
        entry = lease.entry
        return _entry(entry.header, entry.key, entry.value, entry.hidden)

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
        key = key_under(input_tokens, roi)
        lease = self._entries.read(key, extra_bytes(extra), min_tokens)
        if lease is None:
            raise EntryGoneError(f"{describe_query(key)}: no entry shares enough tokens")
        try:
            entry = lease.entry
            with NamedExhaustion("copying an entry"):
                header = Entry.Header(
                    entry_id=entry.entry_id,
                    tokens=entry.header.tokens.clone(),
                    roi=entry.header.roi.clone(),
                    num_layers=entry.header.num_layers,
                    metadata=decode(encode(entry.header.metadata)),
                )
            hidden = copy_of(entry.hidden, self._device)
            if sink is None:
                return _entry(
                    header, copy_of(entry.key, self._device), copy_of(entry.value, self._device), hidden
                )
            sink.begin(header)
            for index, (layer_key, layer_value) in enumerate(layers_of(entry.key, entry.value)):
                if deadline.expired:
                    raise TimeoutError(f"entry {entry.entry_id}: only {index} layers were read in time")
                sink.layer(index, layer_key, layer_value)
            return _entry(header, None, None, hidden)
        finally:
            self._entries.end(lease)

    # -- others --------------------------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        session = Session(self._entries, signal, data, on_end=self._forget)
        with self._sessions_lock:
            if self._entries.closed:
                raise ClosedError("this lookup store is closed")
            session.start()
            self._sessions.add(session)  # it cannot end earlier: that needs the lock

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


def _entry(header: Entry.Header, key: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> Entry:
    return Entry(header=header, tokens=header.tokens, roi=header.roi, key=key, value=value, hidden=hidden)
