"""The fence of each end: a few bytes that the peer can read, and that change before memory is taken back.

NIXL does not know that an owner has taken memory back: a read afterwards returns whatever is there, and
succeeds. So an end that has read a message reads the other's fence next. If that still is the number
which was agreed on when the pipe was made, the message was the peer's to the last byte.

Where the kernel lets this process read the peer's memory, which UCX's lane "cma" rests on, the fence is read
with a system call, which takes 2 µs where NIXL takes 15.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from typing import Final

from kvplug import PeerGoneError
from kvplug.net.wire.tensors import memory_of, memory_of_writable
from kvplug_nixl.agent import Agent, Read, Span

FENCE_BYTES: Final = 16
_GONE: Final = (errno.ESRCH, errno.EFAULT)
"""The process has ended, or has no such memory any more."""
_libc: Final = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock during a call: to wait for it again would take longer than the call."""


class _Memory(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class OwnFence:
    """Memory of this end's, registered with its agent."""

    def __init__(self, agent: Agent) -> None:
        import torch

        self.number: Final = secrets.token_bytes(FENCE_BYTES)
        self._memory = torch.frombuffer(bytearray(self.number), dtype=torch.uint8)
        ((address, _, place),), _ = agent.register([self._memory])
        self.place: Final = address, place
        """Address, and the number that NIXL knows it by."""

    def take_back(self) -> None:
        """Make the peer's reads count as failed from now on. Takes no lock. Idempotent."""
        memory_of_writable(self._memory)[:] = bytes(FENCE_BYTES)


class PeerFence:
    """The other end's."""

    def __init__(self, agent: Agent, number: bytes, place: tuple[int, int], pid: int | None) -> None:
        """``pid``: of the peer; ``None``: it is not of this host."""
        import torch

        self._agent = agent
        self._number = number
        self._span: Span = (place[0], FENCE_BYTES, place[1])
        self._memory = torch.zeros(FENCE_BYTES, dtype=torch.uint8)
        self._pending: Read | None = None
        self._local, _ = agent.register([self._memory])
        self._direct = None if pid is None else _DirectRead(pid, place[0])
        if self._direct is not None and self._direct.read() != number:
            self._direct = None

    def check(self, wait: Callable[[Read], bool]) -> bool:
        """Whether it is known that the peer has taken nothing back. If not, call it again.

        ``wait(read)``: until it is done, or there is no time left. A read that was not waited for is the one
        that the next call looks at: its answer must not be taken for that of a later one.

        Raises:
            PeerGoneError: it has, or is another process by now.
        """
        if self._direct is not None and self._pending is None:
            found = self._direct.read()
            if found is not None:
                self._compare(found)
                return True
        memory = memory_of_writable(self._memory)
        if self._pending is None:
            memory[:] = bytes(FENCE_BYTES)
            self._pending = self._agent.read(self._local, [self._span])
        if not wait(self._pending):
            return False
        self._pending = None
        self._compare(bytes(memory_of(self._memory)))
        return True

    def _compare(self, found: bytes) -> None:
        if found != self._number:
            raise PeerGoneError("the peer has taken back the memory of a message while it was read")

    def forget(self) -> None:
        """The agent is about to be closed."""
        if self._pending is not None:
            self._pending.forget()


class _DirectRead:
    """Reads the fence with ``process_vm_readv``."""

    def __init__(self, pid: int, address: int) -> None:
        self._pid = pid
        self._found = ctypes.create_string_buffer(FENCE_BYTES)
        self._local = _Memory(ctypes.addressof(self._found), FENCE_BYTES)
        self._remote = _Memory(address, FENCE_BYTES)
        self._call = _libc.process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        self._arguments = (
            ctypes.c_int(pid),
            ctypes.byref(self._local),
            ctypes.c_ulong(1),
            ctypes.byref(self._remote),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )

    def read(self) -> bytes | None:
        """The peer's bytes; ``None``: the kernel does not let this process read them.

        Raises:
            PeerGoneError: the peer has no such memory any more.
        """
        got = self._call(*self._arguments)
        if got == FENCE_BYTES:
            return self._found.raw
        number = ctypes.get_errno()
        if number in _GONE:
            raise PeerGoneError(f"the peer's memory is gone: {os.strerror(number)}")
        return None
