"""Bytes into shared memory, small and large."""

from __future__ import annotations

import os
import random

import pytest

from kvplug.transport import Segment
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES, into

SIZE = 4 * RELEASE_GIL_BYTES


@pytest.fixture
def segment() -> Segment:
    made, fd = Segment.create("test", SIZE)
    os.close(fd)
    return made


@pytest.mark.parametrize("nbytes", [0, 1, 4096, *(RELEASE_GIL_BYTES + n for n in (-1, 0, 1))])
def test_what_goes_in_is_there_and_nothing_beside_it(segment: Segment, nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    for offset in (0, 1, 4096):
        for source in (memoryview(content), memoryview(bytearray(content))):
            segment.view[:] = b"\xff" * SIZE
            into(segment.view, offset, source)
            assert bytes(segment.view[:offset]) == b"\xff" * offset
            assert bytes(segment.view[offset : offset + nbytes]) == content
            assert bytes(segment.view[offset + nbytes :]) == b"\xff" * (SIZE - offset - nbytes)


@pytest.mark.parametrize("nbytes", [100, 2 * RELEASE_GIL_BYTES])
def test_what_does_not_fit_or_cannot_be_written_is_refused(segment: Segment, nbytes: int) -> None:
    with pytest.raises(ValueError):
        into(segment.view, SIZE - nbytes + 1, memoryview(b"x" * nbytes))
    with pytest.raises((TypeError, ValueError)):
        into(segment.view.toreadonly(), 0, memoryview(b"x" * nbytes))
    assert not any(segment.view)
