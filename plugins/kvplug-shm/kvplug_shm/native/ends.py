"""The ends of a ring, with the compiled steps. What they share with those in Python is all but speed."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvplug_shm.native.library import End, Library, library
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

if TYPE_CHECKING:
    from kvplug_shm.memory.words import Words


class NativeWritingEnd(WritingEnd):
    """To be used only while the memory is mapped: no view is asked."""

    def __init__(
        self, library: Library, memory: Words, num_readers: int, places: int, *, sent: int = 0
    ) -> None:
        self.state = End(words=memory.address, places=places, readers=num_readers)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.state))
        self._publish, self._spun = library.publish, library.spun_for_room
        super().__init__(memory, num_readers, places, sent=sent)

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self.state.count

    @sent.setter
    def sent(self, sent: int) -> None:
        self.state.count = sent

    def publish(self, count: int = 1) -> None:
        self._publish(self.pointer, count)

    def spun(self, count: int, seconds: float) -> bool:
        return bool(self._spun(self.pointer, count, int(seconds * 1e9)))


class NativeReadingEnd(ReadingEnd):
    """To be used only while the memory is mapped: no view is asked."""

    def __init__(self, library: Library, memory: Words, reader: int, places: int, *, read: int = 0) -> None:
        self.state = End(words=memory.address, places=places, readers=reader)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.state))
        self._release, self._spun = library.release, library.spun_for_units
        super().__init__(memory, reader, places, read=read)

    @property
    def read(self) -> int:  # type: ignore[override]
        return self.state.count

    @read.setter
    def read(self, read: int) -> None:
        self.state.count = read

    def release(self, count: int = 1) -> None:
        self._release(self.pointer, count)

    def spun(self, count: int, seconds: float) -> bool:
        return bool(self._spun(self.pointer, count, int(seconds * 1e9)))


def writing_end(words: Words, num_readers: int, places: int, *, native: bool) -> WritingEnd:
    """With the compiled steps, if they are wanted and there are any."""
    steps = library() if native else None
    if steps is None:
        return WritingEnd(words, num_readers, places)
    return NativeWritingEnd(steps, words, num_readers, places)


def reading_end(words: Words, reader: int, places: int, *, native: bool) -> ReadingEnd:
    """With the compiled steps, if they are wanted and there are any."""
    steps = library() if native else None
    if steps is None:
        return ReadingEnd(words, reader, places)
    return NativeReadingEnd(steps, words, reader, places)
