"""Cross-memory attach: copying straight out of another process's memory (process_vm_readv(2)).

The kernel finds the other process by its pid, which may be somebody else's by the time of the copy, and the
program that runs there may have become another one. So each process keeps a random word where no forked child
has it, tells where, and whoever copies reads that word in the same call: the kernel takes hold of one memory
for all of a call, so bytes that came together with the word are that process's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import secrets
from typing import Final

import attrs

from kvplug import PeerGoneError
from kvplug.transport import PeerIdentity

WORD_BYTES: Final = 16
LONGEST_BYTES: Final = 4 * 1024 * 1024
"""Of one call, which no deadline and no signal ends: some hundred microseconds."""
_WIPE_ON_FORK: Final = 18  # MADV_WIPEONFORK, since Linux 4.14


class _Part(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_Parts = _Part * 2


@attrs.frozen
class Word:
    """What proves a memory to be that of one process, and where it lies there."""

    address: int
    value: bytes = attrs.field(repr=False)

    @property
    def there(self) -> bool:
        return self.address != 0


NO_WORD: Final = Word(0, bytes(WORD_BYTES))
"""Of a process whose memory is not to be read."""


class UnreadableError(Exception):
    """The other process lives, and its memory cannot be read; why."""


class PeerMemory:
    """The memory of another process, as far as that process tells where something lies.

    Thread-safe but for :meth:`copy`, which one thread at a time may call.
    """

    def __init__(self, peer: PeerIdentity, word: Word) -> None:
        """Reads the word.

        Raises:
            UnreadableError: this process may not read there, or it is not that process's memory.
            PeerGoneError: that process has ended.
        """
        if not word.there:
            raise UnreadableError("it keeps its memory to itself")
        if not peer.visible:
            raise UnreadableError("its pid means nothing in this pid namespace")
        self._peer = peer
        self._word = word.value
        self._seen = ctypes.create_string_buffer(WORD_BYTES)
        self._here = _Parts((None, 0), (ctypes.addressof(self._seen), WORD_BYTES))
        self._there = _Parts((None, 0), (word.address, WORD_BYTES))
        self.copy(word.address, ctypes.addressof(self._seen), 0)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Put ``nbytes`` that lie at the address ``source`` over there to ``target`` here.

        Raises the same as making it, but that a process in which another program runs by now is one that is
        gone. What was copied is that process's if nothing is raised, and was what it offered only if it has
        not taken the offer back since.
        """
        number = self._read(source, target, nbytes)
        if not number:
            return
        self._raise_if_gone(number)
        lost = (errno.EFAULT, errno.ESTALE)
        if nbytes and number in lost and self._read(source, target, 0) in lost:
            raise PeerGoneError(f"{self._peer} has become another program")
        raise UnreadableError(_in_words(number))

    def _read(self, source: int, target: int, nbytes: int) -> int:
        """0, or the number of the error: ESTALE, where another word lies."""
        here, there = self._here, self._there
        here[0].address, here[0].nbytes = target, nbytes
        there[0].address, there[0].nbytes = source, nbytes
        ctypes.memset(self._seen, 0, WORD_BYTES)
        call = _call()
        if call is None:
            raise UnreadableError("this system has no process_vm_readv")
        copied = call(self._peer.pid, here, 2, there, 2, 0)
        if copied < 0:
            return ctypes.get_errno()
        if copied != nbytes + WORD_BYTES:
            return errno.EFAULT
        return 0 if self._seen.raw == self._word else errno.ESTALE

    def _raise_if_gone(self, number: int) -> None:
        if number == errno.ESRCH:
            raise PeerGoneError(f"{self._peer} has ended")
        pidfd = self._peer.open_pidfd()
        if pidfd is not None:
            os.close(pidfd)


def own_word() -> Word:
    """What others read this process's memory by; none, where the system cannot keep it from forks."""
    return _word_of(os.getpid())


@functools.lru_cache(1)
def _word_of(pid: int) -> Word:
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPE_ON_FORK)
    except OSError:
        return NO_WORD
    value = secrets.token_bytes(WORD_BYTES)
    page[:WORD_BYTES] = value
    _pages.append(page)
    return Word(ctypes.addressof(ctypes.c_char.from_buffer(page)), value)


_pages: Final[list[mmap.mmap]] = []
"""Of this process and, untouched, of those it was forked from: for as long as it lives."""


@functools.cache
def _call() -> ctypes._CFuncPtr | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Part),
        ctypes.c_ulong,
        ctypes.POINTER(_Part),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return call


def _in_words(number: int) -> str:
    if number == errno.ESTALE:
        return "it is not the memory that was told of: another program runs there"
    said = os.strerror(number)
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return f"{said}: the system does not let this process read there (a sandbox, or Yama's ptrace_scope)"
    return said
