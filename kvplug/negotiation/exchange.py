"""The handshake: both ends exchange Hellos and verdicts.

Both ends do the same, so neither is the leader::

    hello    ->      <-  hello
    (each end decides by itself)
    verdict  ->      <-  verdict

An end that refuses also sends a verdict, and each end waits for the other's. So both know every reason before
either hangs up (closing a socket with unread bytes discards the bytes sent last).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

import attrs

from kvplug.errors import (
    CapacityError,
    HandshakeError,
    PeerGoneError,
    TimeoutError,
    UnsupportedError,
    WireError,
)
from kvplug.negotiation.agreement import Agreement, agree
from kvplug.negotiation.hello import MAX_LIST, MAX_TEXT, Hello, hello_from
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.peer_text import peer_text
from kvplug.net.wire import Limits, encode, from_plain, to_plain

MAX_HELLO_BYTES: Final = 128 << 10
"""Limit for an encoded Hello. About twenty transports of twenty fields each fit in a tenth of it."""
_LIMITS = Limits(max_bytes=MAX_HELLO_BYTES, max_depth=8, max_items=8192)
_MAX_REASONS = 4 * MAX_LIST
_DEFAULT_S = 30.0
_VERDICT_S = 5.0
"""How long a refusing end waits for the other's reasons."""

_log = logging.getLogger(__name__)


class ValueChannel(Protocol):
    """The part of ``kvplug.net.trust.channel.Channel`` that the handshake needs."""

    @property
    def peer(self) -> object: ...

    def send(self, value: Any, timeout: Timeout = ...) -> None: ...

    def recv(self, timeout: Timeout = ...) -> Any: ...


@attrs.frozen
class _Result:
    """The results that must be equal at both ends."""

    wire_minor: int
    checksum: str | None
    transports: Mapping[str, str]


@attrs.frozen
class _Verdict:
    agreed: _Result | None = None
    refused: list[str] | None = None


def exchange(
    channel: ValueChannel,
    local: Hello,
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    announced: str = "",
    received: object = None,
) -> Agreement:
    """Shake hands over an authenticated channel, which stays open on success and on failure.

    Args:
        announced: the :func:`identity_of` the engine that a directory announced at the address, if any.
        received: the peer's Hello, if already received.

    Raises:
        HandshakeError: :func:`~kvplug.negotiation.agreement.agree` failed, the peer's Hello is malformed, or
            the peer refused. The peer's ``exchange`` raises for the same reasons.
        TimeoutError, PeerGoneError, WireError: from the channel.
    """
    deadline = Deadline.after(timeout, _DEFAULT_S)
    peer = str(channel.peer)
    hello = to_plain(local)
    if fault := _too_large(hello):
        raise HandshakeError(f"hello: ours cannot be sent: {fault}", peer=peer)
    channel.send({"hello": hello}, timeout=deadline.remaining())
    if received is None:
        received = channel.recv(timeout=deadline.remaining())
    remote: Hello | None = None
    try:
        remote = hello_in(received)
        _check_announced(announced, local, remote)
        agreement = agree(local, remote)
    except HandshakeError as e:
        _log.debug("handshake with %s refused: %s", peer, e)
        _refuse(channel, e.reasons, deadline)
        refused = HandshakeError(*e.reasons, peer=peer)
        refused.remote = remote
        raise refused from e
    chosen = {device: found.chosen for device, found in agreement.transports.items()}
    result = _Result(agreement.wire_minor, agreement.checksum, chosen)
    channel.send(to_plain(_Verdict(agreed=result)), timeout=deadline.remaining())
    try:
        _check_verdict(channel.recv(timeout=deadline.remaining()), result, peer)
    except HandshakeError as e:
        e.remote = remote
        raise
    _log.debug("agreed with %s: %s", peer, result)
    return agreement


def identity_of(engine_id: str, epoch: str) -> str:
    """Identify one start of an engine's process, as text without white space."""
    return f"{epoch}/{engine_id}"


def hello_in(received: object) -> Hello:
    """Decode the Hello in the first value from a peer.

    Raises:
        HandshakeError: the value is not a Hello, is too large, or has missing or malformed fields.
    """
    if type(received) is not dict or "hello" not in received:
        raise HandshakeError("hello: the peer sent something else first; is it another kvplug version?")
    if fault := _too_large(received["hello"]):
        raise HandshakeError(f"hello: theirs cannot be accepted: {fault}")
    return hello_from(received["hello"])


def _too_large(hello: object) -> str:
    try:
        encode(hello, limits=_LIMITS)
    except (CapacityError, UnsupportedError) as e:
        return str(e)
    return ""


def _check_announced(announced: str, local: Hello, remote: Hello) -> None:
    """Raise HandshakeError if the engine that answers is not the one that the directory announced."""
    if not announced or announced == identity_of(remote.engine_id, remote.epoch):
        return
    engine_id = announced.partition("/")[2]
    if engine_id == remote.engine_id:
        raise HandshakeError(
            f"engine_id: {engine_id!r} has restarted since it was announced; this engine connects to it"
            " after its next announcement"
        )
    other = "this engine itself" if remote.epoch == local.epoch else f"engine {remote.engine_id!r}"
    raise HandshakeError(
        f"engine_id: a directory announces {engine_id!r} at this address, but {other} answers; set host"
        f" at {engine_id!r} to an address of its own that all other engines can reach"
    )


def _refuse(channel: ValueChannel, reasons: tuple[str, ...], deadline: Deadline) -> None:
    """Send the reasons and wait for the peer's verdict, so that neither end hangs up too early."""
    left = deadline.remaining()
    last = Deadline.after(_VERDICT_S if left is None else min(left, _VERDICT_S))
    verdict = _Verdict(refused=[reason[:MAX_TEXT] for reason in reasons[:_MAX_REASONS]])
    try:
        channel.send(to_plain(verdict), timeout=last.remaining())
        channel.recv(timeout=last.remaining())
    except (PeerGoneError, TimeoutError, WireError) as e:
        _log.debug("no verdict was exchanged with %s: %s", channel.peer, e)


def _check_verdict(received: object, ours: _Result, peer: str) -> None:
    """Check that the peer came to the same result.

    Raises:
        HandshakeError: the peer refuses (with its reasons), or its result differs, as it may between two
            versions of kvplug.
    """
    theirs = from_plain(received, _Verdict, "verdict", HandshakeError)
    if theirs.agreed == ours:
        return
    if theirs.refused is not None:
        reasons = [peer_text(reason) for reason in theirs.refused[:_MAX_REASONS]]
        raise HandshakeError(*(reasons or ["the peer gave no reason"]), peer=f"{peer} (by the peer)")
    raise HandshakeError(
        f"agreement: the two ends came to different results from the same facts, ours {ours};"
        " install the same version of kvplug at both ends",
        peer=peer,
    )
