"""A ``torch.distributed.Store`` over a kvplug group, through which gloo's ranks exchange their addresses."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed

from kvplug import ClosedError, KvplugError, StatelessGroup, TimeoutError, UnsupportedError
from kvplug.transport import BackgroundThread, Deadline

_STEP_S = 0.2


class GroupStore(torch.distributed.Store):
    """Keys of the group under a prefix. :meth:`forget` deletes those that this rank has set."""

    def __init__(self, group: StatelessGroup, prefix: str, deadline: Deadline) -> None:
        """``deadline``: the deadline of every wait."""
        super().__init__()
        self._group = group
        self._prefix = prefix
        self._deadline = deadline
        self._abandoned = self._leaving = False
        self._mine: set[str] = set()

    def clone(self) -> GroupStore:
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._mine.add(key)
        self._group.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Raises TimeoutError, PeerGoneError, ClosedError: as the group does; the last if abandoned, too."""
        return self._get(key, Deadline.after(None))

    def _get(self, key: str, deadline: Deadline) -> bytes:
        while True:
            steps = (_STEP_S, self._deadline.remaining(), deadline.remaining())
            try:
                found: bytes = self._group.get(
                    self._prefix + key, min(step for step in steps if step is not None)
                )
                return found
            except TimeoutError:
                if self._abandoned:
                    raise ClosedError("the store was abandoned") from None
                if self._deadline.expired or deadline.expired:
                    raise

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises as ``get``; ``timeout`` counts where the store's own deadline is later."""
        deadline = Deadline.after(None if timeout is None else max(0.0, timeout.total_seconds()))
        for key in keys:
            self._get(key, deadline)

    def check(self, keys: list[str]) -> bool:
        try:
            for key in keys:
                self._group.get(self._prefix + key, 0)
        except TimeoutError:
            return False
        return True

    def add(self, key: str, amount: int) -> int:
        self._mine.add(key)
        return self._group.add(self._prefix + key, amount)

    def delete_key(self, key: str) -> bool:
        self._mine.discard(key)
        return self._group.delete(self._prefix + key)

    def num_keys(self) -> int:
        """Raises UnsupportedError: a group does not count its keys."""
        raise UnsupportedError("a kvplug group does not say how many keys it has")

    def abandon(self) -> None:
        """End waits in other threads."""
        self._abandoned = True

    def forget(self) -> None:
        """Delete the keys that this rank has set; every rank calls it once all have read them, or have
        failed.

        Does not wait beyond the deadline, since the rank that keeps the group's store may have stopped.
        Raises nothing.
        """
        left = self._deadline.remaining()
        thread = BackgroundThread(self._delete_all, name="kvplug-cpu-store", stop=self._leave)
        thread.start()
        thread.join(None if left is None else max(left, _STEP_S))

    def _leave(self) -> None:
        self._leaving = True

    def _delete_all(self) -> None:
        with contextlib.suppress(KvplugError):
            while self._mine and not self._leaving:
                self.delete_key(next(iter(self._mine)))
