"""Shared memory: sealed, believed only when it is, and given back."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from kvplug.net.memory import memfd
from kvplug.transport import Segment, WireError
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child

SIZE = 1 << 20
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def made() -> Iterator[tuple[Segment, int]]:
    segment, fd = Segment.create("test", SIZE)
    yield segment, fd
    os.close(fd)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps", encoding="utf-8") as f:
        return sum("memfd:kvplug-test" in line for line in f)


def test_what_one_mapping_stores_the_other_loads(made: tuple[Segment, int]) -> None:
    one, fd = made
    other = Segment.attach(fd, SIZE)
    assert one.nbytes == other.nbytes == len(other.view) == len(other.memory) == SIZE
    assert one.address != other.address
    assert not any(other.view[:4096])
    one.view[100:103] = b"abc"
    assert other.view[100:103] == b"abc"


def test_the_size_and_the_seals_cannot_be_changed(made: tuple[Segment, int]) -> None:
    _, fd = made
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(fd)


def refusals(*attempts: Callable[[], object]) -> list[str]:
    """The names of the errors that they raise."""
    refused = []
    for attempt in attempts:
        try:
            attempt()
        except PermissionError as e:
            refused.append(type(e).__name__)
    return refused


def meddle(parent: peers.Parent, fd: int) -> list[str]:
    """In a process that the memory was handed to: map it, then do all that might hurt the other one."""
    theirs = Segment.attach(fd, SIZE)
    theirs.view[:5] = b"child"
    refused = refusals(
        lambda: os.ftruncate(fd, 0), lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    )
    theirs.memory.madvise(mmap.MADV_REMOVE, 4096, SIZE - 4096)
    return refused


@pytest.mark.full
def test_a_peer_that_means_harm_can_zero_it_and_no_more(made: tuple[Segment, int]) -> None:
    segment, fd = made
    segment.view[SIZE - 4 :] = b"abcd"
    with peers.start(meddle, fd, pass_fds=[fd]) as child:
        assert child.result() == ["PermissionError", "PermissionError"]
    assert segment.view[:5] == b"child"
    assert segment.view[SIZE - 4 :] == bytes(4)  # not a SIGBUS


def sealed(size: int, seals: int) -> int:
    fd = os.memfd_create("kvplug-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def file() -> int:
    with tempfile.TemporaryFile() as f:
        f.truncate(SIZE)
        return os.dup(f.fileno())


def for_reading() -> int:
    fd = sealed(SIZE, ALL_SEALS)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def closed() -> int:
    fd = sealed(SIZE, ALL_SEALS)
    os.close(fd)
    return fd


WRONG: dict[str, Callable[[], int]] = {
    "one byte too small": lambda: sealed(SIZE - 1, ALL_SEALS),
    "not sealed at all": lambda: sealed(SIZE, 0),
    "may be shrunk": lambda: sealed(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK),
    "may be sealed further": lambda: sealed(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SEAL),
    "cannot be written": lambda: sealed(SIZE, ALL_SEALS | fcntl.F_SEAL_WRITE),
    "for reading only": for_reading,
    "a file": file,
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
    "closed": closed,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_the_promised_memory_is_refused(what: str) -> None:
    fd = WRONG[what]()
    before = descriptors()
    try:
        for promised in (SIZE, 0, -1, 1 << 64):
            with pytest.raises(WireError):
                Segment.attach(fd, promised)
        assert descriptors() == before
    finally:
        if what != "closed":
            os.close(fd)


def test_a_view_keeps_the_memory_and_the_last_one_gives_it_back() -> None:
    fds, maps = descriptors(), mappings()
    segment, fd = Segment.create("test", SIZE)
    mapped = [Segment.attach(fd, SIZE) for _ in range(5)]
    os.close(fd)
    assert (descriptors(), mappings()) == (fds, maps + 6)  # a mapping needs no descriptor
    piece = segment.view[4096:8192]
    del segment, mapped
    gc.collect()
    piece[:4] = b"here"
    assert piece[:4] == b"here"
    assert mappings() == maps + 1
    del piece
    gc.collect()
    assert (descriptors(), mappings()) == (fds, maps)


def test_a_forked_child_has_zeros_in_its_place_and_takes_nothing_from_its_parent(
    made: tuple[Segment, int],
) -> None:
    segment, _ = made
    segment.view[:3] = b"abc"
    tensor = torch.frombuffer(segment.view, dtype=torch.uint8)

    def look() -> str:
        if tensor[:6].any():  # it shows zeros where unmapped memory would crash
            return "it shows the parent's memory"
        segment.view[3:6] = b"def"
        return f"{mappings()} mappings"

    assert in_forked_child(look) == "0 mappings"
    assert segment.view[:6] == b"abc\0\0\0"
    assert mappings() == 1


def taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_where_pages_can_be_refused_they_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "is_accounted_strictly", lambda: True)
    _, fd = Segment.create("test", SIZE)
    assert taken(fd) == SIZE
    os.close(fd)


def test_pages_are_given_back_whole_and_only_where_they_can_be_had_again(
    made: tuple[Segment, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, fd = made
    assert taken(fd) == 0, "untouched memory is not taken"
    segment.view[:] = b"x" * SIZE
    segment.give_back(4095, 4096)
    segment.give_back(0, 0)
    assert taken(fd) == SIZE
    segment.give_back(4095, 4097 + 4096)
    assert taken(fd) == SIZE - 8192
    assert bytes(segment.view[4095:12289]) == b"x" + bytes(8192) + b"x"
    monkeypatch.setattr(memfd, "is_accounted_strictly", lambda: True)
    segment.give_back(0, SIZE)
    assert segment.view[0] == ord("x")
    assert taken(fd) == SIZE  # reading had brought the two back


# -- memory that one process writes and others read ----------------------------------------------------


def written_by_one() -> tuple[Segment, int]:
    """A mapping that can be written, and a descriptor that was sealed after it was made."""
    fd = memfd.Memfd.create("kvplug-test", SIZE)
    segment = Segment.map(fd, SIZE, writable=True)
    memfd.Memfd.seal(fd, read_only=True)
    return segment, fd


def attempt_to_write(parent: peers.Parent, fd: int) -> list[str]:
    """All ways to a mapping that can be written, in a process that the memory was handed to."""
    refused = refusals(
        lambda: mmap.mmap(fd, SIZE),
        lambda: os.pwrite(fd, b"child", 0),
        lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    )
    memfd.Memfd.check(fd, SIZE, writable=False)
    view = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    parent.send(bytes(view[:5]))
    parent.recv()
    return [*refused, bytes(view[:5]).decode()]


@pytest.mark.full
def test_readers_see_what_the_owner_writes_and_cannot_write_themselves() -> None:
    segment, fd = written_by_one()
    with peers.start(attempt_to_write, fd, pass_fds=[fd]) as child:
        assert child.recv() == bytes(5)
        segment.view[:5] = b"owner"
        child.send("go on")
        assert child.result() == ["PermissionError"] * 5 + ["owner"]
    os.close(fd)
