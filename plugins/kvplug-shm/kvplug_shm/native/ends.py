"""The ends of a ring with the compiled steps. They differ from those in Python only in speed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug.net.wire.copying import LOCK_FREE_BYTES, CopyBytes, address_of, copy_bytes
from kvplug_shm.native.library import EndStruct, Library, library
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

if TYPE_CHECKING:
    from kvplug_shm.memory.words import Words


LONGEST_NS: Final = 5_000_000
"""The longest single call: after it deadlines are checked and signals handled."""


def in_ns(seconds: float) -> int:
    """As the compiled steps count."""
    return int(min(seconds, 1e6) * 1e9)


class NativeWritingEnd(WritingEnd):
    """Usable only while the memory is mapped: raises ValueError after it was released."""

    def __init__(
        self, library: Library, memory: Words, num_readers: int, places: int, *, sent: int = 0
    ) -> None:
        self.state = EndStruct(words=memory.address, places=places, readers=num_readers)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.state))
        self._publish, self._spin = library.publish, library.spin_for_room
        super().__init__(memory, num_readers, places, sent=sent)

    @property
    def sent(self) -> int:
        return int(self.state.count)

    @sent.setter
    def sent(self, sent: int) -> None:
        self.state.count = sent

    def publish(self, count: int = 1) -> None:
        len(self._memory.words)  # raises
        self._publish(self.pointer, count)

    def spin(self, count: int, seconds: float) -> bool:
        return _spin(self._spin, self, count, seconds)


class NativeReadingEnd(ReadingEnd):
    """Usable only while the memory is mapped: raises ValueError after it was released."""

    def __init__(self, library: Library, memory: Words, reader: int, places: int, *, read: int = 0) -> None:
        self.state = EndStruct(words=memory.address, places=places, readers=reader)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.state))
        self._release, self._spin, self._poll = library.release, library.spin_for_units, library.poll
        super().__init__(memory, reader, places, read=read)

    @property
    def read(self) -> int:
        return int(self.state.count)

    @read.setter
    def read(self, read: int) -> None:
        self.state.count = read

    def release(self, count: int = 1) -> None:
        len(self._memory.words)  # raises
        self._release(self.pointer, count)

    def spin(self, count: int, seconds: float) -> bool:
        return _spin(self._spin, self, count, seconds)

    def poll(self, count: int, spin_s: float, nap_s: float) -> bool:
        if spin_s > LONGEST_NS * 1e-9:
            return super().poll(count, spin_s, nap_s)
        len(self._memory.words)  # raises
        return bool(self._poll(self.pointer, count, int(spin_s * 1e9), int(nap_s * 1e9)))


def _spin(
    look: Callable[..., int], end: NativeWritingEnd | NativeReadingEnd, count: int, seconds: float
) -> bool:
    """Spin in pieces: between two, signals are handled and the memory is checked again."""
    left_ns = in_ns(seconds)
    while True:
        len(end._memory.words)  # raises
        if look(end.pointer, count, min(left_ns, LONGEST_NS)):
            return True
        left_ns -= LONGEST_NS
        if left_ns <= 0:
            return False


def copy_for_one_of(num_readers: int, *, native: bool) -> CopyBytes:
    """How a reader copies a large message out of memory from which others copy it, too."""
    steps = library() if native else None
    if steps is None:
        return copy_bytes
    copy_one_of, copies = steps.copy_one_of, num_readers + 1  # the ring has one as well

    def copy(target: memoryview, source: memoryview) -> None:
        if source.nbytes < LOCK_FREE_BYTES or source.nbytes != target.nbytes:
            copy_bytes(target, source)  # raises for the latter
        else:
            copy_one_of(address_of(target), address_of(source), source.nbytes, copies)

    return copy


def writing_end(words: Words, num_readers: int, places: int, *, native: bool) -> WritingEnd:
    """The ends with the compiled steps, if they are enabled and built."""
    steps = library() if native else None
    if steps is None:
        return WritingEnd(words, num_readers, places)
    return NativeWritingEnd(steps, words, num_readers, places)


def reading_end(words: Words, reader: int, places: int, *, native: bool) -> ReadingEnd:
    """The ends with the compiled steps, if they are enabled and built."""
    steps = library() if native else None
    if steps is None:
        return ReadingEnd(words, reader, places)
    return NativeReadingEnd(steps, words, reader, places)
