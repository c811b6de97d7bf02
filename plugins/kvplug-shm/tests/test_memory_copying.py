"""Bytes in and out of shared memory, small and large."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading

import pytest

from kvplug.net.wire.copying import address_of
from kvplug.transport import Segment
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES, into, out_of

SIZE = 4 * RELEASE_GIL_BYTES
SIZES = [
    0,
    1,
    7,
    64,
    4096,
    RELEASE_GIL_BYTES - 1,
    RELEASE_GIL_BYTES,
    RELEASE_GIL_BYTES + 1,
    3 * RELEASE_GIL_BYTES,
]


@pytest.fixture
def segment() -> Segment:
    made, fd = Segment.create("test", SIZE)
    os.close(fd)
    return made


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4096])
@pytest.mark.parametrize("readonly", [True, False])
def test_what_goes_in_comes_out_and_nothing_beside_it(
    segment: Segment, nbytes: int, offset: int, readonly: bool
) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    source = memoryview(content if readonly else bytearray(content))
    segment.view[:] = b"\xff" * SIZE
    into(segment.view, offset, source)
    assert bytes(segment.view[:offset]) == b"\xff" * offset
    assert bytes(segment.view[offset : offset + nbytes]) == content
    assert bytes(segment.view[offset + nbytes :]) == b"\xff" * (SIZE - offset - nbytes)
    target = bytearray(nbytes)
    out_of(segment.view.toreadonly(), offset, memoryview(target))
    assert target == content


@pytest.mark.parametrize("nbytes", [100, 2 * RELEASE_GIL_BYTES])
def test_what_does_not_fit_is_refused_and_nothing_is_written(segment: Segment, nbytes: int) -> None:
    offset = SIZE - nbytes + 1
    with pytest.raises(ValueError):
        into(segment.view, offset, memoryview(b"x" * nbytes))
    target = bytearray(b"y" * nbytes)
    with pytest.raises(ValueError):
        out_of(segment.view, offset, memoryview(target))
    assert not any(segment.view)
    assert target == b"y" * nbytes


@pytest.mark.parametrize("nbytes", [100, 2 * RELEASE_GIL_BYTES])
def test_what_cannot_be_written_is_refused(segment: Segment, nbytes: int) -> None:
    target = bytes(nbytes)
    segment.view[:nbytes] = b"x" * nbytes
    with pytest.raises((TypeError, ValueError)):
        out_of(segment.view, 0, memoryview(target))
    with pytest.raises((TypeError, ValueError)):
        into(segment.view.toreadonly(), 0, memoryview(bytes(nbytes)))
    assert not any(target)
    assert bytes(segment.view[:nbytes]) == b"x" * nbytes


def test_an_address_is_where_the_bytes_are(segment: Segment) -> None:
    segment.view[10:13] = b"abc"
    for view in (segment.view[10:], segment.view.toreadonly()[10:], memoryview(b"abc")):
        assert ctypes.string_at(address_of(view), 3) == b"abc"
    assert address_of(segment.view) == segment.address
    address_of(memoryview(b""))
    address_of(memoryview(bytearray()))


def test_bytes_that_do_not_lie_together_have_no_address() -> None:
    for view in (memoryview(bytearray(10)), memoryview(bytes(10))):
        with pytest.raises(BufferError):
            address_of(view[::2])


def test_nothing_is_held_afterwards(segment: Segment) -> None:
    content = bytearray(SIZE)
    for view in (memoryview(content), memoryview(content).toreadonly()):
        address_of(view)
        into(segment.view, 0, view)
    out_of(segment.view, 0, memoryview(content))
    del view
    content.append(1)  # refused as long as anything has a view of it


@pytest.mark.parametrize(
    ("nbytes", "others_run"), [(RELEASE_GIL_BYTES - 1, False), (RELEASE_GIL_BYTES, True)]
)
def test_a_large_copy_lets_other_threads_run(segment: Segment, nbytes: int, others_run: bool) -> None:
    source, go, ran = memoryview(bytes(nbytes)), threading.Lock(), threading.Event()
    go.acquire()
    other = threading.Thread(target=lambda: (go.acquire(), ran.set()))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is forced to release the GIL
    try:
        go.release()
        copies = 0
        while not ran.is_set() and copies < (100_000 if others_run else 1000):
            into(segment.view, 0, source)
            copies += 1
        did = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert did is others_run
