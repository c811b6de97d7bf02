"""Another process's memory, read by its word: that process's, or an error that says which."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import attrs
import pytest

from kvplug import PeerGoneError
from kvplug.testing import peers
from kvplug.transport import this_process
from kvplug_shm.memory import attach
from kvplug_shm.memory.attach import NO_WORD, WORD_BYTES, PeerMemory, UnreadableError, Word, own_word

attaching = SimpleNamespace(**run_path(str(Path(__file__).with_name("attaching.py"))))
told, heard = attaching.told, attaching.heard
readable_child = attaching.readable_child

TEXT = b"what lies in the other process" * 100_000


def lie_there(parent: peers.Parent) -> None:
    """A child that tells where its word and its text lie."""
    text = ctypes.create_string_buffer(TEXT, len(TEXT))
    parent.send((*told(), ctypes.addressof(text)))
    parent.recv()


def turn_into_another_program(parent: peers.Parent) -> None:
    parent.send(told())
    parent.recv()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: S606


def read_as_nobody(parent: peers.Parent) -> str:
    """A child of another user."""
    peer, word = heard(*parent.recv())
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        PeerMemory(peer, word)
    except UnreadableError as e:
        return str(e)
    return "read"


def copied(memory: PeerMemory, address: int, nbytes: int) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    memory.copy(address, ctypes.addressof(target), nbytes)
    return target.raw


@pytest.mark.usefixtures("readable_child")
def test_what_lies_in_another_process_is_copied() -> None:
    with peers.start(lie_there) as child:
        *rest, address = child.recv()
        peer, word = heard(*rest)
        memory = PeerMemory(peer, word)
        assert copied(memory, address, len(TEXT)) == TEXT
        assert copied(memory, address + 5, 4) == b"lies"
        os.kill(child.pid, 19)  # SIGSTOP: a process that does not run can be read all the same
        assert copied(memory, address, 4) == b"what"
        os.kill(child.pid, 18)
        child.send(None)


@pytest.mark.usefixtures("readable_child")
def test_a_killed_process_is_gone() -> None:
    with peers.start(lie_there) as child:
        *rest, address = child.recv()
        peer, word = heard(*rest)
        memory = PeerMemory(peer, word)
        child.kill()
        with pytest.raises(PeerGoneError, match="has ended"):
            copied(memory, address, 10)
        with pytest.raises(PeerGoneError, match="has ended"):
            PeerMemory(peer, word)


@pytest.mark.usefixtures("readable_child")
def test_another_process_of_that_pid_is_not_read() -> None:
    with peers.start(lie_there) as child:
        peer, word = heard(*child.recv()[:2])
        earlier = attrs.evolve(peer, start_time=peer.start_time - 1)
        with pytest.raises(PeerGoneError, match="another process"):
            PeerMemory(earlier, Word(word.address, bytes(WORD_BYTES)))
        with pytest.raises(UnreadableError, match="another program"):
            PeerMemory(peer, Word(word.address, bytes(WORD_BYTES)))
        child.send(None)


@pytest.mark.usefixtures("readable_child")
def test_another_program_in_that_process_is_not_read() -> None:
    with peers.start(turn_into_another_program) as child:
        peer, word = heard(*child.recv())
        memory = PeerMemory(peer, word)
        with open(f"/proc/{child.pid}/cmdline", "rb") as f:
            before = f.read()
        child.send(None)
        now = before
        while now == before:
            with open(f"/proc/{child.pid}/cmdline", "rb") as f:
                now = f.read() or before
        for address in (word.address, 4096):
            with pytest.raises(PeerGoneError, match="another program"):
                copied(memory, address, 10)
        with pytest.raises(UnreadableError):
            PeerMemory(peer, word)
        child.kill()


def test_a_forked_child_does_not_have_the_word() -> None:
    word = own_word()
    assert ctypes.string_at(word.address, WORD_BYTES) == word.value
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, ctypes.string_at(word.address, WORD_BYTES) + own_word().value)
        os._exit(0)
    os.waitpid(pid, 0)
    seen = os.read(reading, 100)
    os.close(reading)
    os.close(writing)
    assert seen[:WORD_BYTES] == bytes(WORD_BYTES)
    assert seen[WORD_BYTES:] not in (bytes(WORD_BYTES), word.value)


def test_who_has_no_word_and_whose_pid_means_nothing_here_is_not_read() -> None:
    with pytest.raises(UnreadableError, match="keeps its memory to itself"):
        PeerMemory(this_process(), NO_WORD)
    with pytest.raises(UnreadableError, match="pid namespace"):
        PeerMemory(attrs.evolve(this_process(), pid_ns="pid:[1]"), own_word())


def test_an_address_where_nothing_is_cannot_be_read_and_what_was_asked_before_still_can() -> None:
    pages = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    pages.resize(mmap.PAGESIZE)
    memory = PeerMemory(this_process(), own_word())
    pages[:4] = b"here"
    assert copied(memory, address, 4) == b"here"
    with pytest.raises(UnreadableError, match="Bad address"):
        copied(memory, 4096, 10)
    with pytest.raises(UnreadableError, match="Bad address"):
        copied(memory, address + mmap.PAGESIZE - 4, 60 * mmap.PAGESIZE)
    assert copied(memory, address, 4) == b"here"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read() -> None:
    with peers.start(read_as_nobody) as child:
        child.send(told())
        assert "does not let this process read there" in child.result()


@pytest.mark.parametrize("lacking", ["the call", "the advice"])
def test_a_system_without_it_says_so(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    if lacking == "the call":
        monkeypatch.setattr(attach, "_call", lambda: None)
        with pytest.raises(UnreadableError, match="no process_vm_readv"):
            PeerMemory(this_process(), own_word())
    else:
        attach._word_of.cache_clear()
        monkeypatch.setattr(attach, "_WIPE_ON_FORK", 12345)
        assert own_word() is NO_WORD
        attach._word_of.cache_clear()
