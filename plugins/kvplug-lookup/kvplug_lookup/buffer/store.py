"""The store "simple": entries in this process's memory."""

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
from kvplug_lookup.buffer.lending import Lending, Waiter
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
from kvplug_lookup.buffer.shelf import Held


class SimpleStore(LookupEndpoint.Store):
    """Holds copies of what is inserted, up to ``buffer_size`` bytes of tensors.

    Callers at this end get an entry that they take as it is, and a copy of one that they read. Entries
    that several wait to take go to them in the order in which they began to wait. Inserts that wait
    for room have no order: the first entry that fits goes in.

    Not promised. Entries outlive neither the process nor ``close``. There is no thread of its own: an
    entry past its ``ttl_s`` goes when room is needed, not before.
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
        self._lending = Lending(buffer_size, evict=evict, ttl_s=ttl_s)
        self._sessions: set[Session] = set()
        self._sessions_lock = threading.Lock()
        close_after_fork(self)

    def __len__(self) -> int:
        """Entries held, those lent included."""
        return self._lending.num_entries

    @property
    def is_lost(self) -> bool:
        return self._lending.closed

    @property
    def bytes_used(self) -> int:
        """Bytes of the budget that are taken: by entries, inserts under way, transfers of what is gone."""
        return self._lending.bytes_used

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
            raise ValueError("no token of the entry is under its roi: it could never be found")
        num_layers = count_layers(tokens.numel(), key, value, hidden)
        extra_as_bytes = extra_bytes(extra)
        # A copy, and a refusal here rather than at the end that asks for the entry.
        plain = decode(encode(dict(metadata or {})))
        nbytes = nbytes_of(tokens, kept_roi, key, value, hidden)
        if nbytes > self._buffer_size:
            raise CapacityError(
                f"an entry of {nbytes} bytes is larger than the whole buffer of {self._buffer_size} bytes"
                " (buffer_size): it is not stored"
            )
        self._lending.reserve(nbytes, deadline)
        try:
            copies = [copy_of(part, self._device) for part in (key, value, hidden)]

            def make(entry_id: int) -> Held:
                header = Entry.Header(
                    entry_id=entry_id, tokens=tokens, roi=kept_roi, num_layers=num_layers, metadata=plain
                )
                return Held(
                    header=header,
                    extra=extra_as_bytes,
                    key_tokens=key_tokens,
                    key=copies[0],
                    value=copies[1],
                    hidden=copies[2],
                    nbytes=nbytes,
                    born=time.monotonic(),
                )

            return self._lending.put(make)
        except BaseException:
            self._lending.return_bytes(nbytes)
            raise

    # -- finding -------------------------------------------------------------------------------

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        return self._lending.match(key_under(input_tokens, roi), extra_bytes(extra))

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
        waiter = Waiter(key=key, extra=extra_bytes(extra), holder=_here(), wake=lambda _: came.set())
        self._lending.want(waiter)
        try:
            came.wait(deadline.remaining())
        except BaseException:
            loan = self._lending.withdraw(waiter)
            if loan is not None:
                self._lending.end(loan)
            raise
        loan = self._lending.withdraw(waiter)
        if loan is None:
            raise waiter.error or TimeoutError(f"nothing that matches {describe_query(key)} came in time")
        self._lending.end(loan, taken=True)
        held = loan.held
        return _entry(held.header, held.key, held.value, held.hidden)

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
        loan = self._lending.borrow(key, extra_bytes(extra), min_tokens, _here())
        if loan is None:
            raise EntryGoneError(f"{describe_query(key)}: nothing held shares enough tokens")
        try:
            held = loan.held
            with NamedExhaustion("copying an entry"):
                header = Entry.Header(
                    entry_id=held.entry_id,
                    tokens=held.header.tokens.clone(),
                    roi=held.header.roi.clone(),
                    num_layers=held.header.num_layers,
                    metadata=decode(encode(held.header.metadata)),
                )
            hidden = copy_of(held.hidden, self._device)
            if sink is None:
                return _entry(
                    header, copy_of(held.key, self._device), copy_of(held.value, self._device), hidden
                )
            sink.begin(header)
            for index, (layer_key, layer_value) in enumerate(layers_of(held.key, held.value)):
                if deadline.expired:
                    raise TimeoutError(f"entry {held.entry_id}: only {index} layers were taken in time")
                sink.layer(index, layer_key, layer_value)
            return _entry(header, None, None, hidden)
        finally:
            self._lending.end(loan)

    # -- others --------------------------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        session = Session(self._lending, signal, data, on_end=self._forget)
        with self._sessions_lock:
            if self._lending.closed:
                raise ClosedError("this lookup store is closed")
            session.start()
            self._sessions.add(session)  # it cannot end before, as that needs the lock

    def _forget(self, session: Session) -> None:
        with self._sessions_lock:
            self._sessions.discard(session)

    # -- ending --------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        sessions = self._shut()
        self._lending.wait_until_idle(deadline)
        for session in sessions:
            session.close(deadline)
        self._lending.let_go()
        for session in sessions:
            session.join(deadline)

    def abort(self) -> None:
        for session in self._shut():
            session.abort()
        self._lending.let_go()

    def _shut(self) -> list[Session]:
        with self._sessions_lock:
            self._lending.shut()
            return list(self._sessions)

    def _after_fork_in_child(self) -> None:
        self._lending = Lending(0, evict="never", ttl_s=None)
        self._lending.shut()
        self._sessions = set()


def _here() -> str:
    return f"thread {threading.current_thread().name} of this process"


def _entry(header: Entry.Header, key: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> Entry:
    return Entry(header=header, tokens=header.tokens, roi=header.roi, key=key, value=value, hidden=hidden)
