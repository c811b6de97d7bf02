"""The operations of a communicator that the device has not done: in order, monitored, and aborted on failure.

All are on one stream. An operation begins after what the caller's current stream was given before the call,
and what that stream is given next comes after the operation. Without running ahead a call polls its operation
until it is done. With it a call returns once its operation is on the stream, and a thread polls those that
are left.

After any failure the communicator is aborted first: nothing else ends the kernels of an operation in which a
rank is missing. The work that is queued behind an aborted operation then runs, with whatever is in memory. So
an aborted operation never counts as done, and its error is kept for the next call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import (
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import BackgroundThread, Deadline, Mesh, NamedExhaustion
from kvplug_pynccl.device import Device
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.errors import (
    NcclCudaError,
    NcclInternalError,
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclSystemError,
)
from kvplug_pynccl.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Call = Callable[[int, int], object]
"""A function of NCCL, all but its last arguments: an ``ncclComm`` and a stream."""

_CHECK_RANKS_S: Final = 0.01
"""How often a call that waits checks that the other ranks are still there."""
_POLL_S: Final = 200e-6
"""An operation is polled for so long without a pause; most small ones are done by then."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_ABORT_WAIT_S: Final = 2.0
"""How long a call that failed waits for NCCL to release the caller's memory."""


_KINDS: Final[tuple[type[KvplugError], ...]] = (TimeoutError, PeerGoneError, ClosedError, TransportError)
_OWN: Final = (
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclCudaError,
    NcclSystemError,
    NcclInternalError,
)
"""Errors of the call, of NCCL itself, or of this rank's GPU or system. Those of other ranks are not among
them."""


@attrs.frozen(eq=False)
class _Pending:
    """One operation, and its deadline."""

    name: str
    operation: Operation
    deadline: Deadline
    among: Collection[int] | None
    """The ranks whose fault a failure may be; ``None``: all others."""

    @property
    def late(self) -> str:
        return f"{self.name} did not end in time"


