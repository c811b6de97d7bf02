"""What a communicator has under way on the device: launched in order, watched, and ended when it must be.

One stream for all. What an operation works on has been made by the caller's current stream, which is told to
go on after it. Without running ahead a call waits for its operation and looks after it meanwhile. With it a
call returns once its operation is on the stream, and a thread looks after those that are left.

Whatever goes wrong, the communicator is aborted before anything else is done: the kernels of an operation
whose ranks are not all there end by nothing else. An abort lets the streams go on, too, with whatever was in
memory. So nothing that was aborted is ever called done, and the error is kept for the next call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import Deadline, Mesh
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.errors import (
    NcclCudaError,
    NcclInternalError,
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclSystemError,
)
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.watched import Communicator

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Call = Callable[[int, int], object]
"""A function of NCCL, all but its last arguments: an ``ncclComm`` and a stream."""

_LOOK_S: Final = 0.01
"""How often whoever waits looks whether the other ranks are still there."""
_SPIN_S: Final = 200e-6
"""What is waited for is asked for so long without a pause; most small operations are over by then."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_ABORT_PATIENCE_S: Final = 2.0
"""How long a call that failed waits for NCCL to let go of the caller's memory."""


_KINDS: Final[tuple[type[KvplugError], ...]] = (TimeoutError, PeerGoneError, ClosedError, TransportError)
_OWN: Final = (
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclCudaError,
    NcclSystemError,
    NcclInternalError,
)
"""What NCCL says of the call, of itself, of this rank's GPU or system; it has another for other ranks."""


@attrs.frozen(eq=False)
class _Work:
    """One operation, and until when."""

    name: str
    operation: Operation
    deadline: Deadline
    among: Collection[int] | None
    """Whose fault it may be; ``None``: all others'."""


