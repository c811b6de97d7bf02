"""A communicator that hangs nobody: non-blocking, asked how it is, and aborted beside its users.

NCCL wants calls on one communicator to come one after the other, ``ncclCommAbort`` too, and a non-blocking
one to be asked until it is no longer in progress before the next call. So every call here takes the
communicator's lock, and none of them waits. An abort has a thread of its own: whether it returns is NCCL's
and the driver's affair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from kvplug import ClosedError, ConfigError, TimeoutError
from kvplug.transport import Deadline
from kvplug_pynccl.nccl.abi import Result, UniqueId
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.nccl.library import Library

logger = logging.getLogger(__name__)

BLOCKING: Final = "NCCL_COMM_BLOCKING"
"""A variable of NCCL's, which counts for more than what a program asks for."""

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.01
_CALL_PATIENCE_S: Final = 30.0
"""How long an abort waits for another call to come back before it gives the communicator up."""

_given_up: Final[list[object]] = []
"""What was in use by communicators that could not be aborted: nobody knows until when."""


class Communicator:
    """One rank of a non-blocking ``ncclComm``. Any thread may call any method.

    Raises (every method but ``abort``):
        NcclError: NCCL failed, now or since it was last asked; only :meth:`abort` is left then.
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
        """Begin the start, which :meth:`is_settled` tells the end of. ``what`` is for messages.

        Raises:
            ConfigError: the environment has NCCL wait inside its calls, whatever it is asked for.
        """
        if os.environ.get(BLOCKING, "").strip() not in ("", "0"):
            raise ConfigError(
                f"{BLOCKING} is {os.environ[BLOCKING]}: {what} would wait for ever inside NCCL's calls;"
                " unset it"
            )
        self._nccl = nccl
        self._what = what
        self._current = current
        self._lock = threading.Lock()
        self._aborted: threading.Event | None = None
        self._abort_lock = threading.Lock()
        with current():
            self._comm, _ = nccl.comm_init_rank_config(world_size, unique_id, rank, nccl.config(blocking=0))

    @property
    def is_aborted(self) -> bool:
        """Whether :meth:`abort` was called. From before NCCL is told: what ends after that may be void."""
        return self._aborted is not None

    def is_settled(self) -> bool:
        """Whether what was called last is over, and the next call may come: after an abort none."""
        with self._lock:
            if self._aborted is not None or not self._comm:
                return False
            state = self._nccl.comm_get_async_error(self._comm)
            return self._nccl.raise_for(state, self._what, self._comm) is Result.SUCCESS

    def wait_until_settled(self, deadline: Deadline, look: Callable[[], None]) -> None:
        """Ask until it is, calling ``look`` in between, which may raise.

        Raises:
            TimeoutError: it is not, in time.
        """
        pause = _FIRST_PAUSE_S
        while not self.is_settled():
            look()
            if deadline.expired:
                raise TimeoutError(
                    f"the start of {self._what} did not end in time: a rank has not come, or it has another"
                    " unique id or world size"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def launch(self, *calls: Callable[[int], object]) -> None:
        """Enqueue operations as one: each of ``calls`` is given the ``ncclComm``. When it is settled they are
        on their streams, and not before: record events then.

        Raises:
            ClosedError: it was aborted.
        """
        with self._lock, self._current():
            if self._aborted is not None:
                raise ClosedError(f"{self._what}: its communicator was aborted")
            self._nccl.group_start()
            try:
                for call in calls:
                    call(self._comm)
            except BaseException:
                with contextlib.suppress(NcclError):  # the group is over in any case, and failed
                    self._nccl.group_end()
                raise
            self._nccl.group_end()

    def suspend(self) -> None:
        """Give back memory of the device until :meth:`resume`. Raises ClosedError, UnsupportedError too."""
        self._ask(self._nccl.comm_suspend)

    def resume(self) -> None:
        """Take it up again. Raises as :meth:`suspend`."""
        self._ask(self._nccl.comm_resume)

    def _ask(self, function: Callable[[int], object]) -> None:
        with self._lock, self._current():
            if self._aborted is not None:
                raise ClosedError(f"{self._what}: its communicator was aborted")
            function(self._comm)

    def abort(self, *kept: object) -> threading.Event:
        """End it at once, beside the caller; the event is set when NCCL is done with it.

        What was under way on the device ends undone. Memory in use there is to be ``kept`` until then: for
        good, where it never is. Idempotent.
        """
        with self._abort_lock:
            if self._aborted is None:
                self._aborted = over = threading.Event()
                thread = threading.Thread(
                    target=self._abort, args=(over, kept), name="kvplug-pynccl-abort", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as e:  # no more threads just now
                    self._give_up(kept, f"its abort found no thread ({e})")
            return self._aborted

    def _abort(self, over: threading.Event, kept: object) -> None:
        if not self._lock.acquire(timeout=_CALL_PATIENCE_S):
            self._give_up(kept, "a call of NCCL does not return")
            return
        comm, self._comm = self._comm, 0
        self._lock.release()  # nobody finds it any more: an abort that hangs holds up nobody
        try:
            if comm:
                with self._current():
                    self._nccl.comm_abort(comm)
        except NcclError as e:
            self._give_up(kept, f"its abort failed ({e})")
            return
        del kept
        over.set()

    def _give_up(self, kept: object, why: str) -> None:
        _given_up.append(kept)
        logger.error(
            "%s: %s; its communicator, and memory that it uses, are left as they are", self._what, why
        )