class Inflight:
    """The operations of one communicator, which it aborts in the end.

    One thread at a time calls it, except for :meth:`abort` and :meth:`end`.
    """

    def __init__(self, comm: MonitoredCommunicator, mesh: Mesh, device: Device, run_ahead: int) -> None:
        """``run_ahead``: how many operations may be in flight when a call returns."""
        self._comm = comm
        self._mesh = mesh
        self._device = device
        self._run_ahead = run_ahead
        self._stream = device.new_stream()
        self._pending: deque[_Pending] = deque()
        self._ranks_checked_at = 0.0
        self._failure: Callable[[], KvplugError] | None = None
        """What the thread has found. Not an exception: its traceback would keep tensors alive."""
        self._ended = False
        self._lock = threading.Lock()
        """Of mesh and operations: the thread polls while no call does."""
        self._has_pending = threading.Event()
        """A call has left an operation in flight."""
        self._thread: BackgroundThread | None = None

    @contextlib.contextmanager
    def exclusive_mesh(self) -> Iterator[Mesh]:
        """The mesh, for an exchange with the other ranks; the thread does not use it meanwhile."""
        with self._lock:
            yield self._mesh

    def wait_until_settled(
        self,
        deadline: Deadline,
        late: str,
        explain: Callable[[NcclInvalidUsageError], NcclInvalidUsageError],
    ) -> None:
        """Wait until the communicator has completed its last call that was not an operation.

        ``explain`` makes the error that is raised, and sent to the other ranks, from NCCL's.

        Raises:
            TimeoutError: names the ranks that do not answer; ``late`` if all do.
            The rest as :meth:`run`.
        """
        with self._lock, self._guarded(None):
            try:
                self._poll(self._comm.is_settled, deadline, late)
            except NcclInvalidUsageError as e:
                raise explain(e) from e

    def run(
        self,
        name: str,
        calls: Sequence[Call],
        tensors: Sequence[Tensor],
        deadline: Deadline,
        among: Collection[int] | None = None,
    ) -> None:
        """Do ``calls`` as one operation. What the caller's current stream is given next comes after it.

        Raises:
            TimeoutError, PeerGoneError: names the ranks; also of an operation that was in flight before.
            NcclError, TransportError: NCCL or the device failed.
            ClosedError: :meth:`end` was called.
        """
        handle = self._stream.handle
        bound = [lambda comm, call=call: call(comm, handle) for call in calls]
        with self._lock:
            self.check()
            ready = self._device.now()
            operation = Operation(self._comm, self._device, self._stream, bound, tensors, ready)
            pending = _Pending(name, operation, deadline, among)
            self._pending.append(pending)
            with self._guarded(among):
                self._check_ranks()
                self._poll(lambda: operation.step() or operation.done is not None, deadline, pending.late)
            assert operation.done is not None
            self._device.queue_after(operation.done)
            self._wait(self._run_ahead, deadline)
            if self._pending:
                self._monitor()

    def drain(self, deadline: Deadline) -> None:
        """Wait until no operation is in flight. Raises as :meth:`run`."""
        with self._lock:
            self.check()
            self._wait(0, deadline)

    def suspend(self, deadline: Deadline) -> None:
        """Release memory of the device; no operation is in flight. Raises as :meth:`run`."""
        with self._lock, self._guarded(None):
            self._poll(self._comm.is_settled, deadline, "NCCL was still at work")
            self._comm.suspend()

    def resume(self, deadline: Deadline) -> None:
        """Allocate that memory again. Raises as :meth:`run`."""
        late = "NCCL did not allocate its memory again in time"
        with self._lock, self._guarded(None):
            self._poll(self._comm.is_settled, deadline, late)
            self._comm.resume()
            self._poll(self._comm.is_settled, deadline, late)

    def check(self) -> None:
        """Raise the error of an operation that a call left in flight."""
        if self._failure is not None:
            raise self._failure()

    def abort(self) -> threading.Event:
        """End all operations, and begin none; the event is set once NCCL has released them. Idempotent."""
        return self._comm.abort(list(self._pending))

    def end(self) -> None:
        """As :meth:`abort`; a call that waits raises ClosedError. Idempotent, does not block."""
        self._ended = True
        self._has_pending.set()
        self.abort()
        self._stream.close()

    # -- with the lock -----------------------------------------------------------------------------

    def _wait(self, left: int, within: Deadline) -> None:
        """Wait until at most ``left`` are in flight: for each until its own deadline, and ``within``."""
        while len(self._pending) > left:
            oldest = self._pending[0]
            deadline = oldest.deadline if oldest.deadline.at < within.at else within
            with self._guarded(oldest.among):
                self._poll(lambda oldest=oldest: self._is_done(oldest), deadline, oldest.late)  # type: ignore[misc]
            self._pending.popleft()

    def _is_done(self, pending: _Pending) -> bool:
        """Whether it is done, and its result is right: the event of one that was aborted comes, too."""
        if not pending.operation.step():
            return False
        self._comm.is_settled()
        if self._comm.is_aborted:
            raise ClosedError(f"{pending.name} was aborted")
        return True

    def _poll(self, done: Callable[[], bool], deadline: Deadline, late: str) -> None:
        began = time.monotonic()
        pause = _SHORTEST_PAUSE_S
        while not done():
            if self._ended:
                raise ClosedError("it was destroyed during the call")
            self._check_ranks()
            if deadline.expired:
                raise TimeoutError(late)
            if time.monotonic() - began > _POLL_S:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _check_ranks(self) -> None:
        """Raise if a rank is gone, or has given up. Looks at most every ``_CHECK_RANKS_S``."""
        now = time.monotonic()
        if now - self._ranks_checked_at >= _CHECK_RANKS_S:
            self._ranks_checked_at = now
            self._mesh.check()

    @contextlib.contextmanager
    def _guarded(self, among: Collection[int] | None) -> Iterator[None]:
        """After a failure: abort, find out with the other ranks whose fault it is, and wait until NCCL has
        released the caller's memory.
        """
        try:
            with self._mesh.diagnose(among, own=_OWN):
                try:
                    yield
                except BaseException:
                    self.abort()
                    raise
        except BaseException:
            if self.abort().wait(_ABORT_WAIT_S):
                self._pending.clear()
            else:
                logger.error(
                    "NCCL does not end what was aborted: it may still write to the tensors of a call"
                )
            raise

    # -- the thread, for what calls have left in flight ----------------------------------------------

    def _monitor(self) -> None:
        self._has_pending.set()
        if self._thread is None:
            thread = BackgroundThread(self._run, name="kvplug-pynccl-watch", stop=self.end)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while self._has_pending.wait() and not self._ended and self._failure is None:
            if self._lock.acquire(blocking=False):  # else a call polls
                try:
                    self._check_pending()
                finally:
                    self._lock.release()
            time.sleep(_CHECK_RANKS_S)

    def _check_pending(self) -> None:
        try:
            while self._pending:
                oldest = self._pending[0]
                with self._guarded(oldest.among), self._device.current():
                    if not self._is_done(oldest):
                        self._check_ranks()
                        if oldest.deadline.expired:
                            raise TimeoutError(oldest.late)
                        return
                self._pending.popleft()
            self._has_pending.clear()
        except KvplugError as e:
            kind = next((kind for kind in _KINDS if isinstance(e, kind)), TransportError)
            self._failure = functools.partial(kind, str(e))
            if shortage := NamedExhaustion.of(e):
                text = str(shortage)
                self._failure = functools.partial(ResourceExhaustedError, text, resource=shortage.resource)
            self._mesh.give_up(e)
            if not self._ended:
                logger.warning("a collective that was in flight failed, and its results are void: %s", e)
