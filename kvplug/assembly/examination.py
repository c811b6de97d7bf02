"""Both ends of the conversation between a doctor and a listener, after the handshake.

The doctor asks, the listener answers::

    {"doctor": "report"}                    {"report": a Report}
    {"doctor": "state"}                     {"state": {...}, "scheduler": {...}}: what `kvplug top` shows
    {"doctor": "measure", "device": "cpu"}  {"measuring": true}, then a pipe is opened
                                            {"measuring": false, "why": ...}
    {"doctor": "bye"}
    {"doctor": any other text}              {"unknown": true}: a newer doctor can continue

The listener states facts, and the doctor judges them. The connector and the store behind the listener are not
involved. The load that doctors put on an engine is bounded: 8 concurrent examinations, each with at most 30
seconds, 16 questions and one measurement, which takes about a second and 64 MiB.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.assembly.host import HostFacts, facts_of
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.watched import scheduler_state
from kvplug.config.config import Config
from kvplug.errors import KvplugError
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_text, peer_texts
from kvplug.net.trust.channel import Channel
from kvplug.net.wire import from_plain, to_plain

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 8
_MOST_S: Final = 30.0
_MOST_QUESTIONS: Final = 16
_ANSWER_S: Final = 5.0
_BUSY_S: Final = 1.0
"""How long to wait for the question of a doctor that is refused because too many are connected."""
_MAX_CHARACTERS: Final = 400
"""The longest text accepted in a peer's report."""
_SECRET: Final = re.compile(
    r"(secret|passw(or)?d|pwd|passphrase|credential|auth|token|key)s?$", re.IGNORECASE
)
"""Matches the end of an option's name if the value may be secret."""
_HARMLESS: Final = re.compile(r"[\w .%+-]{0,40}")
"""Matches option values that may be sent: numbers, sizes and words, but not paths, addresses or URLs."""

_LABEL: Final = "doctor"
_SIZES: Final = (1 << 20, *(4 << 20,) * 15)
"""The sizes of the messages in bytes. The first one is a warm-up: it touches pages and creates buffers."""
_NEXT: Final = {"send": "the next message"}
_MEASURE_S: Final = 1.0
_CLOSE_S: Final = 1.0

_places = threading.BoundedSemaphore(_MOST_AT_ONCE)
_turn = threading.BoundedSemaphore(1)
"""Allows one measurement at a time."""

os.register_at_fork(after_in_child=partial(_places.__init__, _MOST_AT_ONCE))  # type: ignore[misc]
os.register_at_fork(after_in_child=partial(_turn.__init__, 1))  # type: ignore[misc]


@attrs.frozen(kw_only=True)
class Report:
    """A listener's report to a doctor."""

    doctor: str
    """The config's ``doctor``, or ``"busy"``; empty without an answer."""
    host: HostFacts | None = None
    """``None`` if the listener does not report; the other fields are then empty."""
    buffer_size: int = 0
    missing: tuple[str, ...] = ()
    """The plugins that are broken or blocked. Their errors are not sent: they may contain anything, such as
    environment variables."""
    facts: Mapping[str, str | int] = attrs.field(factory=dict)
    """Facts of an engine that is not running, given to ``kvplug doctor --serve``."""
    connector: str = ""
    options: Mapping[str, str] = attrs.field(factory=dict)
    """The options that the config gives the connector."""

    @classmethod
    def of(cls, settings: LinkSettings) -> Report:
        """Make the report of this process."""
        config = settings.config
        if config.doctor == "off":
            return cls(doctor=config.doctor)
        return cls(
            doctor=config.doctor,
            host=facts_of(config),
            buffer_size=config.buffer_size,
            missing=tuple(each.label for each in settings.resolved.registry.failed),
            facts=settings.engine_facts,
            connector=config.connector,
            options=connector_options(config),
        )

    @classmethod
    def from_peer(cls, plain: object) -> Report:
        """Decode a peer's report, and make its texts safe for a terminal.

        Raises:
            WireError: ``plain`` is not a report.
        """
        return from_plain(peer_texts(plain, _MAX_CHARACTERS), cls, "the report")

    @classmethod
    def request(cls, channel: Channel, deadline: Deadline) -> Report:
        """Ask the listener for its report. Without a valid answer in time, the report is empty."""
        deadline = deadline.within(_ANSWER_S)
        try:
            channel.send({"doctor": "report"}, timeout=deadline.remaining())
            answered = channel.recv(timeout=deadline.remaining())
            return cls.from_peer(answered.get("report") if isinstance(answered, dict) else None)
        except KvplugError:
            return cls(doctor="")


def connector_options(config: Config) -> dict[str, str]:
    """Return the connector's configured options as text. A value that may be a secret or a location becomes
    "(given)"."""
    given = config.options.get(config.connector.rpartition(":")[2], {})

    def shown(key: str, text: str) -> str:
        is_count = key.endswith("_tokens") and text.isdecimal()
        return text if is_count or (_HARMLESS.fullmatch(text) and not _SECRET.search(key)) else "(given)"

    return {key: shown(key, str(value)) for key, value in given.items()}


# -- the listener ----------------------------------------------------------------------------------------


def answer(settings: LinkSettings, channel: Channel, link: ControlLink | None) -> None:
    """Answer a doctor until it ends the examination, for at most the config's ``timeout_s`` or 30 s,
    whichever is less.

    ``link`` is ``None`` if the handshake was refused.
    """
    deadline = Deadline.after(min(settings.config.timeout_s, _MOST_S))
    is_served = _places.acquire(blocking=False)
    if not is_served:
        _log.info("the doctor from %s is not answered; too many are connected", channel.peer)
    try:
        if is_served:
            _answer_questions(settings, channel, link, deadline)
        else:
            channel.recv(timeout=_BUSY_S)  # an answer sent before the question could be lost on closing
            channel.send({"report": to_plain(Report(doctor="busy"))}, timeout=_BUSY_S)
    except KvplugError as e:
        _log.info("the examination by the doctor from %s ends: %s", channel.peer, e)
    finally:
        if is_served:
            _places.release()


