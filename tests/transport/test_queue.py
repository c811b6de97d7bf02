"""What the queue's ABC brings along for transports: handles, readers in words, waits; and the queue "memory"
where there is no torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvplug import (
    AuthenticationError,
    ConfigError,
    PeerGoneError,
    StatelessGroup,
    TransportError,
    UnsupportedError,
)
from kvplug.net.wire import decode, encode
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Credentials,
    Deadline,
    QueueContext,
    QueueHandle,
    Reader,
    Timeout,
    Wait,
    WireError,
)
from kvplug_testing.groups import local_groups
from kvplug_testing.memory.queue import MemoryQueueEndpoint, _rings
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)

WITHIN_S = 40.0

HANDLE = QueueHandle(
    transport="shm",
    reader_ranks=(1, 3),
    local_reader_ranks=[3],
    data={"name": "x", "contact": "secret-token"},
)


def endpoint(**context: Any) -> MemoryQueueEndpoint:
    return MemoryQueueEndpoint(
        QueueContext(options=None, credentials=Credentials(), **{"timeout_s": 5.0, **context})
    )


# -- handles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", [lambda x: decode(encode(x)), lambda x: json.loads(json.dumps(x))])
def test_a_handle_goes_through_whatever_carries_plain_values(carry: Any) -> None:
    assert QueueHandle.from_plain(carry(HANDLE.as_plain())) == HANDLE


@pytest.mark.parametrize(
    "plain",
    [
        None,
        {},
        {**HANDLE.as_plain(), "transport": 1},
        {**HANDLE.as_plain(), "reader_ranks": ["1"]},
        {**HANDLE.as_plain(), "reader_ranks": [True]},
        {**HANDLE.as_plain(), "local_reader_ranks": 3},
        {**HANDLE.as_plain(), "data": []},
    ],
)
def test_what_is_no_handle_is_refused(plain: Any) -> None:
    with pytest.raises(WireError, match="no handle"):
        QueueHandle.from_plain(plain)


def test_a_handle_keeps_its_data_out_of_logs_and_cannot_be_changed() -> None:
    assert "secret-token" not in repr(HANDLE)
    assert "1, 3" in repr(HANDLE)
    with pytest.raises(TypeError):
        HANDLE.data["name"] = "y"  # type: ignore[index]


def test_a_handle_knows_whose_it_is() -> None:
    HANDLE.check("shm", 3)
    with pytest.raises(WireError, match="'shm' was given to the queue 'zmq'"):
        HANDLE.check("zmq", 3)
    with pytest.raises(ConfigError, match="rank 2 is no reader of this queue; its readers are 1, 3"):
        HANDLE.check("shm", 2)


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (Reader(rank=2, process="pid 7", lag=3), "reader rank 2 (pid 7), 3 messages behind"),
        (Reader(rank=2, process="pid 7", lag=1), "reader rank 2 (pid 7), 1 message behind"),
        (Reader(rank=2, process="pid 7", lag=1, gone="has left"), "reader rank 2 (pid 7; has left)"),
    ],
)
def test_a_reader_in_words(reader: Reader, words: str) -> None:
    assert str(reader) == words


# -- waits -----------------------------------------------------------------------------------------


def test_a_wait_sleeps_until_what_comes_first() -> None:
    def pause(deadline: float | None, interval_s: float, **given: Any) -> float | None:
        return Wait("room", lambda: "rank 1", Deadline.after(deadline), interval_s, **given).pause()

    assert pause(None, 60.0, indefinite=True) is None
    assert 50 < (pause(None, 60.0) or 0) <= 60
    assert 2 < (pause(3.0, 60.0) or 0) <= 3
    assert 0 < (pause(3.0, 60.0, cancel=threading.Event()) or 0) < 0.1


# -- without torch ---------------------------------------------------------------------------------


def test_values_go_from_one_writer_to_all_readers() -> None:
    end = endpoint(n_reader=2)
    with end.create() as writer:
        readers = [end.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
        writer.enqueue({"a": (1, 2)})
        with writer.acquire_write(3) as view:
            view[:] = b"abc"
        for reader in readers:
            assert reader.dequeue() == {"a": (1, 2)}
            with reader.acquire_read() as chunk:
                assert bytes(chunk) == b"abc"
            reader.close()
        with pytest.raises(PeerGoneError, match="no reader is left"):
            writer.enqueue(1)
    assert not _rings


def test_the_context_says_who_is_near() -> None:
    with endpoint(n_reader=3, local_reader_ranks=[0, 2]).create() as writer:
        handle = writer.export_handle()
    assert (handle.reader_ranks, handle.local_reader_ranks) == ((0, 1, 2), (0, 2))


@pytest.mark.parametrize("ranks", [[-1], ["0"], [True]])
def test_ranks_that_are_none_are_refused(ranks: Sequence[Any]) -> None:
    with pytest.raises(ConfigError, match="reader_ranks must be whole numbers, each once"):
        endpoint().create(ranks)


class Deaf(MemoryQueueEndpoint):
    """Its writer cannot be made."""

    def create(self, reader_ranks: Sequence[int] | None = None) -> Any:
        raise TransportError("no memory for a ring")


class Shy(MemoryQueueEndpoint):
    """Reader 1 cannot attach."""

    def create_from_handle(self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        if rank == 1:
            raise AuthenticationError("who are you?")
        return super().create_from_handle(handle, rank, timeout)


class Unspeakable(MemoryQueueEndpoint):
    """Its handle is of what no group carries."""

    def handle_of(self, ring: Any) -> QueueHandle:
        return attrs.evolve(super().handle_of(ring), data={"what": object()})


def in_a_group(kind: type[MemoryQueueEndpoint], writer_rank: int = 2) -> list[Any]:
    """What three ranks have made, or what was raised there."""
    end = kind(QueueContext(options=None, credentials=Credentials(), timeout_s=WITHIN_S))
    with local_groups(WITHIN_S) as make:
        calls = [
            Call(lambda group=group: end.create_from_process_group(group, writer_rank=writer_rank))  # type: ignore[misc]
            for group in make(3)
        ]
        return [call.outcome(WITHIN_S) for call in calls]


@pytest.mark.parametrize(
    ("kind", "words", "where", "cause"),
    [
        (
            Deaf,
            "rank 2 cannot make its end of the queue: TransportError: no memory for a ring",
            2,
            TransportError,
        ),
        (
            Shy,
            "rank 1 cannot make its end of the queue: AuthenticationError: who are you?",
            1,
            AuthenticationError,
        ),
        (Unspeakable, "rank 2 cannot make its end of the queue: UnsupportedError: ", 2, UnsupportedError),
    ],
)
def test_where_one_rank_cannot_all_are_told_which_and_why_and_nothing_is_left(
    kind: type[MemoryQueueEndpoint], words: str, where: int, cause: type[Exception]
) -> None:
    made = in_a_group(kind)
    assert [type(each) for each in made] == [TransportError] * 3
    assert all(words in str(each) for each in made)
    causes = [type(each.__cause__) for each in made]
    assert causes == [cause if number == where else type(None) for number in range(3)]
    assert not _rings


def test_a_rank_that_is_none_and_a_group_that_is_none_are_refused() -> None:
    with StatelessGroup.create("unix:", rank=0, world_size=1) as group:
        with pytest.raises(ConfigError, match=r"a rank in 0\.\.0, got 1"):
            endpoint().create_from_process_group(group, writer_rank=1)
        with endpoint().create_from_process_group(group) as alone:
            assert alone.is_writer
    with pytest.raises(
        UnsupportedError, match=r"StatelessGroup or a torch.distributed.ProcessGroup is needed, not a dict"
    ):
        endpoint().create_from_process_group({})  # type: ignore[arg-type]
    assert not _rings
