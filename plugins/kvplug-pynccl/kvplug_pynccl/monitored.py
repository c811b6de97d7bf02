"""A communicator whose calls never block: its state is polled, and it is aborted in a thread of its own.

NCCL requires that calls on one communicator come one after the other, ``ncclCommAbort`` too, and that a
non-blocking one is polled until it is no longer in progress before the next call. So every call here takes
the communicator's lock, and none of them waits. An abort has a thread of its own, since it may hang in NCCL
or in the driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from kvplug import ClosedError, ConfigError, TimeoutError
from kvplug.transport import BackgroundThread, Deadline, ExitGuard, NamedExhaustion, OfferPipe
from kvplug_pynccl.nccl.abi import Result, UniqueId
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.nccl.library import Library

logger = logging.getLogger(__name__)

BLOCKING: Final = "NCCL_COMM_BLOCKING"
"""A variable of NCCL's, which overrides what a program asks for."""

_CALL_WAIT_S: Final = 30.0
"""How long an abort waits for another call to return before it abandons the communicator."""

_abandoned: Final[list[object]] = []
"""Memory in use by communicators that could not be aborted. The device may write to it for ever."""


class _Aborter:
    """A thread that starts one thread for each abort. It runs as long as there is a communicator, so that it
    can abort one itself if the process can start no more threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_communicators = 0
        self._aborts = queue.SimpleQueue[Callable[[], None] | None]()
        os.register_at_fork(after_in_child=self._forget)

    def join(self) -> None:
        """Count a new communicator. Raises ResourceExhaustedError: the thread cannot be started."""
        with self._lock:
            if not self._num_communicators:
                thread = BackgroundThread(
                    self._run, name="kvplug-pynccl-aborts", stop=partial(self._aborts.put, None)
                )
                with NamedExhaustion("a communicator of NCCL needs a thread"):
                    thread.start()
            self._num_communicators += 1

    def leave(self) -> None:
        """Count one communicator less: it has been aborted, or was not made."""
        with self._lock:
            self._num_communicators -= 1
            if not self._num_communicators:
                self._aborts.put(None)

    def do(self, abort: Callable[[], None]) -> None:
        self._aborts.put(abort)

    def _run(self) -> None:
        while (abort := self._aborts.get()) is not None:
            try:
                # Nothing ends a call of NCCL.
                BackgroundThread(abort, name="kvplug-pynccl-abort", stop=lambda: None).start()
            except RuntimeError:  # no more threads just now
                abort()
            del abort

    def _forget(self) -> None:
        """In a forked child, where the parent's communicators are not aborted."""
        self._lock = threading.Lock()
        self._num_communicators = 0
        self._aborts = queue.SimpleQueue()


_aborter: Final = _Aborter()


class MonitoredCommunicator:
    """One rank of a non-blocking ``ncclComm``. Any thread may call any method.

    Raises (every method but ``abort``):
        NcclError: NCCL failed, now or since the last call; only :meth:`abort` makes sense then.
    """

    def __init__(
        self,
        nccl: Library,
        unique_id: UniqueId,
        world_size: int,
        rank: int,
        *,
        what: str,
        current: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begin to start it. It has started when :meth:`is_settled` returns True.

        Args:
            what: Its name in errors.
            current: Makes its device the current one of a thread.

        Raises:
            ConfigError: the environment makes NCCL block inside its calls, whatever a program asks for.
            ResourceExhaustedError: this process can start no more threads, and one is needed to abort it.
        """
        if os.environ.get(BLOCKING, "").strip() not in ("", "0"):
            raise ConfigError(
                f"{BLOCKING} is {os.environ[BLOCKING]}: {what} would block for ever inside NCCL's calls;"
                " unset it"
            )
        self._nccl = nccl
        self._what = what
        self._current = current
        self.lock = threading.Lock()
        self._aborted: threading.Event | None = None
        self._abort_lock = threading.Lock()
        _aborter.join()
        try:
            with current():
                self.comm, _ = nccl.comm_init_rank_config(
                    world_size, unique_id, rank, nccl.config(blocking=0)
                )
        except BaseException:
            _aborter.leave()
            raise

    @property
    def is_aborted(self) -> bool:
        """Whether :meth:`abort` was called. Set before NCCL acts: a result that comes later may be void."""
        return self._aborted is not None

    def is_settled(self) -> bool:
        """Whether the last call has completed, so that the next one may come. False after an abort."""
        with self.lock:
            if self._aborted is not None or not self.comm:
                return False
            state = self._nccl.comm_get_async_error(self.comm)
            return self._nccl.raise_for(state, self._what, self.comm) is Result.SUCCESS

    def wait_until_settled(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait until it has started. ``check`` is called between two polls, and may raise.

        Raises:
            TimeoutError: it has not started in time.
        """
        backoff = OfferPipe.Backoff()
        while not self.is_settled():
            check()
            if deadline.expired:
                raise TimeoutError(
                    f"the start of {self._what} did not end in time: a rank has not come, or it has another"
                    " unique id or world size"
                )
            backoff.pause()

    def launch(self, *calls: Callable[[int], object]) -> None:
        """Enqueue operations as one group; each of ``calls`` gets the ``ncclComm``.

        They are on their streams once :meth:`is_settled` returns True, not before: record events then.

        Raises:
            ClosedError: it was aborted.
        """
        with self.lock, self._current():
            if self._aborted is not None:
                raise ClosedError(f"{self._what}: its communicator was aborted")
            self._nccl.group_start()
            try:
                for call in calls:
                    call(self.comm)
            except BaseException:
                with contextlib.suppress(NcclError):  # the group has ended in any case, and failed
                    self._nccl.group_end()
                raise
            self._nccl.group_end()

    def suspend(self) -> None:
        """Release memory of the device until :meth:`resume`. Raises ClosedError and UnsupportedError too."""
        self._call(self._nccl.comm_suspend)

    def resume(self) -> None:
        """Allocate that memory again. Raises as :meth:`suspend`."""
        self._call(self._nccl.comm_resume)

    def _call(self, function: Callable[[int], object]) -> None:
        with self.lock, self._current():
            if self._aborted is not None:
                raise ClosedError(f"{self._what}: its communicator was aborted")
            function(self.comm)

    def abort(self, *kept: object) -> threading.Event:
        """End it at once, in another thread; the event is set when NCCL has released it.

        Operations that the device is running end undone. ``kept`` is the memory that they use: it stays alive
        until then, for good if NCCL never releases it. Idempotent.
        """
        with self._abort_lock:
            if self._aborted is None:
                self._aborted = released = threading.Event()
                if ExitGuard.is_leaving():
                    released.set()  # with the process
                else:
                    _aborter.do(partial(self._abort, released, kept))
            return self._aborted

    def _abort(self, released: threading.Event, kept: object) -> None:
        try:
            self._abort_now(released, kept)
        finally:
            _aborter.leave()

    def _abort_now(self, released: threading.Event, kept: object) -> None:
        if not self.lock.acquire(timeout=_CALL_WAIT_S):
            self._abandon(kept, "a call of NCCL does not return")
            return
        comm, self.comm = self.comm, 0
        self.lock.release()  # no other call uses it any more, so an abort that hangs blocks none
        try:
            if comm:
                with self._current():
                    self._nccl.comm_abort(comm)
        except NcclError as e:
            self._abandon(kept, f"its abort failed ({e})")
            return
        del kept
        released.set()

    def _abandon(self, kept: object, why: str) -> None:
        _abandoned.append(kept)
        logger.error(
            "%s: %s; its communicator, and memory that it uses, are left as they are", self._what, why
        )
