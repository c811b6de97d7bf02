"""The memory of the store "host": it is counted while pages use it; another process only reads it, and cannot
shrink it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from host_programs import config
from kvplug import KvplugError, PeerGoneError, build_store
from kvplug.transport import Connection, Credentials, Deadline, Memfd, WireError
from kvplug_host.arena.segments import Segments
from kvplug_host.client.mapping import Mapping
from kvplug_host.protocol import REGION_BYTES, REGIONS, TICKET_BYTES, WELCOME, Hello
from kvplug_host.serving.memory_door import MemoryDoor
from kvplug_lab.named_pages import NamedPages

NBYTES = 64 << 10


@pytest.fixture
def segments() -> Iterator[Segments]:
    with closing(Segments(2, NBYTES // 2)) as made:
        yield made


def test_a_store_whose_pages_were_removed_uses_no_memory() -> None:
    pages = NamedPages(100_000)  # not a divisor of a segment: a part of its memory is of no page
    with build_store(config(size=4 << 20)) as store:
        assert pages.put(store, "a", "b") == [None] * 2
        assert store.usage().used_bytes > 200_000
        assert store.submit_remove(None).wait(20) == [True]
        assert store.usage().used_bytes == 0


def test_who_gets_the_descriptor_cannot_write_or_shrink_or_unseal(segments: Segments) -> None:
    fd = segments.descriptor()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NBYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for length in (0, NBYTES // 2, 2 * NBYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, NBYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(again)
    finally:
        os.close(fd)


def test_a_reader_sees_what_the_owner_writes_and_cannot_make_its_mapping_writable(segments: Segments) -> None:
    fd = segments.descriptor()
    try:
        read = mmap.mmap(fd, NBYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with read:
        segments.view[5] = 77
        assert read[5] == 77
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvplug-host" in line]
        address = int(next(line for line in lines if " r--s " in line).partition("-")[0], 16)
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.mprotect(ctypes.c_void_p(address), NBYTES, mmap.PROT_READ | mmap.PROT_WRITE)
        assert done == -1 and ctypes.get_errno() == 13


def test_memory_is_handed_out_once_for_a_ticket_and_not_without_one(segments: Segments) -> None:
    credentials = Credentials()
    with closing(MemoryDoor(segments, f"unix:@kvplug-door-{os.getpid()}", credentials)) as door:

        def mapped(ticket: bytes) -> Mapping:
            hello = Hello(epoch="", memory_bytes=NBYTES, memory=door.contact, ticket=ticket)
            return Mapping(hello, credentials, Deadline.after(5))

        ticket = door.ticket()
        mapping = mapped(ticket)
        for at in (9, NBYTES - 1):
            segments.view[at] = 33
            assert mapping.view[at] == 33
        for wrong in (ticket, bytes(TICKET_BYTES)):
            with pytest.raises(KvplugError):
                mapped(wrong)


@pytest.mark.parametrize("wrong", ["none", "not sealed", "short"])
def test_a_process_maps_no_memory_of_a_store_that_could_end_it(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    send = Connection.send

    def hand_over(connection: Connection, data: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        if data != WELCOME:
            send(connection, data, deadline, fds)
            return
        fd = Memfd.create("test", NBYTES // 2 if wrong == "short" else NBYTES)
        if wrong != "not sealed":
            Memfd.seal(fd, read_only=True)
        send(connection, data, deadline, () if wrong == "none" else (fd,))
        os.close(fd)

    monkeypatch.setattr(Connection, "send", hand_over)
    with closing(MemoryDoor(segments, f"unix:@kvplug-door-{os.getpid()}", Credentials())) as door:
        hello = Hello(epoch="", memory_bytes=NBYTES, memory=door.contact, ticket=door.ticket())
        with pytest.raises(WireError):
            Mapping(hello, Credentials(), Deadline.after(5))


@pytest.mark.parametrize("wrong", ["none", "not sealed", "writable", "short"])
def test_a_store_maps_no_lent_memory_that_could_end_it(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    nbytes = REGIONS * REGION_BYTES

    send = Connection.send

    def lend(connection: Connection, data: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        if data == WELCOME:
            send(connection, data, deadline, fds)
            return
        fd = Memfd.create("test", nbytes // 2 if wrong == "short" else nbytes)
        if wrong != "not sealed":
            Memfd.seal(fd, read_only=wrong != "writable")
        send(connection, data, deadline, () if wrong == "none" else (fd,))
        os.close(fd)

    with closing(MemoryDoor(segments, f"unix:@kvplug-door-{os.getpid()}", Credentials())) as door:
        hello = Hello(epoch="", memory_bytes=NBYTES, memory=door.contact, ticket=door.ticket())
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "send", lend)
            with pytest.raises(PeerGoneError):
                Mapping(hello, Credentials(), Deadline.after(5))
        Mapping(hello, Credentials(), Deadline.after(5))


def test_a_region_comes_back_once(segments: Segments) -> None:
    with closing(MemoryDoor(segments, f"unix:@kvplug-door-{os.getpid()}", Credentials())) as door:
        hello = Hello(epoch="", memory_bytes=NBYTES, memory=door.contact, ticket=door.ticket())
        memory = Mapping(hello, Credentials(), Deadline.after(5)).put_memory
    taken = memory.take(8)
    assert taken is not None
    memory.give_back([taken[0]])
    for wrong in (taken[0], REGIONS):
        with pytest.raises(WireError, match="was not in use"):
            memory.give_back([wrong])
    memory.end()
