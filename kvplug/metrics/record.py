"""The only instrumented place: a pipe that wraps a pipe, and stores that wrap a store."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe import PathReport, Pipe, Transfer
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.memory import PageBuffers
from kvplug.transport.store.results import MissReason, Presence, PutReason
from kvplug.transport.store.store import PageRequest, Store
from kvplug.transport.store.wrapper import StoreWrapper

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_J = TypeVar("_J", bound=Job[Any])


class RecordedPipe(Pipe):
    """Counts what passes through another pipe, and is otherwise that pipe.

    A send is timed from the call to the end of its transfer, a receive for as long as the call takes,
    so with the wait for the peer. Each failed transfer is counted once, with its reason. A receive
    that times out, meets a closed pipe or a peer that has closed its end, does not fit, or comes at the
    same time as another is no failed transfer: the message stays, or there is none, and the caller knows
    what that means.
    """

    def __init__(
        self,
        pipe: Pipe,
        stats: TransferStats,
        on_end: Callable[[bool], None] | None = None,
        watch: PathWatch | None = None,
    ) -> None:
        """``on_end(may_wait)`` is called once, when this end closes or aborts the pipe. ``watch`` measures
        the sends; ``None``: they are not compared with anything."""
        self.pipe = pipe
        """The pipe inside."""
        self.stats = stats
        """The figures of this pipe, and of others that share them."""
        self.watch = watch
        self._on_end = on_end

    def __repr__(self) -> str:
        return f"<recorded {self.pipe!r}>"

    @property
    def closed(self) -> bool:
        return self.pipe.closed

    @property
    def peer(self) -> str:
        return self.pipe.peer

    @property
    def route(self) -> str:
        return self.pipe.route

    def path_report(self) -> PathReport:
        return self.pipe.path_report()

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        return self._sent(lambda: self.pipe.send_tensor(tensor, timeout=timeout), lambda: _nbytes(tensor))

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        return self._received(lambda: self.pipe.recv_tensor(out, timeout=timeout), _nbytes)

    def send_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer:
        return self._sent(
            lambda: self.pipe.send_blocks(views, block_ids, timeout=timeout),
            lambda: _nbytes_of_blocks(views, block_ids),
        )

    def recv_blocks(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        on_layer: Callable[[int], None] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        self._received(
            lambda: self.pipe.recv_blocks(views, block_ids, on_layer=on_layer, timeout=timeout),
            lambda _: _nbytes_of_blocks(views, block_ids),
        )

    def _sent(self, send: Callable[[], Transfer], nbytes: Callable[[], int]) -> Transfer:
        watch = self.watch
        if watch is not None and watch.due:
            self._heed(watch)
        try:
            sent = nbytes()
        except Exception:  # these are no tensors: the pipe says so
            sent = 0
        started = time.perf_counter()
        sending = None if watch is None else watch.begins(sent, started)
        try:
            transfer = send()
        except BaseException as e:
            if watch is not None and sending is not None:
                watch.ends(sending, 0, time.perf_counter())
            if isinstance(e, Exception):
                self.stats.fail("send", reason_of(e))
            raise

        def count(ended: Transfer) -> None:
            error, now = ended.error(), time.perf_counter()
            if error is None:
                self.stats.record("send", sent, now - started)
            else:
                self.stats.fail("send", reason_of(error))
            if watch is not None and sending is not None:
                watch.ends(sending, sent if error is None else 0, now)

        transfer.add_done_callback(count)
        return transfer

    def _heed(self, watch: PathWatch) -> None:
        """Give the alarm of the path that is due; end the pipe if it is refused.

        Raises:
            SlowPathError: it is refused, now or since an earlier call.
        """
        refusal = watch.take_alarm()
        if refusal is not None:
            if not self.pipe.closed:
                self.stats.fail("send", reason_of(refusal))
                self.abort()
            raise refusal

    def _received(self, receive: Callable[[], _T], nbytes: Callable[[_T], int]) -> _T:
        if self.watch is not None and self.watch.due:
            self._heed(self.watch)
        started = time.perf_counter()
        try:
            received = receive()
        except (TimeoutError, ClosedError, TensorMismatchError, LayoutError, BusyError):
            raise
        except Exception as e:
            if not (isinstance(e, PeerGoneError) and e.closed):
                self.stats.fail("recv", reason_of(e))
            raise
        self.stats.record("recv", nbytes(received), time.perf_counter() - started)
        return received

    def limit_messages(self, nbytes: int) -> None:
        self.pipe.limit_messages(nbytes)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            self.pipe.close(timeout)
        finally:
            self._ended(may_wait=True)

    def abort(self) -> None:
        try:
            self.pipe.abort()
        finally:
            self._ended(may_wait=False)

    def _ended(self, *, may_wait: bool) -> None:
        if self.watch is not None and may_wait:
            self.watch.close()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(may_wait)


class RecordedStore(StoreWrapper):
    """Counts what passes into and out of another store, and is otherwise that store.

    Each page counts once, when its job is done, with the time since it was asked for.
    """

    def __init__(self, store: Store, stats: TransferStats) -> None:
        super().__init__(store)
        self._stats = stats

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        job = self.store.submit_lookup(keys, lease_s=lease_s, timeout=timeout)
        self._count("lookup", 0, job, _reason_of_presence)
        return job

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        job = self.store.submit_put(pages, timeout=timeout)
        self._count("put", pages.series.format.nbytes, job, _reason_itself)
        return job

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        job = self.store.submit_get(pages, timeout=timeout)
        self._count("get", pages.series.format.nbytes, job, _reason_itself)
        return job

    def _count(self, op: str, nbytes: int, job: Job[_T], reason_in: Callable[[_T], str | None]) -> None:
        started = time.perf_counter()

        def count(ended: Job[_T]) -> None:
            seconds = time.perf_counter() - started
            # most pages of a request have the same result
            for result, number in Counter(ended.results() or ()).items():
                reason = reason_in(result)
                if reason is None:
                    self._stats.record(op, nbytes, seconds, count=number)
                else:
                    self._stats.fail(op, reason, count=number)

        job.add_done_callback(count)


class MeasuredStore(StoreWrapper):
    """Measures the gets and puts of another store, and is otherwise that store until it is refused.

    In a store that is refused every page is absent, and gets and puts fail with the reason ``slow``.
    """

    def __init__(self, store: Store, watch: StoreWatch) -> None:
        super().__init__(store)
        self._watch = watch

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        if self._is_refused("get"):  # what cannot be loaded is not promised
            job: Job[Presence] = Job(len(keys), Deadline.after(0.0))
            job.set([Presence.ABSENT] * len(keys))
            return job
        return self.store.submit_lookup(keys, lease_s=lease_s, timeout=timeout)

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        if self._is_refused("put"):
            self.store.withdraw(pages.keys)
            if isinstance(pages.memory, PageBuffers):
                self.store.free(pages.memory)
            job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(0.0))
            job.set([PutReason.SLOW] * len(pages.keys))
            return job
        return self._measured("put", pages, lambda: self.store.submit_put(pages, timeout=timeout))

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        if self._is_refused("get"):
            job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(0.0))
            job.set([MissReason.SLOW] * len(pages.keys))
            return job
        return self._measured("get", pages, lambda: self.store.submit_get(pages, timeout=timeout))

    def _is_refused(self, op: StoreOp) -> bool:
        """Whether the store is too slow to be asked. A closed one raises that itself."""
        return self._watch.is_refused(op) and not self.store.is_lost

    def _measured(self, op: StoreOp, pages: PageRequest, submit: Callable[[], _J]) -> _J:
        watch, nbytes = self._watch, pages.series.format.nbytes
        shared = watch.begins(time.perf_counter())
        try:
            job = submit()
        except BaseException:
            watch.ends(op, shared, time.perf_counter(), nbytes, ())
            raise
        job.add_done_callback(
            lambda ended: watch.ends(op, shared, time.perf_counter(), nbytes, ended.results() or ())
        )
        return job

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            super().close(timeout)
        finally:
            self._watch.close()


def _reason_of_presence(found: Presence) -> str | None:
    return None if found is Presence.HELD else "absent"


def _reason_itself(reason: str | None) -> str | None:
    return reason


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


def _nbytes_of_blocks(views: BlockViews | Sequence[Tensor], block_ids: Sequence[int]) -> int:
    flat: Any = [view for layer in views for view in layer] if isinstance(views, BlockViews) else views
    view = flat[0]
    nbytes: int = len(flat) * len(block_ids) * math.prod(view.shape[1:]) * view.dtype.itemsize
    return nbytes
