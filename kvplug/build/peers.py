"""How a built thing meets other processes: control channel, Hello both ways, agreement, then pipes.

One order for everyone: dial or accept an authenticated channel, exchange Hello, agree (which selects a
transport for each kind of device), and only then load the transport's code, listen, carry the contact
over the channel, connect. Each pipe is wrapped once, by :class:`~kvplug.metrics.record.RecordedPipe`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from kvplug.config import Config
from kvplug.context import PeerLink, PeerListener, Peers, PipeContext
from kvplug.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.errors import ClosedError, HandshakeError, KvplugError, TimeoutError, WireError
from kvplug.handshake.agreement import Agreement
from kvplug.handshake.exchange import exchange
from kvplug.handshake.hello import Hello
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.pipe import Pipe, PipeEndpoint
from kvplug.select import Selection
from kvplug.trust.channel import Channel
from kvplug.trust.credentials import Credentials
from kvplug.trust.listener import Listener, dial_until

_log = logging.getLogger(__name__)

CONTROL = "control"
"""The purpose bound into the proof of every control channel."""

_MAX_PENDING_HANDSHAKES = 32


@attrs.frozen(kw_only=True)
class Wiring:
    """What every link of one built thing has in common."""

    config: Config
    credentials: Credentials
    hello: Callable[[str], Hello]
    """Makes this end's Hello for a purpose."""
    endpoint: Callable[[str, PipeContext], PipeEndpoint]
    """Loads the transport of that name: the only importer of its code."""
    pipe_options: Callable[[str], object]
    stats: TransferStats
    wrap_pipe: Callable[[Pipe], Pipe] | None = None
    """Put between the transport and the metrics: fault injection."""

    def pipe_endpoint(self, name: str, device: str) -> PipeEndpoint:
        context = PipeContext(
            options=self.pipe_options(name),
            credentials=self.credentials,
            host=self.config.host,
            device=device,
            timeout_s=self.config.timeout_s,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
        )
        return self.endpoint(name, context)

    def agree(self, channel: Channel, purpose: str, timeout: float | None) -> Agreement:
        """Shake hands over the channel, and count it."""
        begun = time.perf_counter()
        try:
            agreement = exchange(channel, self.hello(purpose), timeout=timeout)
        except KvplugError as e:
            self.stats.fail("handshake", reason_of(e))
            raise
        self.stats.record("handshake", seconds=time.perf_counter() - begun)
        return agreement

    def wrapped(self, pipe: Pipe) -> Pipe:
        if self.wrap_pipe is not None:
            pipe = self.wrap_pipe(pipe)
        return RecordedPipe(pipe, self.stats)


