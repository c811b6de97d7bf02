"""A ``torch.distributed.Store`` over a kvplug group, through which gloo's ranks exchange their addresses."""

from __future__ import annotations

import contextlib
import re
import sys
from datetime import timedelta
from typing import Any

import torch.distributed

from kvplug import ClosedError, KvplugError, StatelessGroup, TimeoutError, UnsupportedError
from kvplug.transport import BackgroundThread, Deadline, WireError

_STEP_S = 0.2
_ADDRESS_KEY = re.compile(r"(^|/)\d+/\d+$")
"""Where gloo keeps the address of a rank: below the number of its connection of all ranks."""
_NO_ADDRESS = -1


def _rest(address: bytes) -> int:
    """The size of what follows the host's name in an address of gloo, equal at all ranks."""
    size = int.from_bytes(address[:8], sys.byteorder)
    return len(address) - 8 - size if len(address) >= 8 + size else _NO_ADDRESS


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
        self._address: bytes | None = None
        """This rank's in gloo."""

    def clone(self) -> GroupStore:
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._mine.add(key)
        data = value.encode() if isinstance(value, str) else bytes(value)
        if _ADDRESS_KEY.search(key):
            self._address = data
        self._group.set(self._prefix + key, data)

    def get(self, key: str) -> bytes:
        """What a rank has set.

        Raises:
            WireError: it is nothing that torch sets, or no address where gloo expects one.
            TimeoutError, PeerGoneError, ClosedError: as the group does; the last if abandoned, too.
        """
        found = self._get(key, Deadline.after(None))
        if not isinstance(found, bytes) or (_ADDRESS_KEY.search(key) and not self._is_address(found)):
            raise WireError("a rank has set something else than its address in gloo; same torch?")
        return found

    def _is_address(self, found: bytes) -> bool:
        """Whether gloo can read it, which reads as many bytes as a number in it says."""
        rest = _NO_ADDRESS if self._address is None else _rest(self._address)
        return rest == _NO_ADDRESS or _rest(found) == rest  # of another version's gloo nothing is known

    def _get(self, key: str, deadline: Deadline) -> Any:
        while True:
            steps = (_STEP_S, self._deadline.remaining(), deadline.remaining())
            try:
                return self._group.get(self._prefix + key, min(step for step in steps if step is not None))
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
        with contextlib.suppress(RuntimeError):  # no thread: the keys stay
            thread.start()
            thread.join(None if left is None else max(left, _STEP_S))

    def _leave(self) -> None:
        self._leaving = True

    def _delete_all(self) -> None:
        with contextlib.suppress(KvplugError):
            while self._mine and not self._leaving:
                self.delete_key(next(iter(self._mine)))