def _answer_questions(
    settings: LinkSettings, channel: Channel, link: ControlLink | None, deadline: Deadline
) -> None:
    is_measured = False
    for _ in range(_MOST_QUESTIONS):
        asked = channel.recv(timeout=deadline.remaining())
        what = asked.get("doctor") if isinstance(asked, dict) else None
        if not isinstance(what, str) or what == "bye":
            return
        answered: dict[str, Any] = {"unknown": True}
        if what == "report":
            answered = {"report": to_plain(Report.of(settings))}
        elif what == "state" and settings.config.doctor != "off":
            scheduler = scheduler_state(settings.config.engine_id)
            answered = {
                "state": settings.state.plain(),
                "scheduler": None if scheduler is None else to_plain(scheduler),
            }
        elif what == "measure":
            why = _why_not_measured(settings.config, link, asked.get("device"), is_measured)
            if not why and link is not None:
                is_measured = True
                why = _serve_measurement(link, asked["device"], deadline)
                if not why:
                    continue
            answered = {"measuring": False, "why": why}
        channel.send(answered, timeout=deadline.remaining())


def _why_not_measured(config: Config, link: ControlLink | None, device: object, is_measured: bool) -> str:
    """Return why this doctor does not get a measurement; empty if it does."""
    if config.doctor != "measure":
        return f"doctor is {config.doctor!r} in its configuration"
    if link is None:
        return "the handshake was refused"
    if not isinstance(device, str) or device not in link.agreement.transports:
        return "the handshake did not agree on a pipe"
    if device != "cpu" and link.agreement.remote.engine is not None:
        return "a doctor does not use an engine's device memory; `kvplug bench` measures it"
    return "it was measured already" if is_measured else ""


def _serve_measurement(link: ControlLink, device: str, deadline: Deadline) -> str:
    """Send messages over a pipe until the doctor stops requesting them. Return why this is impossible;
    empty on success."""
    if not _turn.acquire(blocking=False):
        return "another doctor is measuring there now"
    try:
        content = _bytes_on(device)
        if isinstance(content, str):
            return content
        link.channel.send({"measuring": True}, timeout=deadline.remaining())
        pipe = link.open_pipe(_LABEL, device=device, timeout=deadline.remaining())
        try:
            sizes = iter(_SIZES)
            while link.channel.recv(timeout=deadline.remaining()) == _NEXT and (nbytes := next(sizes, 0)):
                pipe.send_tensor(content[:nbytes], timeout=deadline.remaining())
            pipe.close(timeout=_CLOSE_S)
        finally:
            pipe.abort()
    finally:
        _turn.release()
    return ""


def _bytes_on(device: str) -> Tensor | str:
    """Return a tensor whose slices are the messages, or why PyTorch cannot make it here."""
    try:
        import torch

        return torch.zeros(max(_SIZES), dtype=torch.uint8, device=device)
    except (ImportError, RuntimeError, AssertionError) as e:
        return f"{device} tensors cannot be made here: {str(e).splitlines()[0]}"


# -- the doctor --------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Measured:
    """The measured rate of a pipe, and the rate that its transport claims."""

    transport: str
    device: str
    gb_per_s: float
    """The rate of the fastest message, in 10^9 bytes per second."""
    claimed_gb_per_s: float
    num_bytes: int
    route: str = ""


def measure(link: ControlLink, device: str, claimed_gb_per_s: float, deadline: Deadline) -> Measured | str:
    """Measure the agreed pipe for tensors on this device, or return why one end cannot do this.

    The doctor requests one message at a time over the channel, and measures the time from the request until
    the whole message has arrived.

    Raises:
        TimeoutError: a message did not come in time.
        KvplugError: opening the pipe or receiving a message failed.
    """
    channel = link.channel
    into = _bytes_on(device)
    if isinstance(into, str):
        return into
    channel.send({"doctor": "measure", "device": device}, timeout=deadline.within(_ANSWER_S).remaining())
    match channel.recv(timeout=deadline.remaining()):
        case {"measuring": True}:
            pass
        case {"why": why}:
            return peer_text(why)
        case _:
            return "the peer sent an unexpected answer"
    pipe = link.open_pipe(_LABEL, device=device, timeout=deadline.remaining())

    def rate_of(nbytes: int) -> float:
        began = time.perf_counter()
        channel.send(_NEXT, timeout=deadline.remaining())
        pipe.recv_tensor(into[:nbytes], timeout=deadline.remaining())
        if into.is_cuda:
            import torch

            torch.cuda.synchronize(into.device)
        return nbytes / (time.perf_counter() - began) / 1e9

    try:
        until, rates = time.monotonic() + _MEASURE_S, [rate_of(_SIZES[0])]
        while len(rates) < len(_SIZES) and time.monotonic() < until:
            rates.append(rate_of(_SIZES[len(rates)]))
        channel.send({"send": "nothing"}, timeout=deadline.remaining())
        return Measured(
            transport=link.agreement.transports[device].chosen,
            device=device,
            gb_per_s=max(rates),
            claimed_gb_per_s=claimed_gb_per_s,
            num_bytes=sum(_SIZES[: len(rates)]),
            route=pipe.route,
        )
    finally:
        pipe.abort()
