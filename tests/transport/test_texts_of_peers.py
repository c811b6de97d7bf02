"""Texts of peers that have proved themselves and send newlines, escape codes or megabytes, at each door."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplug import Config, HandshakeError, KvplugError, Registry, TransportError
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.errors import TensorMismatchError, WireError
from kvplug.net.trust.identity import IDENTITY_SIZE, PeerIdentity, decode_identity
from kvplug.transport.communicator.calls import Call, check_same
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.group.mesh import connect_ranks
from kvplug.transport.queue import _agreed

ODD = "no room\n\x1b[2J\x1b]0;root\x07\N{RIGHT-TO-LEFT OVERRIDE}" + "x" * 100_000
LONGEST = 3000


def check(text: str, *, lines: int = 1) -> None:
    """Assert that it can be printed, that its length is bounded, and that it contains what the peer sent."""
    assert "no room" in text
    assert len(text) < LONGEST
    assert len(text.splitlines()) <= lines
    assert all(line.isprintable() for line in text.splitlines())


def as_sent(**texts: str) -> bytes:
    """An identity as a peer writes it that is not this version of kvplug."""
    fields = {"boot_id": "", "pid_ns": "", "net_ns": "", "pid": 7, "start_time": 0, "host": "", "label": ""}
    packed = msgspec.msgpack.encode({**fields, **texts})
    return (len(packed).to_bytes(2, "little") + packed).ljust(IDENTITY_SIZE, b"\0")


@pytest.mark.parametrize("field", ["host", "label"])
def test_of_an_identity(field: str) -> None:
    found = decode_identity(as_sent(**{field: ODD[:300]}))
    check(str(found))
    assert len(getattr(found, field).encode()) <= 96


class Scripted:
    """A control channel whose other end has sent all this already."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.peer = PeerIdentity.of_this_process("the peer")

    def send(self, value: Any, timeout: Any = None) -> None:
        pass

    def recv(self, timeout: Any = None) -> Any:
        return self.replies.pop(0)


@pytest.fixture
def settings() -> LinkSettings:
    return LinkSettings(resolved=ResolvedConfig(Config.from_dict({}), Registry()))


@pytest.mark.parametrize("error", [ODD, None, ["x"] * 9999])
def test_of_a_peer_that_cannot_listen(settings: LinkSettings, error: Any) -> None:
    channel: Any = Scripted({"pipe": "p", "error": error})
    agreement: Any = type("A", (), {"transports": {"cpu": type("C", (), {"chosen": "cpu"})()}})()
    link = ControlLink(settings, channel, agreement, accepted=False)
    with pytest.raises(
        (HandshakeError, WireError), match=r"cannot listen on 'cpu'|pipe 'p'\.error"
    ) as caught:
        link.open_pipe("p", timeout=1)
    if error == ODD:
        assert isinstance(caught.value, HandshakeError)
        check(caught.value.reasons[0])
    assert len(str(caught.value)) < LONGEST


class Answering:
    """A rank's access to a store that answers everything so."""

    def __init__(self, *answer: Any) -> None:
        self.answer = answer

    def ask(self, request: Any) -> Any:
        return self.answer

    def send(self, request: Any) -> None:
        pass

    def close(self, deadline: Any) -> None:
        pass

    def after_fork_in_child(self) -> None:
        pass


@pytest.mark.parametrize("status", ["timeout", "gone", "large", "refused", "odd"])
def test_of_rank_0(status: str) -> None:
    group = StatelessGroup(Answering(status, ODD), 1, 2, 1.0, None)
    with pytest.raises(KvplugError) as caught:
        group.get("key")
    check(str(caught.value))


@pytest.mark.parametrize("sent", [("failed", ODD), ("failed", 7), ("contact",), "contact", 5, {"a": 1}])
def test_of_a_rank_that_cannot_listen(sent: Any) -> None:
    class Group:
        rank, world_size = 1, 2

        def recv(self, src: int, timeout: Any = None) -> Any:
            return sent

    with pytest.raises((TransportError, WireError)) as caught:
        connect_ranks(Group(), None)  # type: ignore[arg-type]
    if sent == ("failed", ODD):
        check(str(caught.value))


@pytest.mark.parametrize("sent", [ODD, None, 7, ["x"]])
def test_of_a_rank_that_cannot_make_its_end_of_a_queue(sent: Any) -> None:
    class Rendezvous:
        rank, world_size = 0, 2

        def all_gather(self, value: Any, timeout: Any = None) -> list[Any]:
            return [value, sent]

    from kvplug.net.deadline import Deadline

    with pytest.raises(TransportError, match="rank 1 cannot make its end") as caught:
        _agreed(Rendezvous(), None, None, Deadline.after(1))  # type: ignore[arg-type]
    assert str(caught.value).isprintable() and len(str(caught.value)) < 9000


@pytest.mark.parametrize(
    "theirs",
    [
        {"call": "all_reduce", "refused": ODD},
        {"call": ODD, "arguments": "dtype float32"},
        {"call": "all_reduce", "arguments": ODD},
    ],
)
def test_of_a_ranks_call(theirs: dict[str, Any]) -> None:
    ours = Call("all_reduce", "dtype float32, shape [2]")
    with pytest.raises(TensorMismatchError) as caught:
        check_same("all_reduce", [ours, Call.decoded(1, msgspec.msgpack.encode(theirs))])
    check(str(caught.value), lines=3)
