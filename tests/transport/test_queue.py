"""What the queue's ABC brings along for transports: handles, and queues over groups; without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvplug import AuthenticationError, ConfigError, TransportError
from kvplug.net.wire import decode, encode
from kvplug.transport import DEFAULT_TIMEOUT, Credentials, QueueEndpoint, Timeout, WireError
from kvplug_testing import peers
from kvplug_testing.groups import local_groups
from kvplug_testing.sources import module_at
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)

WITHIN_S = 40.0
RelayEndpoint = module_at(str(Path(__file__).parents[1] / "lab/subjects/relay.py")).RelayEndpoint

HANDLE = QueueEndpoint.Handle(
    transport="shm",
    reader_ranks=(1, 3),
    local_reader_ranks=[3],
    data={"name": "x", "contact": "secret-token"},
)


# -- handles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", [lambda x: decode(encode(x)), lambda x: json.loads(json.dumps(x))])
def test_a_handle_goes_through_whatever_carries_plain_values(carry: Any) -> None:
    assert QueueEndpoint.Handle.from_plain(carry(HANDLE.as_plain())) == HANDLE


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
def test_an_invalid_handle_is_refused(plain: Any) -> None:
    with pytest.raises(WireError, match="queue handle"):
        QueueEndpoint.Handle.from_plain(plain)


def test_a_handle_keeps_its_data_out_of_logs_and_cannot_be_changed() -> None:
    assert "secret-token" not in repr(HANDLE)
    assert "1, 3" in repr(HANDLE)
    with pytest.raises(TypeError):
        HANDLE.data["name"] = "y"  # type: ignore[index]


def test_a_handle_is_checked_for_its_transport_and_its_readers() -> None:
    HANDLE.check("shm", 3)
    with pytest.raises(WireError, match="'shm' was given to the queue 'zmq'"):
        HANDLE.check("zmq", 3)
    with pytest.raises(ConfigError, match="rank 2 is not a reader of this queue; its readers are 1, 3"):
        HANDLE.check("shm", 2)


# -- over groups -----------------------------------------------------------------------------------


class Deaf(RelayEndpoint):
    """Its writer cannot be made."""

    def create(self, reader_ranks: Sequence[int] | None = None) -> Any:
        raise TransportError("no memory for a ring")


class Shy(RelayEndpoint):
    """Reader 1 cannot attach."""

    def create_from_handle(
        self, handle: QueueEndpoint.Handle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Any:
        if rank == 1:
            raise AuthenticationError("who are you?")
        return super().create_from_handle(handle, rank, timeout)


def in_a_group(kind: type[QueueEndpoint], writer_rank: int = 2) -> list[Any]:
    """What three ranks have made, or what was raised there."""
    end = kind(QueueEndpoint.Context(options=None, credentials=Credentials(), timeout_s=WITHIN_S))
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
    ],
)
def test_where_one_rank_fails_all_ranks_get_its_number_and_the_reason_and_nothing_is_left(
    kind: type[QueueEndpoint], words: str, where: int, cause: type[Exception]
) -> None:
    with peers.nothing_left(5.0):
        made = in_a_group(kind)
    assert [type(each) for each in made] == [TransportError] * 3
    assert all(words in str(each) for each in made)
    causes = [type(each.__cause__) for each in made]
    assert causes == [cause if number == where else type(None) for number in range(3)]
