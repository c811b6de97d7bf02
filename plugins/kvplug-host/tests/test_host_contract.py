"""The store "host" is judged against the laws: mapped, over pipes, and served by another program."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvplug.transport import PutReason, Store
from kvplug_host.arena.segments import WORD
from kvplug_host.store import HostStore
from kvplug_testing import StoreContract, peers, waits
from kvplug_testing.contract.lied_to import LiedTo
from kvplug_testing.contract.store.ends import StoreGeneral
from kvplug_testing.contract.store.suite import Place, StoreSuite

_numbers = itertools.count()
_PROGRAMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "host_programs.py")
_MODULES = ("torch", "kvplug_host.client.client", "kvplug_shm.pipe.endpoint", "kvplug_cpu.endpoint")


class _Host(StoreContract):
    __test__ = False

    def import_all(self) -> None:
        super().import_all()
        for module in _MODULES:
            importlib.import_module(module)


class _Raw(_Host):
    """Pages can be changed behind the store's back: in their slots."""

    def read_raw(self, store: Store, key: bytes) -> bytes | None:
        assert isinstance(store, HostStore)
        entry = store.pages.index.pages.get(key)
        if entry is None:
            return None
        lengths: dict[bytes, int] = self.__dict__.setdefault("_header_bytes", {})
        lengths.setdefault(key, entry.header_bytes)
        begin, view = entry.offset, store.pages.segments.view
        end = begin + entry.payload_bytes
        return bytes(view[end : end + entry.header_bytes]) + bytes(view[begin:end])

    def write_raw(self, store: Store, key: bytes, page: bytes | None) -> None:
        assert isinstance(store, HostStore)
        old = store.pages.index.pages.get(key)
        assert old is not None
        store.pages.remove([key])
        if page is None:
            return
        series, length = old.series, self.__dict__["_header_bytes"][key]
        header, payload = page[:length], page[length:]
        with store.pages.changing() as index:
            slot = index.reserve(len(page))
            assert not isinstance(slot, PutReason)
            view = store.pages.segments.view
            view[slot.offset : slot.offset + len(page)] = payload + header
            generation = store.pages.segments.next_generation()
            index.publish(
                key,
                series,
                slot,
                payload_bytes=len(payload),
                header_bytes=len(header),
                generation=generation,
            )
            store.pages.segments.set_generation(slot.word, generation)
        assert slot.word % WORD == 0


class TestHost(_Raw):
    """Other ends map the memory."""

    __test__ = True
    store = "host"


class TestHostIsLiedToOverAPipe(StoreSuite, LiedTo):
    """Where its memory is mapped, no page comes over the pipe."""

    store = "host"
    options: ClassVar[dict[str, Any]] = {"map": False}
    ends = StoreGeneral.ends


@pytest.mark.variant
class TestHostOverShm(_Raw):
    """Other ends get the pages over the pipe "shm"."""

    __test__ = True
    store = "host"
    pipes = "shm"
    options: ClassVar[dict[str, Any]] = {"map": False}


@pytest.mark.variant
class TestHostOverCpu(_Raw):
    """Other ends get the pages over sockets."""

    __test__ = True
    store = "host"
    pipes = "cpu"
    options: ClassVar[dict[str, Any]] = {"map": False}


@pytest.mark.variant
class TestHostServedApart(_Host):
    """The store runs in a program of its own, which each end connects to."""

    __test__ = True
    store = "host"
    reached_by = "options"
    ends_are_processes = True

    # The suite's own descriptors of the program.
    test_a_forked_child_holds_none_of_the_descriptors = None

    def place(self, *args: Any, **given: Any) -> Place:
        place = super().place(*args, **given)
        address = f"unix:@kvplug-apart-{os.getpid()}-{next(_numbers)}"
        options = {"size": place.options.pop("size")}
        programs = self.__dict__.setdefault("_programs", {})
        programs[address] = (self._serve(address, options), options)
        self.later(lambda: programs.pop(address))
        place.options["contact"] = address
        return place

    def _serve(self, address: str, options: dict[str, Any]) -> peers.Peer:
        program = self.start_forked(f"{_PROGRAMS}:serve", address, options, timeout_s=600)
        assert program.recv(waits.patience_s) == address
        return program

    def _program(self, store: Any) -> tuple[str, peers.Peer, dict[str, Any]]:
        address = store.address
        return (address, *self.__dict__["_programs"][address])

    @contextlib.contextmanager
    def holding_up(self, store: Store) -> Iterator[None]:
        _, program, _ = self._program(store)
        program.stop()
        try:
            yield
        finally:
            program.cont()

    @contextlib.contextmanager
    def going_away(self, store: Store) -> Iterator[None]:
        address, program, options = self._program(store)
        program.kill()
        try:
            yield
        finally:
            self.__dict__["_programs"][address] = (self._serve(address, options), options)
