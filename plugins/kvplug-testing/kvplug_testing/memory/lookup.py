"""The lookup buffer "memory": a fake for the tests of one process, and the first subject of its suite.

The store keeps each entry as two messages: its tokens, and the rest, encoded. The signal pipe carries one
message, the number of the attached client. Calls go directly to the store. The two messages of a leased entry
go over the data pipe, so that a slow, broken or lying pipe has the same effect as with any lookup buffer. A
thread waits for the end of the signal pipe.
"""

from __future__ import annotations

import abc
import contextlib
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import (
    CapacityError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    UnsupportedError,
)
from kvplug.engine import EntryGoneError
from kvplug.net.wire import Limits, TensorMeta, decode, encode, memory_of, meta_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    Entry,
    EntryHeader,
    EntrySink,
    Lifecycle,
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

if TYPE_CHECKING:
    from torch import Tensor

LIMITS: Final = Limits(max_bytes=1 << 40)
Key = tuple[int, ...]
"""The token ids under the roi."""
Wanted = Callable[[Key], bool]
"""Whether an entry with this key was asked for."""


# -- keys and entries ------------------------------------------------------------------------------


def checked_tokens(tokens: Any, roi: Any) -> tuple[Tensor, Tensor]:
    """Copies of the token ids (int64) and of the roi (bool; ``None`` is every token).

    Raises:
        UnsupportedError: they are not 64-bit integers and booleans.
        ValueError: they do not have one dimension or the same length.
    """
    import torch

    ids = _row(tokens, torch.int64, "token ids")
    mask = torch.ones_like(ids, dtype=torch.bool) if roi is None else _row(roi, torch.bool, "a roi")
    if mask.shape != ids.shape:
        raise ValueError(f"a roi of {len(mask)} does not fit {len(ids)} tokens")
    return ids, mask