class Link(PeerLink):
    """One agreed control channel, and the pipes that are opened over it."""

    def __init__(self, wiring: Wiring, channel: Channel, agreement: Agreement, *, accepted: bool) -> None:
        self.channel = channel
        self.agreement = agreement
        self._wiring = wiring
        self._accepted = accepted

    def __repr__(self) -> str:
        return f"<Link with {self.channel.peer}>"

    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._wiring.config.timeout_s)
        selection = self._selection_for(device.partition(":")[0])
        if self._accepted:
            pipe = self._serve(label, selection.chosen, device, deadline)
        else:
            pipe = self._join(label, selection.chosen, device, deadline)
        return self._wiring.wrapped(pipe)

    def _selection_for(self, device_type: str) -> Selection:
        """KV on different kinds of device at the two ends crosses through CPU memory."""
        agreed = self.agreement.transports
        return agreed[device_type] if device_type in agreed else agreed["cpu"]

    def _serve(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        try:
            listener = self._wiring.pipe_endpoint(transport, device).listen()
        except KvplugError as e:
            self.channel.send({"pipe": label, "error": str(e)}, timeout=deadline.remaining())
            raise
        try:
            self.channel.send({"pipe": label, "contact": listener.contact}, timeout=deadline.remaining())
            return listener.accept(timeout=deadline.remaining())
        finally:
            listener.close()

    def _join(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        offer = self.channel.recv(timeout=deadline.remaining())
        if not isinstance(offer, dict) or offer.get("pipe") != label:
            raise WireError(f"{self.channel.peer} was to open the pipe {label!r} and sent something else")
        if "contact" not in offer:
            raise HandshakeError(
                f"it cannot listen on {transport!r}: {offer.get('error')}", peer=str(self.channel.peer)
            )
        endpoint = self._wiring.pipe_endpoint(transport, device)
        return endpoint.connect(str(offer["contact"]), timeout=deadline.remaining())

    def close(self) -> None:
        self.channel.close()


class LinkListener(PeerListener):
    """Accepts channels and shakes hands with each in its own short-lived thread.

    So a peer that is stopped in the middle of its handshake delays nobody but itself.
    """

    def __init__(self, wiring: Wiring, listener: Listener) -> None:
        self.contact = listener.contact
        self._wiring = wiring
        self._listener = listener
        self._ready: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(_MAX_PENDING_HANDSHAKES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="kvplug-accept", daemon=True)
        self._thread.start()

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Link:
        deadline = Deadline.after(timeout, self._wiring.config.timeout_s)
        try:
            link = None if self._closed.is_set() else self._ready.get(timeout=deadline.remaining())
        except queue.Empty:
            raise TimeoutError(f"no peer came to {self._listener!r} within {timeout} s") from None
        if link is None:
            self._ready.put(None)  # whoever else waits
            raise ClosedError("this listener is closed")
        return link

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.close()
        self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        while True:  # links that nobody accepted
            try:
                link = self._ready.get_nowait()
            except queue.Empty:
                break
            if link is not None:
                link.close()
        self._ready.put(None)

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept(timeout=None)
            except ClosedError:
                return
            except KvplugError as e:
                _log.warning("accepting a control channel failed: %s", e)
                continue
            channel = Channel(connection)
            if not self._slots.acquire(blocking=False):
                _log.warning("too many handshakes under way: %s is turned away", channel.peer)
                self._wiring.stats.fail("handshake", "refused")
                channel.close()
                continue
            threading.Thread(
                target=self._shake_hands, args=(channel,), name="kvplug-handshake", daemon=True
            ).start()

    def _shake_hands(self, channel: Channel) -> None:
        try:
            agreement = self._wiring.agree(channel, "", self._wiring.config.timeout_s)
        except KvplugError as e:
            _log.warning("no agreement with %s: %s", channel.peer, e)
            channel.close()
        else:
            link = Link(self._wiring, channel, agreement, accepted=True)
            self._ready.put(link)
            if self._closed.is_set():
                link.close()
        finally:
            self._slots.release()


class ControlPeers(Peers):
    """Peers reached over control channels at the config's addresses, or at those handed in."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        rank: int = 0,
        listen: str | None = None,
        connect: str | Mapping[int, str] | None = None,
    ) -> None:
        self._wiring = wiring
        self._rank = rank
        self._listen = listen
        self._connect = {0: connect} if isinstance(connect, str) else connect
        self._lock = threading.Lock()
        self._listeners: list[LinkListener] = []
        self._closed = threading.Event()

    def listen(self) -> LinkListener:
        config = self._wiring.config
        address = self._listen or config.control_address(self._rank)
        listener = LinkListener(self._wiring, Listener.open(address, self._wiring.credentials, CONTROL))
        with self._lock:
            self._listeners.append(listener)
        return listener

    def address_of(self, rank: int) -> str:
        """Where the peer engine's worker ``rank`` is to be found."""
        if self._connect is None:
            return self._wiring.config.control_address(rank)
        if rank not in self._connect:
            known = ", ".join(str(known) for known in sorted(self._connect))
            raise HandshakeError(f"no contact is known for rank {rank} of the peer engine, only for {known}")
        return self._connect[rank]

    def connect(self, rank: int, purpose: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Link:
        if self._closed.is_set():
            raise ClosedError("this connector was shut down")
        deadline = Deadline.after(timeout, self._wiring.config.connect_timeout_s)
        connection = dial_until(self.address_of(rank), self._wiring.credentials, CONTROL, deadline)
        channel = Channel(connection)
        try:
            agreement = self._wiring.agree(channel, purpose, deadline.remaining())
        except BaseException:
            channel.close()
            raise
        return Link(self._wiring, channel, agreement, accepted=False)

    def close(self) -> None:
        """Close every listener. Links and pipes belong to whoever opened them."""
        self._closed.set()
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
