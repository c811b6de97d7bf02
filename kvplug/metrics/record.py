"""Counts and measures the traffic of pipes and stores, which contain no instrumentation."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from kvplug.errors import (
    BusyError,
    ClosedError,
    LayoutError,
    PeerGoneError,
    TensorMismatchError,
    TimeoutError,
)
from kvplug.metrics.rate import PathWatch, StoreOp, StoreWatch
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.stats import TransferStats
from kvplug.transport.pipe import Pipe, Transfer
from kvplug.transport.store.job import Job
from kvplug.transport.store.results import Presence

_T = TypeVar("_T")
_J = TypeVar("_J", bound=Job[Any])


class PipeRecorder:
    """Counts the messages through one pipe, and measures its sends.

    A send is timed from the call to the end of its transfer. A receive is timed for the duration of the call,
    including the wait for the peer. Each failed transfer is counted once, with its reason. A receive does not
    count as failed if it times out, the pipe or the peer's end is closed, the message does not fit, or
    another receive is running: no message is lost, and the caller can interpret the error.
    """

    def __init__(
        self,
        stats: TransferStats,
        on_end: Callable[[bool], object] | None = None,
        watch: PathWatch | None = None,
    ) -> None:
        """``on_end(may_wait)`` is called once, when this end closes or aborts the pipe. ``watch`` measures
        the sends; ``None``: the sends are not measured."""
        self.stats = stats
        """The counters of this pipe; other pipes may share them."""
        self.watch = watch
        self._lock = threading.Lock()
        self.sent_bytes = self.received_bytes = 0
        """Bytes of the messages that this pipe has moved."""
        self._on_end = on_end

    def sent(self, pipe: Pipe, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        """Send a message, and count it when its transfer ends."""
        watch = self.watch
        if watch is not None and watch.due:
            self._give_alarm(pipe, watch)
        try:
            sent = nbytes()
        except Exception:  # not tensors: the pipe will raise the error
            sent = 0
        started = time.perf_counter()
        sending = None if watch is None else watch.begin(sent, started)

        def count(ended: Transfer) -> None:
            error, now = ended.error(), time.perf_counter()
            if error is None:
                self.stats.record("send", sent, now - started)
                with self._lock:  # transfers may end in several threads at once
                    self.sent_bytes += sent
            else:
                self.stats.fail("send", reason_of(error))
            if sending is not None and watch is not None:
                watch.end(sending, sent if error is None else 0, now)

        try:
            transfer = send()
        except BaseException as e:
            if isinstance(e, Exception):
                self.stats.fail("send", reason_of(e))
            if sending is not None and watch is not None:
                watch.end(sending, 0, time.perf_counter())
            raise
        transfer.add_done_callback(count)
        return transfer

    def received(self, pipe: Pipe, receive: Callable[[], _T], nbytes: Callable[[_T], int]) -> _T:
        """Receive a message, and count it."""
        if self.watch is not None and self.watch.due:
            self._give_alarm(pipe, self.watch)
        started = time.perf_counter()
        try:
            received = receive()
        except (TimeoutError, ClosedError, TensorMismatchError, LayoutError, BusyError):
            raise
        except Exception as e:
            if not (isinstance(e, PeerGoneError) and e.closed):
                self.stats.fail("recv", reason_of(e))
            raise
        size = nbytes(received)
        self.stats.record("recv", size, time.perf_counter() - started)
        with self._lock:
            self.received_bytes += size
        return received

    def _give_alarm(self, pipe: Pipe, watch: PathWatch) -> None:
        """Report the alarm that is due for the path, and abort the pipe if it is refused.

        Raises:
            SlowPathError: the pipe is refused, now or since an earlier call.
        """
        refusal = watch.take_alarm()
        if refusal is not None:
            if not pipe.closed:
                self.stats.fail("send", reason_of(refusal))
                pipe.abort()
            raise refusal

    def ended(self, *, may_wait: bool) -> None:
        """Note that this end was closed, or, if ``may_wait`` is false, aborted."""
        if self.watch is not None and may_wait:
            self.watch.close()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(may_wait)


class StoreRecorder:
    """Counts the requests to one store, and measures its gets and puts.

    Each page counts once, when its job is done, with the time since the request.
    """

    def __init__(self, stats: TransferStats, watch: StoreWatch | None) -> None:
        """``watch`` measures the gets and puts; ``None``: they are not measured."""
        self.stats = stats
        """The counters of this store; other stores may share them."""
        self._watch = watch

    def refuses(self, op: StoreOp) -> bool:
        """Whether ``op`` is refused now, because the store is too slow. Reports an alarm that is due."""
        return self._watch is not None and self._watch.is_refused(op)

    def record(self, op: Literal["lookup", "get", "put"], page_nbytes: int, submit: Callable[[], _J]) -> _J:
        """Submit the request, and count its results when its job is done."""
        started = time.perf_counter()
        watch = None if op == "lookup" else self._watch
        shared = 0.0 if watch is None else watch.begin(started)

        def count(results: Sequence[Any], failure: str | None = None) -> None:
            now = time.perf_counter()
            if watch is not None and op != "lookup":
                watch.end(op, shared, now, page_nbytes, results)
            # most pages of a request have the same result
            for result, number in Counter(results).items():
                reason = result
                if op == "lookup":
                    reason = None if result is Presence.HELD else failure or "absent"
                if reason is None:
                    self.stats.record(op, page_nbytes, now - started, count=number)
                else:
                    self.stats.fail(op, reason, count=number)

        try:
            job = submit()
        except BaseException:
            count(())
            raise
        job.add_done_callback(lambda ended: count(ended.results() or (), ended.failure))
        return job

    def close(self) -> None:
        """Report the alarms that are due when the store closes."""
        if self._watch is not None:
            self._watch.close()
