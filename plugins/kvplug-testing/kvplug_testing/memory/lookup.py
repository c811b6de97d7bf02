"""The lookup buffer "memory": a fake for the tests of one process, and the first subject of its suite.

The signal pipe carries one message, the number of the attached client. Calls go directly to the store. The
five parts of a leased entry go over the data pipe, so that a slow, broken or lying pipe has the same effect
as with any lookup buffer. A thread waits for the end of the signal pipe.
"""

from __future__ import annotations

import abc
import copy
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import (
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    UnsupportedError,
)
from kvplug.net.wire import TensorMeta, meta_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    Entry,
    EntrySink,
    LookupBuffer,
    LookupContext,
    LookupEndpoint,
    LookupStore,
    NamedExhaustion,
    Pipe,
    Timeout,
    WireError,
    close_after_fork,
)
from kvplug_testing.memory.entries import (
    Key,
    copy_of,
    extra_bytes,
    give_layers,
    key_under,
    num_layers_of,
)
from kvplug_testing.memory.store_core import LeasedEntry, StoreCore

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(eq=False)
class AttachedClient:
    """The store's record of a remote end: the store's ends of the two pipes."""

    store: StoreCore
    signal: Pipe
    data: Pipe
    forget: Callable[[AttachedClient], None]
    """Called when it ends."""
    number: int = attrs.field(factory=lambda: secrets.randbits(62))

    def announce(self) -> None:
        import torch

        _clients[self.number] = self
        try:
            self.signal.send_tensor(torch.tensor(self.number))
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """The remote end cannot be served. Idempotent."""
        _clients.pop(self.number, None)
        self.forget(self)

    def end(self) -> None:
        """End at once. Idempotent."""
        self.withdraw()
        self.signal.abort()
        self.data.abort()


_clients: Final[dict[int, AttachedClient]] = {}


@attrs.frozen
class Wanted:
    """What an entry is asked for by."""

    key: Key | None
    """The tokens under the roi; ``None``: any."""
    min_tokens: int | None = None
    """The number of leading tokens that the entry must share; ``None``: one is a prefix of the other."""

    def is_met_by(self, key: Key) -> bool:
        if self.key is None:
            return bool(key)
        size = min(len(key), len(self.key)) if self.min_tokens is None else max(1, self.min_tokens)
        return 0 < size <= min(len(key), len(self.key)) and key[:size] == self.key[:size]


class MemoryLookupBuffer(LookupBuffer):
    """The calls of both ends: lease an entry, copy it to the caller, release the lease."""

    _timeout_s: float

    @abc.abstractmethod
    def _store_for_call(self, deadline: Deadline) -> AbstractContextManager[StoreCore]:
        """The store, for one call."""

    @abc.abstractmethod
    def _copied(self, entry: Entry, wanted: Wanted, deadline: Deadline) -> Entry:
        """A copy of the store's entry for the caller at this end."""

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        key = key_under(input_tokens, roi)
        with self._store_for_call(self._deadline(DEFAULT_TIMEOUT)) as store:
            return store.count_shared(key, extra_bytes(extra))

    def drop_select(
        self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"", timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Entry:
        deadline = self._deadline(timeout)
        key = None if input_tokens is None else key_under(input_tokens, roi)
        with self._store_for_call(deadline) as store:
            leased = store.lease_oldest(key, extra_bytes(extra), deadline, lambda: self.is_lost)
            return self._hand_over(store, leased, Wanted(key), None, deadline)

    def select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: EntrySink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = self._deadline(timeout)
        key = key_under(input_tokens, roi)
        with self._store_for_call(deadline) as store:
            leased = store.lease_longest(key, extra_bytes(extra), min_tokens)
            return self._hand_over(store, leased, Wanted(key, min_tokens), sink, deadline)

    def _hand_over(
        self,
        store: StoreCore,
        leased: LeasedEntry,
        wanted: Wanted,
        sink: EntrySink | None,
        deadline: Deadline,
    ) -> Entry:
        is_received = False
        try:
            entry = self._copied(leased.stored.entry, wanted, deadline)
            if sink is not None:
                entry = give_layers(entry, sink, deadline)
            is_received = True
        finally:
            self._release(store, leased, is_received)
        return entry

    def _release(self, store: StoreCore, leased: LeasedEntry, is_received: bool) -> None:
        store.release(leased, is_received=is_received)


class MemoryStore(StoreCore, MemoryLookupBuffer, LookupStore):
    """The end that holds the entries."""

    def __init__(self, context: LookupContext) -> None:
        super().__init__(max_bytes=context.buffer_size, timeout_s=context.timeout_s)
        self._clients: list[AttachedClient] = []
        close_after_fork(self)

    @property
    def is_lost(self) -> bool:
        return self._closed

    @contextmanager
    def _store_for_call(self, deadline: Deadline) -> Iterator[StoreCore]:
        yield self

    def _copied(self, entry: Entry, wanted: Wanted, deadline: Deadline) -> Entry:
        return copy_of(entry)

    # -- remote ends, and the end --------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        client = AttachedClient(self, signal, data, self._forget)
        with self._changed:
            self._check_open()
            self._clients.append(client)
        client.announce()

    def _forget(self, client: AttachedClient) -> None:
        """The client has ended. Wakes its waiting calls."""
        with self._changed:
            if client in self._clients:
                self._clients.remove(client)
            self._changed.notify_all()

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._leases, deadline.remaining())
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            self._remove_all()
            clients = list(self._clients)
        for client in clients:
            client.end()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._closed = True
        self._clients = []


