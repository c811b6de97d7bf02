"""Serves one reaching end over its two pipes.

There are two threads. One reads requests from the signal pipe and never waits for anything else, so it
handles a ``match`` or a ``Cancel`` while an entry is being sent. The other sends entries one by one; only
this thread is delayed by a slow consumer.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable

import attrs

from kvplug import ClosedError, KvplugError, ResourceExhaustedError, TimeoutError, UnsupportedError
from kvplug.engine import EntryGoneError
from kvplug.transport import BackgroundThread, Deadline, NamedExhaustion, Pipe, Transfer, WireError
from kvplug_lookup.buffer.entries import Entries, HeldEntry, Lease, Waiter
from kvplug_lookup.buffer.messages import (
    MAX_SIGNAL_BYTES,
    Cancel,
    Coming,
    Done,
    End,
    Failed,
    Granted,
    Match,
    Matched,
    Message,
    Read,
    Take,
    deadline_lock,
    key_from_bytes,
    key_to_bytes,
    pack,
    part_of,
    stream_of,
    unpack,
)

_log = logging.getLogger(__name__)

_GRACE_S = 2.0
"""How much a lease outlives its call: the caller's clock started a little earlier."""

MAX_CALLS = 1024
"""Limit on open requests of one reaching end."""

_numbers = itertools.count(1)


@attrs.define(eq=False)
class _Call:
    """A request that has not ended."""

    number: int
    expires: Deadline
    waiter: Waiter | None = None
    to_read: Lease | None = None
    cancelled: bool = False

    @property
    def lease(self) -> Lease | None:
        """Its lease, if it has got one."""
        return self.waiter.lease if self.waiter is not None else self.to_read