def _row(given: Any, dtype: Any, what: str) -> Tensor:
    import torch

    plain = given.tolist() if hasattr(given, "tolist") else list(given)
    try:
        row = torch.tensor(plain) if plain else torch.tensor([], dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as e:
        raise UnsupportedError(f"{what} must be {dtype}: {e}") from e
    if row.ndim != 1:
        raise ValueError(f"{what} must have one dimension, not {row.ndim}")
    if row.dtype != dtype:
        raise UnsupportedError(f"{what} must be {dtype}, not {row.dtype}")
    return row


def key_under(tokens: Any, roi: Any) -> Key:
    """The tokens under the roi. Raises like :func:`checked_tokens`."""
    ids, mask = checked_tokens(tokens, roi)
    return tuple(ids[mask].tolist())


def extra_bytes(extra: Any) -> bytes:
    """The part of the key besides the tokens.

    Raises:
        UnsupportedError: it is not bytes-like (``bytes`` of an int would be that many zeros).
    """
    try:
        return bytes(memoryview(extra))
    except TypeError as e:
        raise UnsupportedError(f"extra must be bytes, not {type(extra).__name__}") from e


def num_layers_of(num_tokens: int, key: Tensor | None, value: Tensor | None) -> int:
    """The first dimension of key and value; 0 if there are none.

    Raises:
        ValueError: the shapes do not match.
    """
    shapes = [tuple(part.shape) for part in (key, value) if part is not None]
    if any(len(shape) < 2 or shape[1] != num_tokens for shape in shapes):
        raise ValueError(f"key and value have the shape [num_layers, {num_tokens} tokens, ...], not {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"key has {shapes[0][0]} layers and value {shapes[1][0]}")
    return shapes[0][0] if shapes else 0


@NamedExhaustion("copying an entry")
def decoded(tokens: Any, rest: bytes | memoryview) -> Entry:
    """The entry in two messages, which may be anything.

    Raises:
        WireError: they are no entry.
    """
    try:
        entry_id, roi, metadata, key, value, hidden = decode(rest, limits=LIMITS)
        tokens, roi = checked_tokens(tokens, roi)
        if hidden is not None:
            meta_of(hidden)
        header = EntryHeader(
            entry_id=entry_id,
            tokens=tokens,
            roi=roi,
            num_layers=num_layers_of(len(tokens), key, value),
            metadata={**metadata},
        )
    except (KvplugError, AttributeError, TypeError, ValueError) as e:
        raise WireError(f"what came is no entry: {e}") from e
    return Entry(header=header, tokens=tokens, roi=roi, key=key, value=value, hidden=hidden)


def give_layers(entry: Entry, sink: EntrySink, deadline: Deadline) -> Entry:
    """Pass key and value to a sink layer by layer, and return the rest.

    Raises:
        TimeoutError: the sink was too slow.
        Exception: raised by the sink.
    """
    sink.begin(entry.header)
    for index in range(entry.header.num_layers):
        if deadline.expired:
            raise TimeoutError(f"the sink took {index} of {entry.header.num_layers} layers in time")
        key, value = (None if part is None else part[index] for part in (entry.key, entry.value))
        sink.layer(index, key, value)
    return attrs.evolve(entry, key=None, value=None)


@attrs.define(eq=False)
class StoredEntry:
    """An entry, and the store's record of it."""

    entry_id: int
    extra: bytes
    key: Key
    tokens: Tensor
    rest: bytes
    """All but the tokens, encoded."""
    num_users: int = 0
    """The callers that read it, or the one that takes it."""
    is_taken: bool = False
    is_removed: bool = False
    """Its bytes are free when it has no user."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + len(self.rest)


def is_answer(found: Key, key: Key | None, min_tokens: int | None = None) -> bool:
    """Whether an entry with the key ``found`` is one that was asked for.

    Args:
        key: The tokens under the roi of the query; ``None``: any.
        min_tokens: The number of leading tokens to share; ``None``: one is a prefix of the other.
    """
    if key is None:
        return bool(found)
    size = min(len(found), len(key)) if min_tokens is None else max(1, min_tokens)
    return 0 < size <= min(len(found), len(key)) and found[:size] == key[:size]


# -- both ends -------------------------------------------------------------------------------------


class MemoryLookupBuffer(LookupBuffer):
    """The calls of both ends: lease an entry, copy it to the caller, release the lease."""

    _timeout_s: float

    @abc.abstractmethod
    def _store_for_call(self, deadline: Deadline) -> AbstractContextManager[MemoryStore]:
        """The store, for one call."""

    @abc.abstractmethod
    def _received(self, stored: StoredEntry, wanted: Wanted, deadline: Deadline) -> Entry:
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
            stored = store.lease_oldest(key, extra_bytes(extra), deadline, lambda: self.is_lost)
            with self._using(store, stored):
                return self._received(stored, partial(is_answer, key=key), deadline)

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
            stored = store.lease_longest(key, extra_bytes(extra), min_tokens)
            with self._using(store, stored):
                wanted = partial(is_answer, key=key, min_tokens=min_tokens)
                entry = self._received(stored, wanted, deadline)
                return entry if sink is None else give_layers(entry, sink, deadline)

    @contextmanager
    def _using(self, store: MemoryStore, stored: StoredEntry) -> Iterator[None]:
        """Release a lease at the end; the entry is received if nothing is raised."""
        try:
            yield
        except BaseException:
            self._release(store, stored, False)
            raise
        self._release(store, stored, True)

    def _release(self, store: MemoryStore, stored: StoredEntry, is_received: bool) -> None:
        store.release(stored, is_received=is_received)


# -- the end that holds the entries ----------------------------------------------------------------


class MemoryStore(MemoryLookupBuffer, LookupStore):
    """The entries, under one lock with one condition: whoever waits looks again after each change.

    The index is a dict of all keys and all their prefixes: simple code that needs much memory for long
    prompts.
    """

    def __init__(self, context: LookupContext) -> None:
        self._max_bytes, self._timeout_s = context.buffer_size, context.timeout_s
        self._changed = threading.Condition()  # guards all that follows
        self._entries: dict[int, StoredEntry] = {}  # oldest first
        self._index: dict[tuple[bytes, Key, bool], dict[int, StoredEntry]] = defaultdict(dict)
        """Entries by ``extra`` and a prefix of their key, and whether that is the whole key."""
        self._used_bytes = 0
        self._next_id = 1
        self._closed = False
        close_after_fork(self)

    @property
    def is_lost(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this lookup store is closed")

    def _store_for_call(self, deadline: Deadline) -> AbstractContextManager[MemoryStore]:
        return contextlib.nullcontext(self)

    def _received(self, stored: StoredEntry, wanted: Wanted, deadline: Deadline) -> Entry:
        return decoded(stored.tokens, stored.rest)

    @NamedExhaustion("copying an entry")
    def insert(
        self,
        input_tokens: Any,
        roi: Any,
        key: Tensor | None,
        value: Tensor | None,
        hidden: Tensor | None,
        *,
        extra: bytes = b"",
        metadata: dict[str, Any] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> int:
        deadline = self._deadline(timeout)
        tokens, mask = checked_tokens(input_tokens, roi)
        if not mask.any():
            raise ValueError("no token of the entry is under its roi: it could never be found")
        num_layers_of(len(tokens), key, value)
        counted = tuple(tokens[mask].tolist())
        with self._changed:
            rest = encode([self._next_id, mask, metadata or {}, key, value, hidden], limits=LIMITS)
            stored = StoredEntry(self._next_id, extra_bytes(extra), counted, tokens, rest)
            self._next_id += 1
            if stored.nbytes > self._max_bytes:
                raise CapacityError(f"an entry of {stored.nbytes} bytes, and a buffer of {self._max_bytes}")
            self._wait_for_room(stored.nbytes, deadline)
            self._add(stored)
            return stored.entry_id

    def _wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        self._check_open()
        while not self._has_room(nbytes):
            self._wait(deadline, f"no room for {nbytes} bytes in time: {self._used_bytes} bytes are used")

    def _has_room(self, nbytes: int) -> bool:
        return self._used_bytes + nbytes <= self._max_bytes

    def _wait(self, deadline: Deadline, otherwise: str) -> None:
        """Wait for the next change."""
        if deadline.expired:
            raise TimeoutError(otherwise)
        self._changed.wait(deadline.remaining())
        self._check_open()

    # -- leases, for callers at both ends ------------------------------------------------------

    def count_shared(self, key: Key, extra: bytes) -> int:
        """The length of the longest prefix of ``key`` that an entry shares."""
        with self._changed:
            self._check_open()
            return self._find_longest(key, extra)[0]

    def lease_oldest(
        self, key: Key | None, extra: bytes, deadline: Deadline, is_cancelled: Callable[[], bool]
    ) -> StoredEntry:
        """Lease the oldest match (any entry if ``key`` is ``None``) to be taken; waits until there is one.

        Raises:
            TimeoutError: no entry arrived in time, or ``is_cancelled()``, which is called after each change.
            ClosedError: the store is closed.
        """
        with self._changed:
            self._check_open()
            while is_cancelled() or (stored := self._find_oldest(key, extra)) is None:
                if is_cancelled():
                    raise TimeoutError("the call was cancelled")
                self._wait(deadline, "no entry that matches came in time")
            stored.num_users, stored.is_taken = 1, True
            return stored

    def lease_longest(self, key: Key, extra: bytes, min_tokens: int) -> StoredEntry:
        """Lease the entry that shares the longest prefix, to be read.

        Raises:
            EntryGoneError: no entry shares ``min_tokens`` tokens.
        """
        with self._changed:
            self._check_open()
            shared, stored = self._find_longest(key, extra)
            if stored is None or shared < min_tokens:
                raise EntryGoneError(f"no entry shares {max(1, min_tokens)} tokens with the query")
            stored.num_users += 1
            return stored

    def release(self, stored: StoredEntry, *, is_received: bool) -> None:
        """End a lease. An entry leased to be taken is removed if it ``is_received``, else it is available
        again.
        """
        with self._changed:
            stored.num_users -= 1
            was_taken, stored.is_taken = stored.is_taken, False
            if stored.is_removed:
                self._used_bytes -= 0 if stored.num_users else stored.nbytes
            elif was_taken and is_received:
                self._remove(stored)
            self._changed.notify_all()

    # -- index ---------------------------------------------------------------------------------

    def _find_oldest(self, key: Key | None, extra: bytes) -> StoredEntry | None:
        """The oldest entry that matches: it begins with the key, or is a prefix of it. Without a key, any
        entry.
        """
        if key == ():
            return None
        found = [self._index.get((extra, key or (), False), {})]
        found += [self._index.get((extra, key[:end], True), {}) for end in range(1, len(key))] if key else []
        free = [next((each for each in of.values() if not each.num_users), None) for of in found]
        return min((stored for stored in free if stored), key=lambda it: it.entry_id, default=None)

    def _find_longest(self, key: Key, extra: bytes) -> tuple[int, StoredEntry | None]:
        """The number of shared tokens, and the entry that shares them."""
        for end in range(len(key), 0, -1):
            for stored in self._index.get((extra, key[:end], False), {}).values():
                if not stored.is_taken:
                    return end, stored
        return 0, None

    @staticmethod
    def _index_keys(stored: StoredEntry) -> Iterator[tuple[bytes, Key, bool]]:
        yield stored.extra, stored.key, True
        for end in range(len(stored.key) + 1):
            yield stored.extra, stored.key[:end], False

    def _add(self, stored: StoredEntry) -> None:
        self._used_bytes += stored.nbytes
        self._entries[stored.entry_id] = stored
        for key in self._index_keys(stored):
            self._index[key][stored.entry_id] = stored
        self._changed.notify_all()

    def _remove(self, stored: StoredEntry) -> None:
        """Make it unavailable. Its bytes are free when it has no user."""
        del self._entries[stored.entry_id]
        for key in self._index_keys(stored):
            del self._index[key][stored.entry_id]
            if not self._index[key]:
                del self._index[key]
        stored.is_removed = True
        self._used_bytes -= 0 if stored.num_users else stored.nbytes
        self._changed.notify_all()

    # -- remote ends, and the end --------------------------------------------------------------

    def attach(self, signal: Pipe, data: Pipe) -> None:
        import torch

        client = AttachedClient(self, signal, data)
        with self._changed:
            self._check_open()
            _clients[client.number] = client
        try:
            signal.send_tensor(torch.tensor(client.number))
        except BaseException:
            client.end()
            raise

    def wake(self) -> None:
        """Have all calls that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            is_idle = lambda: not any(stored.num_users for stored in self._entries.values())  # noqa: E731
            self._changed.wait_for(is_idle, deadline.remaining())
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            for stored in list(self._entries.values()):
                self._remove(stored)
            self._changed.notify_all()
        for client in [client for client in list(_clients.values()) if client.store is self]:
            client.end()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._closed = True


# -- the end that reaches it -----------------------------------------------------------------------


@attrs.frozen(eq=False)
class AttachedClient:
    """The store's record of a remote end: the store's ends of the two pipes."""

    store: MemoryStore
    signal: Pipe
    data: Pipe
    number: int = attrs.field(factory=lambda: secrets.randbits(62))

    def end(self) -> None:
        """End at once. Idempotent."""
        _clients.pop(self.number, None)
        self.store.wake()
        self.signal.abort()
        self.data.abort()


_clients: Final[dict[int, AttachedClient]] = {}


class MemoryRemoteStore(MemoryLookupBuffer):
    """The end that reaches a store. Its methods may be called from several threads at once."""

    def __init__(self, signal: Pipe, data: Pipe, *, timeout_s: float) -> None:
        self._signal, self._data = signal, data
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards the client and how this end has ended
        self._client: AttachedClient | None = None
        self._lifecycle = Lifecycle(f"the lookup store at {signal.peer}")
        self._transfers = threading.Lock()
        self._num_unread = 0
        """Messages on the data pipe that a call did not receive in time. Guarded by the lock of transfers."""
        close_after_fork(self)
        self._thread = BackgroundThread(self._watch, name="kvplug-memory-lookup", stop=self.abort)
        with NamedExhaustion("reaching a lookup store"):
            self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._lifecycle.ended

    def insert(self, *given: Any, **more: Any) -> int:
        self._check()
        raise UnsupportedError("entries are inserted at the end that holds them")

    @contextmanager
    def _store_for_call(self, deadline: Deadline) -> Iterator[MemoryStore]:
        """The store. If this end ends during the call, the call raises this end's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._client or self.is_lost, deadline.remaining())
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

    def _received(self, stored: StoredEntry, wanted: Wanted, deadline: Deadline) -> Entry:
        left = deadline.remaining()
        if not self._transfers.acquire(timeout=-1 if left is None else left):
            raise TimeoutError("another call's entry was still in transfer")
        try:
            tokens, rest = self._transfer(stored, deadline)
            self._check()  # the signal pipe may have broken in the meantime
            entry = decoded(tokens, b"" if rest is None else memory_of(rest))
            if not wanted(key_under(entry.tokens, entry.roi)):
                raise WireError(f"an entry for other tokens came from the store at {self._signal.peer}")
            return entry
        except (TimeoutError, ResourceExhaustedError):
            raise
        except KvplugError as e:
            self._lose(f"no entry comes from it: {e}")
            raise
        finally:
            self._transfers.release()

    def _transfer(self, stored: StoredEntry, deadline: Deadline) -> list[Tensor | None]:
        """Send and receive one message after the other: a pipe always has capacity for one."""
        import torch

        assert self._client is not None
        while self._num_unread:
            self._receive(deadline)
        received = []
        for message in (stored.tokens, torch.frombuffer(bytearray(stored.rest), dtype=torch.uint8)):
            self._client.data.send_tensor(message, timeout=deadline.remaining())
            self._num_unread += 1
            received.append(self._receive(deadline))
        return received

    def _receive(self, deadline: Deadline) -> Tensor | None:
        received = self._data.recv_tensor(timeout=deadline.remaining())
        self._num_unread -= 1
        return received

    def _check(self) -> None:
        if self.is_lost:
            raise self._lifecycle.error()
        if self._signal.closed:  # the watching thread will notice this soon
            raise PeerGoneError("the signal pipe is closed")

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
        self._lose("it is gone")

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining())

    def abort(self) -> None:
        self._lifecycle.close("is closed at this end")
        self._end()

    def _lose(self, reason: str) -> None:
        self._lifecycle.lose_peer(reason)
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._signal.abort()
        self._data.abort()
        if self._client is not None:
            self._client.end()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        self._lifecycle.after_fork()


class MemoryLookupEndpoint(LookupEndpoint):
    """The factory of the spec."""

    def __init__(self, context: LookupContext) -> None:
        self._context = context

    def hold(self) -> LookupStore:
        return MemoryStore(self._context)

    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        return MemoryRemoteStore(signal, data, timeout_s=self._context.timeout_s)
