"""The store "mooncake": pages in the pool of memory of a Mooncake master and its holders."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvplug import CapacityError, ConfigError, TransportError
from kvplug.transport import Address, BlockingStore, Deadline, MissReason, close_after_fork
from kvplug_mooncake.landing import LateError
from kvplug_mooncake.options import MooncakeOptions
from kvplug_mooncake.process import ClientProcess
from kvplug_mooncake.protocol import (
    MARK,
    MAX_KEYS,
    Answer,
    Clear,
    Exists,
    Get,
    Outcome,
    Put,
    Remove,
    Request,
    Setup,
)

_log = logging.getLogger(__name__)

_MASTER: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>[0-9]{1,5})")
_GRACE_S: Final = 0.5
"""Extra time for the client process, which has the same limit, to report that the limit was reached."""
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 - recognised, not bound


class MooncakeStore(BlockingStore):
    """Pages under keys, which every process that names the master and the prefix shares."""

    is_shared = True

    def __init__(self, context: BlockingStore.Context) -> None:
        """Start the client process, without waiting for it.

        Raises:
            ConfigError: the options are wrong, or the config does not permit Mooncake's connections between
                hosts.
            ResourceExhaustedError, OSError: memory, descriptors or threads ran out.
        """
        options: MooncakeOptions = context.options
        self.location = options.master
        self.num_threads = options.lanes
        self.timeout_s = options.timeout_s + _GRACE_S
        self._log_file = options.log_file
        self._setup = _setup_of(context, options)
        if options.log_file is not None:
            try:
                open(options.log_file, "ab").close()
            except OSError as e:
                raise ConfigError(f"options.mooncake.log_file: the file cannot be written: {e}") from e
        self._lock = threading.Lock()
        self._is_closed = False
        self.client = ClientProcess(self._setup, self._log_file)
        close_after_fork(self)

    # -- the client process --------------------------------------------------------------------

    def running(self) -> ClientProcess:
        """The client, ready.

        Raises:
            TransportError: it cannot be started, or cannot reach the master.
        """
        with self._lock:
            if self._is_closed:
                raise TransportError("the store was closed")
            if self.client.is_gone:
                self.client = ClientProcess(self._setup, self._log_file)
            client = self.client
        client.wait_until_ready()
        return client

    @contextmanager
    def _calling(self) -> Iterator[tuple[ClientProcess, Deadline]]:
        """The client, for calls until a deadline. A client that hangs, or has too many late calls, is
        replaced.

        Raises:
            BlockingStore.PageError: a call was given up.
        """
        client = self.running()
        try:
            yield client, Deadline.after(self.timeout_s)
        except LateError as e:
            if client.num_late > self._setup.lanes or client.is_stuck():
                _log.warning("Mooncake's client process is replaced: %d calls do not end", client.num_late)
                client.kill()
            raise BlockingStore.PageError(MissReason.TIMEOUT, str(e)) from e

    def _each(self, keys: Sequence[bytes], make: Callable[[int, list[bytes]], Request]) -> Iterator[Answer]:
        for at in range(0, len(keys), MAX_KEYS):
            some = list(keys[at : at + MAX_KEYS])
            yield self._ask(lambda number, some=some: make(number, some))  # type: ignore[misc]

    def _ask(self, make: Callable[[int], Request]) -> Answer:
        """The master's answer to a request that is not about a single page.

        Raises:
            TransportError: no answer arrived.
        """
        with self._calling() as (client, deadline):
            answer = client.call(make, deadline)
        if answer.outcome is not Outcome.DONE:
            raise _error_of(answer, self._setup.master)
        return answer

    # -- pages ---------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(held) for answer in self._each(keys, Exists) for held in answer.held]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        nbytes = len(MARK) + sum(map(len, into))
        try:
            length = self._read(key, into, nbytes)
            if length is not None and nbytes < len(MARK) + length <= self._setup.landing_bytes:
                # larger than expected: its beginning identifies it
                length = self._read(key, into, len(MARK) + length)
        except CapacityError as e:
            raise BlockingStore.PageError(MissReason.NO_MEMORY, str(e)) from e
        return length

    def _read(self, key: bytes, into: Sequence[memoryview], nbytes: int) -> int | None:
        """:meth:`read` with ``nbytes`` of the landing area; fills nothing if the page is larger."""
        with self._calling() as (client, deadline), client.lent(nbytes, deadline) as slot:
            answer = client.call(lambda number: Get(number, key, slot.at, nbytes), deadline, slot)
            if answer.outcome is Outcome.DONE and answer.nbytes <= nbytes:
                value = slot.view[: answer.nbytes]
                if value[: len(MARK)] != MARK:
                    return 0  # not a page: it will be removed as a wrong one
                _spread(value[len(MARK) :], into)
        if answer.outcome is Outcome.DONE:
            return answer.nbytes - len(MARK)
        if answer.outcome is Outcome.ABSENT:
            return None
        raise _error_of(answer, self._setup.master)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        nbytes = len(MARK) + sum(map(len, page))
        with self._calling() as (client, deadline), client.lent(nbytes, deadline) as slot:
            _gather(slot.view, (memoryview(MARK), *page))
            answer = client.call(lambda number: Put(number, key, slot.at, nbytes), deadline, slot)
        if answer.outcome in (Outcome.DONE, Outcome.NO_ROOM):
            return answer.outcome is Outcome.DONE
        raise _error_of(answer, self._setup.master)

    def remove(self, keys: Sequence[bytes]) -> None:
        for _ in self._each(keys, Remove):
            pass

    def clear(self) -> None:
        self._ask(Clear)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self.client.close()

    def _after_fork_in_child(self) -> None:
        self._is_closed = True


def _setup_of(context: BlockingStore.Context, options: MooncakeOptions) -> Setup:
    host = "127.0.0.1" if context.host.startswith("unix:") else context.host
    is_exposed = not (
        Address(host).is_loopback and Address(options.master.rpartition(":")[0].strip("[]")).is_loopback
    )
    if is_exposed and not context.allow_unauthenticated_data_plane:
        raise ConfigError(
            f"Mooncake's connections between hosts (host {host}, options.mooncake.master {options.master})"
            " are not authenticated, so any host can read and change pages: use a network that only trusted"
            " hosts reach, and set allow_unauthenticated_data_plane"
        )
    if host in _WILDCARDS or ":" in host:
        if options.segment_bytes:
            raise ConfigError(
                f"options.mooncake.segment_bytes: the host is {host!r}, but holders need an IPv4 address or"
                " a name: set host to one"
            )
        host = "127.0.0.1"  # without a segment it is never dialled
    return Setup(
        host=host,
        master=options.master,
        prefix=options.prefix,
        protocol=options.protocol,
        devices=options.devices,
        segment_bytes=options.segment_bytes,
        landing_bytes=options.landing_bytes,
        lanes=options.lanes,
        timeout_s=options.timeout_s,
        is_exposed=is_exposed,
    )


def _error_of(answer: Answer, master: str) -> TransportError:
    """The error to raise for an answer. Only a lost master means that the store is gone."""
    match answer.outcome:
        case Outcome.LATE:
            return BlockingStore.PageError(MissReason.TIMEOUT, answer.text)
        case Outcome.HOLDER_GONE:
            return BlockingStore.PageError(MissReason.STORE_GONE, answer.text)
        case Outcome.MASTER_GONE:
            return TransportError(f"the Mooncake master at {master} does not answer: {answer.text}")
        case _:
            return BlockingStore.PageError(MissReason.OTHER, answer.text)


def _gather(into: memoryview, parts: Sequence[memoryview]) -> None:
    at = 0
    for part in parts:
        into[at : at + len(part)] = part
        at += len(part)


def _spread(value: memoryview, into: Sequence[memoryview]) -> None:
    """Copy as much of the value as exists into one buffer after the other."""
    for view in into:
        part, value = value[: len(view)], value[len(view) :]
        view[: len(part)] = part