class Session:
    """Serves one reaching end."""

    def __init__(
        self, entries: Entries, signal: Pipe, data: Pipe, *, on_end: Callable[[Session], None]
    ) -> None:
        self._entries = entries
        self._signal = signal
        self._data = data
        self._on_end = on_end
        signal.limit_messages(MAX_SIGNAL_BYTES)
        data.limit_messages(0)  # nothing is received there
        self._number = next(_numbers)
        self._name = f"{self._number}: {signal.peer}"
        self._sending = threading.Lock()
        self._calls: dict[int, _Call] = {}  # touched by the requests thread only
        self._outbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            BackgroundThread(run, name=f"kvplug-lookup-{what}-{self._number}", stop=self.abort)
            for run, what in ((self._deliver, "deliver"), (self._take_requests, "requests"))
        ]

    @NamedExhaustion("serving an end of a lookup buffer")
    def start(self) -> None:
        """Raises ResourceExhaustedError before anything is read from the pipes."""
        for thread in self._threads:
            try:
                thread.start()
            except BaseException:
                self._outbox.put(None)
                raise

    def close(self, deadline: Deadline) -> None:
        """Send the end signal, and close the pipes."""
        try:
            self._send_message(End(), deadline)
        except KvplugError as e:
            _log.debug("could not send the end signal to %s: %s", self._name, e)
        self._signal.close(deadline.remaining())
        self._data.close(deadline.remaining())

    def abort(self) -> None:
        """Close the pipes at once. The threads then end by themselves."""
        self._signal.abort()
        self._data.abort()

    def join(self, deadline: Deadline) -> bool:
        """Return whether both threads ended before the deadline."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in self._threads)

    # -- the thread that takes requests --------------------------------------------------------

    def _take_requests(self) -> None:
        try:
            while True:
                next_end = min((call.expires.at for call in self._calls.values()), default=math.inf)
                try:
                    message = unpack(self._signal.recv_tensor(timeout=Deadline(next_end).remaining()))
                except TimeoutError:
                    message = None
                for call in [call for call in self._calls.values() if call.expires.expired]:
                    _log.warning("%s did not end call %d in time", self._name, call.number)
                    self._cancel(call)
                if isinstance(message, End):
                    break
                if message is not None:
                    self._serve(message)
        except (WireError, ResourceExhaustedError) as e:
            _log.warning("%s is no longer served: %s", self._name, e)
        except KvplugError as e:
            _log.debug("%s is gone: %s", self._name, e)
        except Exception:
            _log.exception("%s is no longer served", self._name)
        finally:
            self.abort()
            for call in list(self._calls.values()):
                self._cancel(call)
            self._outbox.put(None)
            self._on_end(self)

    def _serve(self, message: Message) -> None:
        match message:
            case Match(number, key, extra):
                try:
                    num_tokens = self._entries.match(key_from_bytes(key), extra)
                except ClosedError as e:
                    self._fail(number, e)
                else:
                    self._send_message(Matched(number, num_tokens))
            case Take(number, key_or_any, extra, timeout):
                call = self._begin(number, timeout)
                call.waiter = Waiter(
                    key=None if key_or_any is None else key_from_bytes(key_or_any),
                    extra=extra,
                    wake=lambda waiter: self._outbox.put(call),
                )
                try:
                    self._entries.take(call.waiter)
                except ClosedError as e:
                    self._fail(number, e)
            case Read(number, key, extra, min_tokens, timeout):
                call = self._begin(number, timeout)
                try:
                    call.to_read = self._entries.read(key_from_bytes(key), extra, min_tokens)
                except ClosedError as e:
                    self._fail(number, e)
                    return
                if call.to_read is None:
                    del self._calls[number]
                    self._fail(number, EntryGoneError("no entry shares enough tokens"))
                else:
                    self._outbox.put(call)
            case Done(number):
                self._end(number)
            case Cancel(number):
                if number in self._calls:
                    self._cancel(self._calls[number])
            case _:
                raise WireError(f"a reaching end must not send {type(message).__name__}")

    def _begin(self, number: int, timeout: float | None) -> _Call:
        if number in self._calls:
            raise WireError(f"call {number} is already open")
        if len(self._calls) >= MAX_CALLS:
            raise WireError(f"more than {MAX_CALLS} calls are open")
        deadline = Deadline.after(None if timeout is None else timeout + _GRACE_S)
        call = self._calls[number] = _Call(number, deadline)
        return call

    def _end(self, number: int) -> None:
        """End a call whose caller has received everything."""
        call = self._calls.pop(number, None)
        lease = None if call is None else call.lease
        if lease is None:
            self._send_message(Granted(number, False))
            return
        ended = self._entries.end(lease, taken=lease.is_exclusive)
        if lease.is_exclusive:
            self._send_message(Granted(number, ended))

    def _cancel(self, call: _Call) -> None:
        self._calls.pop(call.number, None)
        call.cancelled = True
        lease = call.to_read if call.waiter is None else self._entries.withdraw(call.waiter)
        if lease is not None:
            self._entries.end(lease)

    # -- the thread that sends entries ---------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while (call := self._outbox.get()) is not None:
                lease = call.lease
                if lease is not None:
                    self._send(call, lease)
                elif call.waiter is not None and call.waiter.error is not None:
                    self._fail(call.number, call.waiter.error)
        except ResourceExhaustedError as e:
            _log.warning("%s is no longer served: %s", self._name, e)
        except KvplugError as e:
            _log.debug("stopped sending entries to %s: %s", self._name, e)
        except Exception:
            _log.exception("stopped sending entries to %s", self._name)
        else:
            return  # the other thread has ended, or could not be started
        self.abort()  # the other thread ends too, and takes the leases back

    def _send(self, call: _Call, lease: Lease) -> None:
        if not self._entries.begin_use(lease):
            return  # already cancelled
        entry = lease.entry
        try:
            try:
                coming = pack(_announce(call.number, entry))
            except KvplugError as e:
                self._entries.end(lease)
                self._fail(call.number, e)
                return
            try:
                with self._sending:
                    self._signal.send_tensor(coming, timeout=None)
            except ResourceExhaustedError as e:
                self._entries.end(lease)
                self._fail(call.number, e)
                return
            for part in stream_of(entry.key, entry.value, entry.hidden):
                if call.cancelled:
                    self._data.send_tensor(None, timeout=None)
                    return
                try:
                    transfer = self._data.send_tensor(part, timeout=None)
                except (UnsupportedError, ResourceExhaustedError) as e:
                    self._entries.end(lease)
                    self._data.send_tensor(None, timeout=None)
                    self._fail(call.number, e)
                    return
                self._entries.add_user(entry)
                transfer.add_done_callback(lambda ended: self._sent(entry, ended))
        finally:
            self._entries.remove_user(entry)

    def _sent(self, entry: HeldEntry, transfer: Transfer) -> None:
        self._entries.remove_user(entry)
        if transfer.error() is not None:
            self.abort()

    # -- both ----------------------------------------------------------------------------------

    def _fail(self, number: int, error: KvplugError) -> None:
        lacks = error.resource if isinstance(error, ResourceExhaustedError) else ""
        self._send_message(Failed(number, type(error).__name__, str(error), lacks))

    def _send_message(self, message: Message, deadline: Deadline | None = None) -> None:
        tensor = pack(message)
        deadline = deadline or Deadline.after(None)
        with deadline_lock(self._sending, deadline):
            self._signal.send_tensor(tensor, timeout=deadline.remaining())


def _announce(number: int, entry: HeldEntry) -> Coming:
    header = entry.header
    return Coming(
        number,
        entry.entry_id,
        entry.extra,
        key_to_bytes(header.tokens.numpy()),
        header.roi.numpy().tobytes(),
        header.metadata,
        part_of(entry.key),
        part_of(entry.value),
        part_of(entry.hidden),
    )