class Works:
    """The operations of one communicator, which it aborts in the end. One thread calls it at a time, but for
    ``abort`` and ``end``.
    """

    def __init__(self, comm: Communicator, mesh: Mesh, device: Device, run_ahead: int) -> None:
        """``run_ahead``: how many operations may be under way when a call returns."""
        self._comm = comm
        self._mesh = mesh
        self._device = device
        self._run_ahead = run_ahead
        self._stream = device.new_stream()
        self._under_way: deque[_Work] = deque()
        self._looked = 0.0
        self._failure: tuple[type[KvplugError], str] | None = None
        """What the thread has found. No exception is kept: its traceback would keep what was going on."""
        self._ended = False
        self._lock = threading.Lock()
        """Of mesh and operations: the thread looks when no call does."""
        self._left = threading.Event()
        """A call has left something under way."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def talking(self) -> Iterator[Mesh]:
        """The mesh, to ask the other ranks something."""
        with self._lock:
            yield self._mesh

    def settle(self, deadline: Deadline, late: str) -> None:
        """Wait until the communicator has done what was asked of it beside operations.

        Raises:
            TimeoutError: names the ranks that do not answer; if all do, it says ``late``.
            The rest as :meth:`run`.
        """
        with self._lock, self._guarded(None):
            self._until(self._comm.is_settled, deadline, late)

    def run(
        self,
        name: str,
        calls: Sequence[Call],
        tensors: Sequence[Tensor],
        deadline: Deadline,
        among: Collection[int] | None = None,
    ) -> None:
        """Do ``calls`` as one. What the caller's current stream is given next comes after them.

        Raises:
            TimeoutError, PeerGoneError: names the ranks; also of what was left under way before.
            NcclError, TransportError: NCCL or the device failed.
            ClosedError: ``end`` was called.
        """
        handle = self._stream.handle
        bound = [lambda comm, call=call: call(comm, handle) for call in calls]
        with self._lock:
            self.check()
            operation = Operation(self._comm, self._stream, bound, tensors, self._device.now())
            work = _Work(name, operation, deadline, among)
            self._under_way.append(work)
            with self._guarded(among):
                self._look()
                self._until(lambda: operation.step() or operation.event is not None, deadline, _late(work))
            assert operation.event is not None
            self._device.follow(operation.event)
            self._wait(self._run_ahead, deadline)
            if self._under_way:
                self._watch()

    def drain(self, deadline: Deadline) -> None:
        """Wait for all that is under way. Raises as :meth:`run`."""
        with self._lock:
            self.check()
            self._wait(0, deadline)

    def suspend(self, deadline: Deadline) -> None:
        """Give back memory of the device; nothing is under way. Raises as :meth:`run`."""
        with self._lock, self._guarded(None):
            self._until(self._comm.is_settled, deadline, "NCCL was still at work")
            self._comm.suspend()

    def resume(self, deadline: Deadline) -> None:
        """Take it up again. Raises as :meth:`run`."""
        late = "NCCL did not take its memory up again in time"
        with self._lock, self._guarded(None):
            self._until(self._comm.is_settled, deadline, late)
            self._comm.resume()
            self._until(self._comm.is_settled, deadline, late)

    def check(self) -> None:
        """Raises what has become of what was left under way."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)

    def abort(self) -> threading.Event:
        """End what is under way, begin nothing more; the event is set once NCCL has let go. Idempotent."""
        return self._comm.abort(list(self._under_way))

    def end(self) -> None:
        """The same, and whoever waits here gets ClosedError. Idempotent, waits for nothing."""
        self._ended = True
        self._left.set()
        self.abort()
        self._stream.close()

    # -- with the lock -----------------------------------------------------------------------------

    def _wait(self, left: int, within: Deadline) -> None:
        """Until no more than so many are under way, each in its own time and all in the call's."""
        while len(self._under_way) > left:
            work = self._under_way[0]
            deadline = work.deadline if work.deadline.at < within.at else within
            with self._guarded(work.among):
                self._until(lambda work=work: self._is_over(work), deadline, _late(work))  # type: ignore[misc]
            self._under_way.popleft()

    def _is_over(self, work: _Work) -> bool:
        """Whether it is done, and well: what was aborted, or failed, ends as well."""
        if not work.operation.step():
            return False
        self._comm.is_settled()
        if self._comm.is_aborted:
            raise ClosedError(f"{work.name} was aborted")
        return True

    def _until(self, done: Callable[[], bool], deadline: Deadline, late: str) -> None:
        began = time.monotonic()
        pause = _SHORTEST_PAUSE_S
        while not done():
            if self._ended:
                raise ClosedError("it was destroyed during the call")
            self._look()
            if deadline.expired:
                raise TimeoutError(late)
            if time.monotonic() - began > _SPIN_S:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _look(self) -> None:
        """Now and then: whether all ranks are still there."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._mesh.check()

    @contextlib.contextmanager
    def _guarded(self, among: Collection[int] | None) -> Iterator[None]:
        """After a failure: abort, find out with the other ranks whose fault it is, and wait until the
        caller's memory is the caller's again.
        """
        try:
            with self._mesh.diagnose(among, own=_OWN):
                try:
                    yield
                except BaseException:
                    self.abort()
                    raise
        except BaseException:
            if self.abort().wait(_ABORT_PATIENCE_S):
                self._under_way.clear()
            else:
                logger.error(
                    "NCCL does not end what was aborted: it may still write to the tensors of a call"
                )
            raise

    # -- what is left under way ----------------------------------------------------------------------

    def _watch(self) -> None:
        self._left.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvplug-pynccl-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._left.wait() and not self._ended and self._failure is None:
            if self._lock.acquire(blocking=False):  # else a call looks itself
                try:
                    self._look_after()
                finally:
                    self._lock.release()
            time.sleep(_LOOK_S)

    def _look_after(self) -> None:
        try:
            while self._under_way:
                work = self._under_way[0]
                with self._guarded(work.among), self._device.current():
                    if not self._is_over(work):
                        self._look()
                        if work.deadline.expired:
                            raise TimeoutError(_late(work))
                        return
                self._under_way.popleft()
            self._left.clear()
        except KvplugError as e:
            kind = next((kind for kind in _KINDS if isinstance(e, kind)), TransportError)
            self._failure = kind, str(e)
            self._mesh.give_up(e)
            if not self._ended:
                logger.warning("a collective that was left under way failed, results are void: %s", e)


def _late(work: _Work) -> str:
    return f"{work.name} did not end in time"
