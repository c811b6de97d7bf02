"""Serves one reaching end over its two pipes.

There are two threads. One reads requests from the signal pipe and never waits for anything else, so it
handles a ``match`` or a ``Cancel`` while an entry is being sent. The other announces and sends entries one by
one; only this thread is delayed by a slow consumer.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs

from kvplug import (
    CapacityError,
    ClosedError,
    KvplugError,
    ResourceExhaustedError,
    TimeoutError,
    UnsupportedError,
)
from kvplug.transport import BackgroundThread, Deadline, NamedExhaustion, Pipe, Transfer, WireError
from kvplug_lookup.buffer import messages
from kvplug_lookup.buffer.entries import Entries, HeldEntry, Lease
from kvplug_lookup.buffer.entry import tensors_of
from kvplug_lookup.buffer.messages import PipePair

_log = logging.getLogger(__name__)

_GRACE_S = 2.0
"""How much a lease outlives its call: the caller's clock started a little earlier."""

MAX_CALLS = 1024
"""Limit on open requests of one reaching end."""

_MAX_UNSENT = 2 * MAX_CALLS
"""Limit on announcements and entries that wait for the thread that sends them."""

_T = TypeVar("_T")

_NEVER = Deadline.after(None)
_numbers = itertools.count(1)


@attrs.define(eq=False)
class _Call:
    """A request for an entry, until the reaching end ends it."""

    expires: Deadline
    """When its lease ends in any case."""
    lease: Lease
    is_sent: bool = False
    """The reaching end has asked for the tensors."""


