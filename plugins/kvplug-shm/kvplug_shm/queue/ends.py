"""The parts that the ends of a queue share."""

from __future__ import annotations

import abc
from collections.abc import Callable

from kvplug.transport import DEFAULT_TIMEOUT, Deadline, MessageQueue, QueueEndpoint, Timeout
from kvplug_shm.queue.use_guard import UseGuard


class ShmEnd(MessageQueue):
    """One end of a queue "shm"."""

    def __init__(
        self,
        context: QueueEndpoint.Context,
        handle: QueueEndpoint.Handle,
        rank: int | None,
        drop: Callable[[], None],
    ) -> None:
        self._handle = handle
        self._use_guard = UseGuard(drop)
        super().__init__(context, rank)

    @property
    def closed(self) -> bool:
        return self._use_guard.closed

    def export_handle(self) -> QueueEndpoint.Handle:
        self._use_guard.check()
        return self._handle

    def _is_in_use(self) -> bool:
        return self._use_guard.busy

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        if not self._use_guard.shut():
            return
        try:
            self._wake()
            with self._use_guard.alone(deadline, self._wake) as alone:
                if alone:
                    self._take_leave(deadline)
        finally:
            self._let_go()

    def abort(self) -> None:
        # Also ends a close() that still waits in another thread, or was interrupted.
        self._use_guard.shut()
        if not self._use_guard.ended:
            self._wake()
            self._let_go()

    def _let_go(self) -> None:
        self._end()
        self._use_guard.over()

    @abc.abstractmethod
    def _wake(self) -> None:
        """Wake threads that are inside a call: they find that this end is closed."""

    @abc.abstractmethod
    def _take_leave(self, deadline: Deadline) -> None:
        """Announce that this end leaves; no other thread is inside. Waits until the deadline at most.

        :meth:`_end` follows. If another thread calls it meanwhile, this stops waiting.
        """

    @abc.abstractmethod
    def _end(self) -> None:
        """Disconnect from the other ends. Never blocks. Idempotent, from any thread."""

    def _after_fork_in_child(self) -> None:
        self._use_guard.after_fork()
