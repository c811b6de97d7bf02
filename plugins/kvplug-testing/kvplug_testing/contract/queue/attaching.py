"""Attaching (law QUEUE-1): which ranks may attach, and with which handle."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from kvplug import ConfigError, PeerGoneError
from kvplug.transport import QueueHandle, WireError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import QueueSuite, received, sent
from kvplug_testing.waits import Call, raises


class Attaching(QueueSuite):
    """Ranks and handles of readers that attach."""

    @law("QUEUE-1")
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_a_handle_survives_being_carried_as_json(self, host: str) -> None:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as e:
            pytest.skip(f"this machine has no {host}: {e}")
        remote = self.spec is not None and self.spec.capabilities.cross_host
        places: list[dict[str, Any]] = [{}, {"local_reader_ranks": ()}] if remote else [{}]
        for where in places:
            writer = self.writer(1, host=host, **where)
            carried = json.loads(json.dumps(writer.export_handle().as_plain()))
            reader = self.attach(QueueHandle.from_plain(carried), host=host, **where)
            assert reader.export_handle() == writer.export_handle()
            sent(writer, 5)
            assert received(reader) == 5

    @law("QUEUE-1")
    def test_readers_are_named_by_any_ranks(self) -> None:
        writer = self.endpoint().create([7, 2])
        self.later(writer.abort)
        readers = [self.reader(writer, rank) for rank in (2, 7)]
        assert writer.export_handle().reader_ranks == (7, 2)
        assert [(end.is_writer, end.rank) for end in (writer, *readers)] == [
            (True, None),
            (False, 2),
            (False, 7),
        ]
        assert [each.rank for each in writer.readers] == [7, 2]
        sent(writer, "x")
        assert [received(reader) for reader in readers] == ["x", "x"]

    @law("QUEUE-1")
    def test_a_rank_attaches_once_and_others_not_at_all(self) -> None:
        writer, (reader, _) = self.queue(2)
        handle = writer.export_handle()
        for rank in (0, 2, -1):
            raises(ConfigError, lambda rank=rank: self.attach(handle, rank))  # type: ignore[misc]
        other = QueueHandle.from_plain({**handle.as_plain(), "transport": "some-other"})
        raises(WireError, lambda: self.attach(other))
        sent(writer, 1)
        assert received(reader) == 1, "an attempt to take its place disturbed the reader"
        reader.close()
        raises(ConfigError, lambda: self.attach(handle))
        raises(ConfigError, lambda: self.endpoint().create([1, 1]))

    @law("ALL-2")
    def test_nobody_attaches_to_a_writer_that_has_ended(self) -> None:
        writer = self.writer(1)
        handle = writer.export_handle()
        Call(writer.close).result()
        raises(PeerGoneError, lambda: self.attach(handle))
