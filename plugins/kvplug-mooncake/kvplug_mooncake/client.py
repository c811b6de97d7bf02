"""The program of Mooncake's client process: ``python -m kvplug_mooncake.client SOCKET MEMORY``.

:class:`~kvplug_mooncake.process.ClientProcess` starts it with the numbers of two inherited descriptors: a
packet socket, and the memory of the landing area. Mooncake's calls block as long as a holder does, cannot
be cancelled, and belong to threads that do not survive a fork. In a separate process they do not harm the
engine, and end with the process.

Lanes answer the requests, each in its own thread. There are twice as many lanes as concurrent calls of the
parent, since the parent gives up late calls. When the parent closes the socket or is killed, the program
finishes the running calls, so that no page stays half written, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

from kvplug_mooncake.ports import CLOSED, LOOPBACK, StrangerError, restrict
from kvplug_mooncake.protocol import (
    LAYOUT,
    MAX_PACKET,
    Answer,
    Clear,
    Exists,
    Get,
    Outcome,
    Ping,
    Put,
    Ready,
    Refused,
    Remove,
    Request,
    Setup,
    decode_request,
    encode,
    name_of,
)

_CONNECT_S: Final = 2.0
_SETUP_TRIES: Final = 3
"""Each attempt uses other ports."""
_SUSPECT_S: Final = 10.0
"""Time after which the master drops a silent holder (its option client_ttl)."""
_OTHER_WRITER_S: Final = 1.0
_POLL_S: Final = 0.002

# Mooncake's ErrorCode (mooncake-store/include/types.h)
_NO_ROOM: Final = -200
_INVALID: Final = -600
_NOT_FOUND: Final = -704
_ABSENT: Final = frozenset({-703, _NOT_FOUND})
"""Codes for "not ready" and "not found"."""
_LEASE_ENDED: Final = -707
_EXISTS: Final = -705
_MASTER: Final = range(-999, -899)


class SetupError(Exception):
    """This process cannot be a client. The message has the reason and the remedy."""


class Client:
    """Mooncake's store, and the state of its holders."""

    def __init__(self, setup: Setup, landing: mmap.mmap) -> None:
        """Raises SetupError."""
        self._setup = setup
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(landing))
        self._suspects: dict[str, float] = {}
        """Holders that did not answer in time, and until when they are avoided."""
        self._reading: dict[int, tuple[str, float]] = {}
        """Pages that are being read, and until when their holders are not suspects."""
        _find_master(setup.master)
        _set_limits(setup.timeout_s)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as e:
            raise SetupError(f"Mooncake cannot be imported: {e}") from e
        self.store: Any = MooncakeDistributedStore()
        code = self.store.setup(
            setup.host, "P2PHANDSHAKE", setup.segment_bytes, 0, setup.protocol, setup.devices, setup.master
        )
        if code:
            raise SetupError(
                f"Mooncake's setup ended with {code} (host {setup.host!r}, master {setup.master!r});"
                " see the log in options.mooncake.log_file"
            )
        _close_ports(setup)
        if code := self.store.register_buffer(self._base, setup.landing_bytes):
            raise SetupError(f"Mooncake cannot register the landing area: {code}")

    def _name(self, key: bytes) -> str:
        return name_of(self._setup.prefix, key)

    # -- requests ------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Blocks as long as Mooncake does."""
        match request:
            case Ping(number):
                return Answer(number, Outcome.DONE)
            case Exists(number, keys):
                return self._exists(number, [self._name(key) for key in keys])
            case Get(number, key, at, nbytes):
                return self._get(number, self._name(key), at, nbytes)
            case Put(number, key, at, nbytes):
                return self._put(number, self._name(key), at, nbytes)
            case Remove(number, keys):
                codes = self.store.batch_remove([self._name(key) for key in keys], True)
                bad = [code for code in codes if code < 0 and code not in _ABSENT]
                return self._failed(number, bad[0]) if bad else Answer(number, Outcome.DONE)
            case Clear(number):
                prefix = self._setup.prefix.replace(".", "[.]")
                code = self.store.remove_by_regex(f"^{prefix}:{LAYOUT}:[0-9a-f]+$", True)
                return self._failed(number, code) if code < 0 else Answer(number, Outcome.DONE)
            case _:
                raise SetupError(f"{type(request).__name__} must be the first message, and only that")

    def _exists(self, number: int, names: Sequence[str]) -> Answer:
        codes = self.store.batch_is_exist(names)
        if bad := [code for code in codes if code in _MASTER]:
            return self._failed(number, bad[0])
        return Answer(number, Outcome.DONE, held=bytes(code == 1 for code in codes))

    def _get(self, number: int, name: str, at: int, nbytes: int) -> Answer:
        if self._is_suspect(name):
            return Answer(number, Outcome.LATE, text="its holder did not answer a moment ago")
        began = time.monotonic()
        self._reading[number] = name, began + self._setup.timeout_s
        try:
            code = self.store.get_into(name, self._base + at, nbytes)
        finally:
            self._reading.pop(number, None)
        if code >= 0:
            return Answer(number, Outcome.DONE, nbytes=code)
        if code == _INVALID:
            size = self.store.get_size(name)
            if size > nbytes:
                return Answer(number, Outcome.DONE, nbytes=size)
            code = min(size, code)
        return self._failed(number, code, name, began)

    def _put(self, number: int, name: str, at: int, nbytes: int) -> Answer:
        began = time.monotonic()
        code = self.store.put_from(name, self._base + at, nbytes)
        if code and code != _EXISTS:
            return self._failed(number, code, name, began)
        # It also succeeds while another client writes this page, and that client may die.
        limit = time.monotonic() + min(self._setup.timeout_s, _OTHER_WRITER_S)
        while (held := self.store.is_exist(name)) == 0 and time.monotonic() < limit:
            if self.store.get_size(name) == _NOT_FOUND:  # it was complete, and is already removed or evicted
                return Answer(number, Outcome.DONE)
            time.sleep(_POLL_S)
        if held == 1:
            return Answer(number, Outcome.DONE)
        if held in _MASTER:
            return self._failed(number, held)
        return Answer(number, Outcome.LATE, text="another client has not finished this page")

    def _failed(self, number: int, code: int, name: str = "", began: float = 0.0) -> Answer:
        if code in _ABSENT:
            return Answer(number, Outcome.ABSENT)
        if code == _NO_ROOM:
            return Answer(number, Outcome.NO_ROOM)
        if code in _MASTER:
            return Answer(number, Outcome.MASTER_GONE, text=f"Mooncake's code {code}")
        if code == _LEASE_ENDED:
            return Answer(number, Outcome.LATE, text="its lease ended while it was read")
        if not name:
            return Answer(number, Outcome.FAILED, text=f"Mooncake's code {code}")
        if time.monotonic() - began < self._setup.timeout_s / 2:
            return Answer(number, Outcome.HOLDER_GONE, text=f"Mooncake's code {code}")
        self._suspect(name)
        return Answer(number, Outcome.LATE, text="its holder does not answer")

    # -- holders that do not answer ------------------------------------------------------------

    def _is_suspect(self, name: str) -> bool:
        """Whether all holders of the page are suspects. Asks the master only if there are suspects."""
        now = time.monotonic()
        for number, (other, until) in list(self._reading.items()):
            if until < now:  # Mooncake's first contact with a holder may take a minute, whatever its limits
                self._reading[number] = other, float("inf")
                self._suspect(other)
        suspects = {holder for holder, until in self._suspects.copy().items() if until > now}
        if not suspects:
            self._suspects.clear()
            return False
        holders = self._holders(name)
        return bool(holders) and suspects.issuperset(holders)

    def _suspect(self, name: str) -> None:
        for holder in self._holders(name):
            self._suspects[holder] = time.monotonic() + _SUSPECT_S

    def _holders(self, name: str) -> list[str]:
        found = self.store.batch_get_replica_desc([name]).get(name, ())
        return [
            each.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for each in found
            if each.is_memory_replica()
        ]


