"""Attaching (laws QUEUE-1 and ALL-5): which ranks may attach, with which handle, and without free
descriptors.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvplug import ConfigError, KvplugError
from kvplug.net.wire import decode, encode
from kvplug.transport import MessageQueue, QueueHandle, WireError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import QueueSuite, received, sent
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent
from kvplug_testing.waits import raises

CARRIERS: dict[str, Callable[[Any], Any]] = {
    "kvplug.net.wire": lambda plain: decode(encode(plain)),
    "JSON": lambda plain: json.loads(json.dumps(plain)),
}
ROOMS = 24
"""Tries with 0, 1, 2, ... free descriptors. No end should need this many."""


class Handles(QueueSuite):
    """Ranks, handles and descriptors of readers that attach."""

    @law("QUEUE-1")
    @pytest.mark.parametrize("carrier", list(CARRIERS))
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_a_handle_survives_being_carried(self, host: str, carrier: str) -> None:
        if ":" in host and not _has_ipv6():
            pytest.skip("this machine has no IPv6 on its loopback")
        for where in self._places():
            writer = self.writer(1, host=host, **where)
            plain = writer.export_handle().as_plain()
            try:
                carried = CARRIERS[carrier](plain)
            except (TypeError, ValueError) as e:
                raise AssertionError(f"{carrier} does not carry the handle: {e}") from None
            reader = self.attach(QueueHandle.from_plain(carried), host=host, **where)
            self.later(reader.abort)
            assert reader.export_handle() == writer.export_handle()
            sent(writer, 5)
            assert received(reader) == 5

    def _places(self) -> list[dict[str, Any]]:
        """Contexts of readers that share memory with the writer, and of those that need the network."""
        remote = self.spec is not None and self.spec.capabilities.cross_host
        return [{}, {"local_reader_ranks": ()}] if remote else [{}]

    @law("QUEUE-1")
    def test_readers_are_named_by_any_ranks(self) -> None:
        writer = self.endpoint().create([7, 2])
        self.later(writer.abort)
        assert writer.export_handle().reader_ranks == (7, 2)
        readers = [self.reader(writer, rank) for rank in (2, 7)]
        assert [reader.rank for reader in readers] == [2, 7]
        assert [each.rank for each in writer.readers] == [7, 2]
        sent(writer, "x")
        assert [received(reader) for reader in readers] == ["x", "x"]

    @law("QUEUE-1")
    def test_a_rank_that_is_no_reader_is_refused(self) -> None:
        writer = self.writer(2)
        handle = writer.export_handle()
        for rank in (2, -1):
            error = raises(ConfigError, lambda rank=rank: self.attach(handle, rank))  # type: ignore[misc]
            assert "0, 1" in str(error), f"it does not name the readers: {error}"

    @law("QUEUE-1")
    def test_a_rank_attaches_once_also_after_it_has_left(self) -> None:
        writer, (reader,) = self.queue()
        handle = writer.export_handle()
        raises(ConfigError, lambda: self.attach(handle))
        sent(writer, 1)
        assert received(reader) == 1, "an attempt to take its place disturbed the reader"
        reader.close()
        raises(ConfigError, lambda: self.attach(handle))

    @law("QUEUE-1")
    def test_a_handle_of_another_queue_transport_is_refused(self) -> None:
        handle = self.writer(1).export_handle()
        other = QueueHandle.from_plain({**handle.as_plain(), "transport": "some-other"})
        raises(WireError, lambda: self.attach(other))

    @law("QUEUE-1")
    def test_two_ranks_with_one_name_are_refused(self) -> None:
        raises(ConfigError, lambda: self.endpoint().create([1, 1]))

    # -- a process without free descriptors --------------------------------------------------------

    @law("ALL-5", "ALL-7", needs="other_processes", level="long")
    def test_where_no_descriptors_are_left_an_end_is_refused_in_words_and_made_when_there_are(self) -> None:
        writer = self.writer(ROOMS + 2)
        local = self.reader(writer, ROOMS + 1)
        sent(writer, "first")
        context = {"n_reader": ROOMS + 2}
        handle = writer.export_handle().as_plain()
        child = self.start_forked(
            f"{__name__}:_opens_little", self.suite_ref(), context, handle, timeout_s=50
        )
        told = child.result(50)
        assert told == {"attach": "", "create": ""}
        sent(writer, "second")
        assert [received(local), received(local)] == ["first", "second"], "the others were disturbed"


def _opens_little(
    parent: Parent, suite_ref: dict[str, Any], context: dict[str, Any], handle: dict[str, Any]
) -> dict[str, str]:
    """In a separate process: make ends with few free descriptors. Returns what was wrong with each."""
    endpoint = suite_from_ref(suite_ref).endpoint(**context)
    attached = QueueHandle.from_plain(handle)
    ranks = iter(range(ROOMS + 1))  # a failed attempt may use up its rank

    def attach() -> MessageQueue:
        made: MessageQueue = endpoint.create_from_handle(attached, next(ranks), timeout=waits.patience_s)
        return made

    attach().close()  # imports modules, and opens everything that stays open
    endpoint.create().close()
    return {"attach": _with_ever_more(attach), "create": _with_ever_more(endpoint.create)}


def _with_ever_more(make: Callable[[], MessageQueue]) -> str:
    """Make an end with 0, 1, 2, ... free descriptors. Returns what is wrong; empty if nothing is."""
    refused = []
    for room in range(ROOMS):
        try:
            with _descriptors(room):
                end = make()
        except KvplugError as e:
            refused.append(e)
            if not re.search(r"descriptor|RLIMIT_NOFILE|open files", str(e)):
                return f"with {room} descriptors to spare it does not say that they are too few: {e!r}"
        except BaseException as e:
            return f"with {room} descriptors to spare it raised {e!r}, which is no error of kvplug's"
        else:
            end.abort()
            return ""
    return f"{ROOMS - 1} descriptors did not do: {refused[-1]!r}"


@contextmanager
def _descriptors(room: int) -> Iterator[None]:
    """Limit this process to ``room`` more descriptors."""
    import resource

    free = (number for number in itertools.count() if not _is_open(number))
    limit = next(itertools.islice(free, room, None))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