class MemoryRemoteStore(MemoryLookupBuffer):
    """The end that reaches a store. Its methods may be called from several threads at once."""

    def __init__(self, signal: Pipe, data: Pipe, *, timeout_s: float) -> None:
        self._signal, self._data = signal, data
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards the client and how this end has ended
        self._client: AttachedClient | None = None
        self._ended: KvplugError | None = None
        """The error of every call from now on."""
        self._transfers = threading.Lock()
        self._num_unread = 0
        """Messages on the data pipe that a call did not receive in time. Guarded by the lock of transfers."""
        close_after_fork(self)
        self._thread = BackgroundThread(self._watch, name="kvplug-memory-lookup", stop=self.abort)
        with NamedExhaustion("reaching a lookup store"):
            self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._ended is not None

    def insert(self, *given: Any, **more: Any) -> int:
        self._check()
        raise UnsupportedError("entries are inserted at the end that holds them")

    # -- calls ---------------------------------------------------------------------------------

    @contextmanager
    def _store_for_call(self, deadline: Deadline) -> Iterator[StoreCore]:
        """The store. If this end ends during the call, the call raises this end's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._client or self._ended, deadline.remaining())
            self._check()
            if self._client is None:
                raise TimeoutError(f"the lookup store at {self._signal.peer} did not announce itself in time")
        try:
            yield self._client.store
        except KvplugError as e:
            self._check()
            if isinstance(e, ClosedError):
                raise PeerGoneError(f"the lookup store at {self._signal.peer} has closed") from e
            raise

    def _copied(self, entry: Entry, wanted: Wanted, deadline: Deadline) -> Entry:
        left = deadline.remaining()
        if not self._transfers.acquire(timeout=-1 if left is None else left):
            raise TimeoutError("another call's entry was still in transfer")
        try:
            parts = self._transfer(entry, deadline)
            self._check()  # the signal pipe may have broken in the meantime
            received = self._received(entry, parts, wanted)
        except (TimeoutError, ResourceExhaustedError):
            raise
        except KvplugError as e:
            self._end(PeerGoneError(f"no entry comes from the store at {self._signal.peer}: {e}"))
            raise
        finally:
            self._transfers.release()
        return copy_of(received)

    def _received(self, entry: Entry, parts: list[Any], wanted: Wanted) -> Entry:
        """The entry that has come.

        Raises:
            WireError: it is none, or was not asked for.
        """
        tokens, roi, key, value, hidden = parts
        try:
            for part, dtype in ((tokens, "int64"), (roi, "bool")):
                if part is None or meta_of(part).dtype != dtype:
                    raise ValueError("it has no tokens, or no roi")
            found = key_under(tokens, roi)
            num_layers = num_layers_of(len(tokens), key, value)
        except (KvplugError, TypeError, ValueError) as e:
            raise WireError(f"what came from the store at {self._signal.peer} is no entry: {e}") from e
        if not wanted.is_met_by(found):
            raise WireError(f"an entry for other tokens came from the store at {self._signal.peer}")
        header = attrs.evolve(entry.header, tokens=tokens, roi=roi, num_layers=num_layers)
        return Entry(header=header, tokens=tokens, roi=roi, key=key, value=value, hidden=hidden)

    def _transfer(self, entry: Entry, deadline: Deadline) -> list[Tensor | None]:
        """Send and receive one part after the other: a pipe always has capacity for one message."""
        assert self._client is not None
        parts = []
        while self._num_unread:
            self._receive(deadline)
        for part in (entry.tokens, entry.roi, entry.key, entry.value, entry.hidden):
            self._client.data.send_tensor(part, timeout=deadline.remaining())
            self._num_unread += 1
            parts.append(self._receive(deadline))
        return parts

    def _receive(self, deadline: Deadline) -> Tensor | None:
        received = self._data.recv_tensor(timeout=deadline.remaining())
        self._num_unread -= 1
        return received

    def _check(self) -> None:
        if self._ended is not None:
            raise copy.copy(self._ended) from self._ended
        if self._signal.closed:  # the watching thread will notice this soon
            raise PeerGoneError("the signal pipe is closed")

    # -- the end -------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            message = self._signal.recv_tensor(timeout=None)
            if message is None or meta_of(message) != TensorMeta("int64", ()):
                raise WireError("what came is no number of a client")
            with self._changed:
                self._client = _clients.get(int(message))
                self._changed.notify_all()
            if self._client is not None:
                self._signal.recv_tensor(timeout=None)
        except KvplugError:
            pass  # the end that this thread waits for
        self._end(PeerGoneError(f"the lookup store at {self._signal.peer} is gone"))

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        self._end(ClosedError("this end of the lookup buffer is closed"))
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining())

    def abort(self) -> None:
        self._end(ClosedError("this end of the lookup buffer was aborted"))

    def _end(self, error: KvplugError) -> None:
        with self._changed:
            if self._ended is None or isinstance(error, ClosedError):
                self._ended = error
            self._changed.notify_all()
        self._signal.abort()
        self._data.abort()
        if self._client is not None:
            self._client.end()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._ended = ClosedError("this end of the lookup buffer belongs to the parent of this process")


class MemoryLookupEndpoint(LookupEndpoint):
    """The factory of the spec."""

    def __init__(self, context: LookupContext) -> None:
        self._context = context

    def hold(self) -> LookupStore:
        return MemoryStore(self._context)

    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        return MemoryRemoteStore(signal, data, timeout_s=self._context.timeout_s)