def _find_master(master: str) -> None:
    """Check that the master can be reached, since Mooncake's own search takes more than a minute."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as e:
        raise SetupError(
            f"found no Mooncake master at {master} ({e.strerror or e}): start mooncake_master there, or"
            " set options.mooncake.master"
        ) from e


def _set_limits(timeout_s: float) -> None:
    """Set Mooncake's time limits, which it reads from the environment. Its defaults are 30 s and more."""
    os.environ.update(
        MC_TCP_PROGRESS_TIMEOUT_SEC=str(max(1, int(timeout_s))),
        MC_TCP_STATUS_TIMEOUT_SEC=str(max(1, int(timeout_s))),
        MC_RPC_TIMEOUT_MS=str(int(timeout_s * 800)),
        MC_RPC_CONNECT_TIMEOUT_MS=str(int(timeout_s * 800)),
        MC_STORE_CLIENT_SETUP_RETRIES=str(_SETUP_TRIES),
    )


def _close_ports(setup: Setup) -> None:
    if setup.is_exposed and setup.segment_bytes:
        return  # other hosts read and write its segment
    try:
        restrict(LOOPBACK if setup.segment_bytes else CLOSED)
    except OSError as e:
        if not setup.is_exposed:
            raise SetupError(
                f"Mooncake's ports are open to other hosts, and this system cannot close them ({e}): set"
                " allow_unauthenticated_data_plane if only hosts that you trust reach this one"
            ) from e
    except StrangerError as e:
        raise SetupError(str(e)) from e


def _work(client: Client, sock: socket.socket) -> None:
    """Run one lane: receive and answer requests until the parent is gone."""
    while packet := _received(sock):
        request = decode_request(packet)
        try:
            answer = client.answer(request)
        except Exception as e:
            answer = Answer(getattr(request, "number", 0), Outcome.FAILED, text=f"{type(e).__name__}: {e}")
        with contextlib.suppress(OSError):  # the parent is gone
            sock.send(encode(answer))


def _received(sock: socket.socket) -> bytes:
    """The next packet; empty if the parent is gone. A parent killed before reading an answer is a reset."""
    try:
        return sock.recv(MAX_PACKET)
    except ConnectionResetError:
        return b""


def main() -> None:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS):  # the parent may have low limits for a moment
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)
    sock = socket.socket(fileno=int(sys.argv[1]))
    setup = decode_request(_received(sock))
    assert isinstance(setup, Setup)
    landing = mmap.mmap(int(sys.argv[2]), setup.landing_bytes)
    os.close(int(sys.argv[2]))
    try:
        client = Client(setup, landing)
    except SetupError as e:
        sock.send(encode(Refused(str(e))))
        os._exit(1)
    lanes = [threading.Thread(target=_work, args=(client, sock), daemon=True) for _ in range(2 * setup.lanes)]
    for lane in lanes:
        lane.start()
    sock.send(encode(Ready()))
    parent = select.poll()
    parent.register(sock, select.POLLRDHUP)
    parent.poll()
    limit = time.monotonic() + setup.timeout_s + 1
    for lane in lanes:
        lane.join(max(0.0, limit - time.monotonic()))
    if setup.segment_bytes:  # tell the master at once that its pages are gone
        closing = threading.Thread(target=client.store.close, daemon=True)
        closing.start()
        closing.join(setup.timeout_s)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # skip Mooncake's destructors, which wait for holders
