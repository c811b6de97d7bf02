"""The handshake itself: a Hello in both directions, one function at each end, and a verdict.

Both ends do the same, so neither leads::

    hello    ->      <-  hello
    (each agrees, or not, by itself)
    verdict  ->      <-  verdict

An end that refuses sends a verdict too, and each waits for the other's, so that both know every reason before
either hangs up (closing a socket with unread bytes discards what was sent last).
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from kvplug.errors import (
    CapacityError,
    HandshakeError,
    PeerGoneError,
    TimeoutError,
    UnsupportedError,
    WireError,
)
from kvplug.negotiation.handshake.agreement import Agreement, agree
from kvplug.negotiation.handshake.hello import Hello
from kvplug.negotiation.handshake.plain import MAX_LIST, MAX_TEXT, is_same
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.peer_text import peer_text
from kvplug.net.wire import values
from kvplug.net.wire.validate import Limits

MAX_HELLO_BYTES = 128 << 10
"""Of an encoded Hello. Some twenty transports of twenty fields each fit in a tenth of it."""
_LIMITS = Limits(max_bytes=MAX_HELLO_BYTES, max_depth=8, max_items=8192)
_VERDICT_S = 5.0
"""How long an end that refuses waits for the other's reasons."""

_log = logging.getLogger(__name__)


class ValueChannel(Protocol):
    """The part of ``kvplug.net.trust.channel.Channel`` that the handshake needs."""

    @property
    def peer(self) -> object:
        """The identity of the other end; its ``str`` goes into messages."""

    def send(self, value: Any, timeout: Timeout = ...) -> None:
        """One value to the peer."""

    def recv(self, timeout: Timeout = ...) -> Any:
        """The next value from the peer."""


def exchange(
    channel: ValueChannel,
    local: Hello,
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    announced: str = "",
    default_timeout_s: float = 30.0,
) -> Agreement:
    """Shake hands over an authenticated channel, which stays open in success and in failure.

    ``announced``: the engine that a directory announced at the address, as :func:`identity_of` names it.

    Raises:
        HandshakeError: what :func:`~kvplug.negotiation.handshake.agreement.agree` found, or what is wrong
            with the peer's Hello, or what the peer found; the peer's ``exchange`` raises for the same
            reasons.
        TimeoutError, PeerGoneError, WireError: from the channel.
    """
    deadline = Deadline.after(timeout, default_timeout_s)
    peer = str(channel.peer)
    hello = local.to_plain()
    fault = _too_large(hello)
    if fault:
        raise HandshakeError(f"hello: ours {fault}", peer=peer)
    channel.send({"hello": hello}, timeout=deadline.remaining())
    received = channel.recv(timeout=deadline.remaining())
    remote: Hello | None = None
    try:
        remote = hello_in(received)
        _check_announced(announced, local, remote)
        agreement = agree(local, remote)
    except HandshakeError as e:
        _log.debug("handshake with %s refused: %s", peer, e)
        _swap_verdicts(channel, _refusal(e.reasons), deadline, refusing=True)
        refused = HandshakeError(*e.reasons, peer=peer)
        refused.remote = remote
        raise refused from e
    verdict = {"agreed": _result(agreement)}
    theirs = _swap_verdicts(channel, verdict, deadline, refusing=False)
    try:
        _compare(verdict, theirs, peer)
    except HandshakeError as e:
        e.remote = remote
        raise
    _log.debug("agreed with %s: %s", peer, verdict)
    return agreement


def identity_of(engine_id: str, epoch: str) -> str:
    """One start of an engine's process, as text without white space."""
    return f"{epoch}/{engine_id}"


def _check_announced(announced: str, local: Hello, remote: Hello) -> None:
    """Raises HandshakeError: another engine answers than the one that a directory announced there."""
    if not announced or announced == identity_of(remote.engine_id, remote.epoch):
        return
    engine_id = announced.partition("/")[2]
    if engine_id == remote.engine_id:
        raise HandshakeError(
            f"engine_id: {engine_id!r} has restarted since it was announced; it is connected to when its new"
            " announcement comes"
        )
    other = "this engine itself" if remote.epoch == local.epoch else f"engine {remote.engine_id!r}"
    raise HandshakeError(
        f"engine_id: a directory announces {engine_id!r} at this address, and {other} answers there; set host"
        f" at {engine_id!r} to an address of its own that all other engines reach"
    )


def _too_large(plain: object) -> str:
    try:
        values.encode(plain, limits=_LIMITS)
    except (CapacityError, UnsupportedError) as e:
        return f"cannot be sent: {e}"
    return ""


def hello_in(received: object) -> Hello:
    """The Hello in the first value of a peer.

    Raises:
        HandshakeError: it is none, is too large, or has fields that are missing or malformed.
    """
    if type(received) is not dict or "hello" not in received:
        raise HandshakeError("hello: the peer sent something else first; is it another kvplug version?")
    fault = _too_large(received["hello"])
    if fault:
        raise HandshakeError(f"hello: theirs {fault.replace('sent', 'accepted', 1)}")
    return Hello.from_plain(received["hello"])


def _refusal(reasons: tuple[str, ...]) -> dict[str, Any]:
    return {"refused": [reason[:MAX_TEXT] for reason in reasons[: 4 * MAX_LIST]]}


def _result(agreement: Agreement) -> dict[str, Any]:
    """The result that both ends must agree on, in plain values."""
    return {
        "wire_minor": agreement.wire_minor,
        "checksum": agreement.checksum,
        "transports": {device: chosen.chosen for device, chosen in sorted(agreement.transports.items())},
    }


def _swap_verdicts(
    channel: ValueChannel, verdict: dict[str, Any], deadline: Deadline, *, refusing: bool
) -> object:
    if not refusing:
        channel.send(verdict, timeout=deadline.remaining())
        return channel.recv(timeout=deadline.remaining())
    left = deadline.remaining()
    last = Deadline.after(_VERDICT_S if left is None else min(left, _VERDICT_S))
    try:
        channel.send(verdict, timeout=last.remaining())
        return channel.recv(timeout=last.remaining())
    except (PeerGoneError, TimeoutError, WireError) as e:
        _log.debug("%s did not hear or say why: %s", channel.peer, e)
        return None


def _compare(ours: dict[str, Any], theirs: object, peer: str) -> None:
    """Return if the peer came to the same result.

    Raises:
        HandshakeError: the peer refuses, and why; or it agrees to something else, which two versions of
            kvplug with different rules would do.
    """
    if is_same(theirs, ours):
        return
    if type(theirs) is dict and "refused" in theirs:
        listed = theirs["refused"] if type(theirs["refused"]) is list else []
        reasons = [peer_text(reason) for reason in listed[: 4 * MAX_LIST] if type(reason) is str]
        raise HandshakeError(*(reasons or ["the peer gave no reason"]), peer=f"{peer} (by the peer)")
    raise HandshakeError(
        "agreement: the two ends came to different results from the same facts, ours"
        f" {ours['agreed']}; install the same version of kvplug at both ends",
        peer=peer,
    )