class Session:
    """Serves one reaching end."""

    def __init__(
        self, entries: Entries, signal: Pipe, data: Pipe, *, on_end: Callable[[Session], None]
    ) -> None:
        self._entries = entries
        self._pipes = PipePair(signal, data)
        self._on_end = on_end
        number = next(_numbers)
        self._name = f"{number}: {signal.peer}"
        self._calls: dict[int, _Call] = {}  # touched by the requests thread only
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._serving = threading.Lock()
        """Held while a request is served."""
        self._threads = [
            BackgroundThread(run, name=f"kvplug-lookup-{what}-{number}", stop=self.abort)
            for run, what in ((self._deliver_entries, "deliver"), (self._serve_requests, "requests"))
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
        """Send the end signal after the answer to the current request, and close the pipes."""
        remaining = deadline.remaining()
        if self._serving.acquire(timeout=-1 if remaining is None else remaining):
            self._serving.release()
        self._pipes.close(deadline)

    def abort(self) -> None:
        """Close the pipes at once. The threads then end by themselves."""
        self._pipes.abort()

    def join(self, deadline: Deadline) -> None:
        """Wait until both threads have ended, or the deadline."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def _run(self, work: Callable[[], None]) -> None:
        """Run a thread's work. If it fails, the other thread ends too."""
        try:
            work()
            return
        except (WireError, ResourceExhaustedError) as e:
            _log.warning("%s is no longer served: %s", self._name, e)
        except KvplugError as e:
            _log.debug("%s is gone: %s", self._name, e)
        except Exception:
            _log.exception("%s is no longer served", self._name)
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the pipes at once, unless this end closes them: then what was sent still has to arrive."""
        if not self._pipes.signal.closed:
            self.abort()

    def _send(self, message: messages.Message) -> None:
        self._pipes.send(message, _NEVER)

    # -- the thread that takes requests --------------------------------------------------------

    def _serve_requests(self) -> None:
        try:
            self._run(self._take_requests)
        finally:
            self._hang_up()
            for call in self._calls.values():
                self._entries.end(call.lease)
            self._outbox.put(None)
            self._on_end(self)

    def _take_requests(self) -> None:
        while not isinstance(message := self._ending_late_calls(self._pipes.receive), messages.End):
            with self._serving:
                self._serve(message)

    def _answer(self, message: messages.Answer) -> None:
        self._ending_late_calls(partial(self._pipes.send, message))

    def _ending_late_calls(self, step: Callable[[Deadline], _T]) -> _T:
        """Receive or send, however long the other end takes. End the leases of calls whose time is over
        meanwhile."""
        while True:
            next_end = min((call.expires.at for call in self._calls.values()), default=math.inf)
            try:
                return step(Deadline(next_end))
            except TimeoutError:
                pass
            finally:
                for number, call in self._calls.items():
                    if call.expires.expired:
                        _log.warning("%s did not end call %d in time", self._name, number)
                        call.expires = _NEVER
                        self._entries.end(call.lease)

    def _serve(self, message: messages.Message) -> None:
        match message:
            case messages.Match(number, query):
                try:
                    num_tokens = self._entries.match(query)
                except ClosedError as e:
                    self._answer(messages.Failed.of(number, e))
                else:
                    self._answer(messages.Matched(number, num_tokens))
            case messages.Find(number, query, timeout):
                if number in self._calls:
                    raise WireError(f"call {number} is already open")
                if len(self._calls) >= MAX_CALLS:
                    raise WireError(f"more than {MAX_CALLS} calls are open")
                if self._outbox.qsize() >= _MAX_UNSENT:  # most are of calls that were cancelled meanwhile
                    late = TimeoutError("entries of earlier calls are still being sent")
                    self._answer(messages.Failed.of(number, late))
                    return
                expires = Deadline.after(None if timeout is None else timeout + _GRACE_S)
                lease = self._entries.find(
                    query, lambda lease: self._outbox.put(partial(self._announce, number, lease))
                )
                self._calls[number] = _Call(expires, lease)
            case messages.Send(number):
                call = self._call(number)
                if call.is_sent or (call.lease.entry is None and not call.lease.is_over):
                    raise WireError(f"call {number} has no entry to send")
                call.is_sent = True
                self._outbox.put(partial(self._deliver, number, call.lease))
            case messages.Done(number):
                lease = self._call(number).lease
                del self._calls[number]
                is_yours = self._entries.end(lease, taken=True)
                if lease.is_exclusive:
                    self._answer(messages.Granted(number, is_yours))
            case messages.Cancel(number):
                if number in self._calls:  # its request may not have been sent
                    self._entries.end(self._calls.pop(number).lease)
            case _:
                raise WireError(f"a reaching end must not send {type(message).__name__}")

    def _call(self, number: int) -> _Call:
        if number not in self._calls:
            raise WireError(f"call {number} is not open")
        return self._calls[number]

    # -- the thread that sends entries ---------------------------------------------------------

    def _deliver_entries(self) -> None:
        self._run(self._send_entries)

    def _send_entries(self) -> None:
        while (job := self._outbox.get()) is not None:
            job()

    def _announce(self, number: int, lease: Lease) -> None:
        """Send that an entry is ready for a call, or why it will not be."""
        entry = lease.entry
        try:
            if lease.error is not None:
                self._send(messages.Failed.of(number, lease.error))
            elif entry is not None:  # otherwise the call has been ended
                self._send(messages.Found(number, entry.entry_id, entry.description))
        except (UnsupportedError, CapacityError, ResourceExhaustedError) as e:
            self._entries.end(lease)
            self._send(messages.Failed.of(number, e))

    def _deliver(self, number: int, lease: Lease) -> None:
        """Send the tensors of an entry, or ``None`` instead of the rest."""
        try:
            if not self._send_all(lease):
                self._pipes.data.send_tensor(None, timeout=None)
        except (UnsupportedError, ResourceExhaustedError) as e:
            self._entries.end(lease)
            self._pipes.data.send_tensor(None, timeout=None)
            self._send(messages.Failed.of(number, e))

    def _send_all(self, lease: Lease) -> bool:
        """Return whether all tensors of the entry were sent before the end of the lease."""
        entry = lease.entry
        if entry is None:
            return False
        for part in tensors_of(entry.key, entry.value, entry.hidden):
            if not self._entries.add_user(lease):
                return False
            try:
                transfer = self._pipes.data.send_tensor(part, timeout=None)
            except BaseException:
                self._entries.remove_user(entry)
                raise
            transfer.add_done_callback(partial(self._sent, entry))
        return True

    def _sent(self, entry: HeldEntry, transfer: Transfer) -> None:
        self._entries.remove_user(entry)
        if transfer.error() is not None:
            self.abort()
