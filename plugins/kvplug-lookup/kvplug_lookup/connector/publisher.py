"""Publishes events about blocks over ZeroMQ, in the format of vLLM's event publisher.

A message has three parts: topic, sequence number (8 bytes, big-endian), and a batch in MessagePack. A batch
is an array of time, events and data-parallel rank; an event is a map with its ``type``. Subscribers that
missed batches send an empty part and the first number to the replay address. They get all kept batches from
there on, then the number -1."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from kvplug import ConfigError
from kvplug.engine import CacheEvent, ConnectorContext
from kvplug.transport import Address, BackgroundThread, close_after_fork
from kvplug_lookup.connector.block_events import BlockEvents

_log = logging.getLogger(__name__)

END_SEQ = (-1).to_bytes(8, "big", signed=True)
_KEPT = 10_000
"""Number of batches kept for subscribers that missed them."""
_HIGH_WATER = 100_000
_POLL_MS = 200
_LINGER_MS = 1000
"""How long closing waits for subscribers that read slowly."""
_CLOSE_S = 2.0


class EventPublisher:
    """Publishes from its own thread, and answers requests for missed batches in another one. Closed in a
    forked child."""

    def __init__(self, address: str, replay: str | None = None, *, allow_remote: bool = False) -> None:
        """Binds at once.

        Args:
            address: ``tcp://host:port`` or ``ipc://path``; port 0: any, see :attr:`address`.
            replay: the address for requests of missed batches; ``None``: no replay.
            allow_remote: allow connections from other hosts, although the events show prompts and
                subscribers are not authenticated.

        Raises:
            ConfigError: other hosts could connect without ``allow_remote``, or the address cannot be bound.
        """
        for each in (address, replay):
            if each is not None and not allow_remote:
                _check_local(each)
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._queue: queue.SimpleQueue[list[CacheEvent] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)
        self._closed = False
        self.replay_address: str | None = None
        runs: list[Callable[[], None]] = [self._publish]
        try:
            self._pub, self.address = self._bound(zmq.PUB, address)
            if replay is not None:
                self._replay, self.replay_address = self._bound(zmq.ROUTER, replay)
                runs.append(self._answer_requests)
            self._threads = [
                BackgroundThread(run, name="kvplug-lookup-publish", stop=self._stop) for run in runs
            ]
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._stop()
            self._end_sockets()
            raise
        close_after_fork(self)
        _log.info("publishing events about blocks at %s", self.address)

    def _bound(self, kind: int, address: str) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER)
        socket.linger = _LINGER_MS
        self._sockets.append(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            raise ConfigError(f"options.lookup.events: {address} cannot be bound: {e}") from e
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _end_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish these events as one batch. Thread-safe; never waits."""
        if not self._closed:
            self._queue.put(list(events))

    def _publish(self) -> None:
        for seq, events in enumerate(iter(self._queue.get, None)):
            number, payload = seq.to_bytes(8, "big"), encode_batch(events)
            self._kept.append((number, payload))
            self._pub.send_multipart((b"", number, payload))

    def _answer_requests(self) -> None:
        while not self._closed:
            if self._replay.poll(_POLL_MS):
                self._answer(*self._replay.recv_multipart())

    def _answer(self, client: bytes, *request: bytes) -> None:
        if len(request) != 2 or len(request[1]) != 8:
            _log.warning("got a malformed request for missed events")
            return
        for seq, payload in self._kept.copy():
            if seq >= request[1]:
                self._replay.send_multipart((client, b"", b"", seq, payload))
        self._replay.send_multipart((client, b"", b"", END_SEQ, b""))

    def _stop(self) -> None:
        self._closed = True
        self._queue.put(None)

    def close(self) -> None:
        """Send the queued events, and end. Idempotent."""
        if self._closed:
            return
        self._stop()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._end_sockets()

    def _after_fork_in_child(self) -> None:
        self._closed = True


def _check_local(address: str) -> None:
    if address.startswith(("ipc://", "inproc://")):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    # ZeroMQ's "*" is every interface; a resolver could take it for a host name.
    if not host or host == "*" or not Address(host).is_loopback:
        raise ConfigError(
            f"options.lookup.events: other hosts can connect to {address}, the events show prompts, and"
            " readers are not authenticated; use 127.0.0.1, or set allow_unauthenticated_data_plane"
        )


# -- the form of events ------------------------------------------------------------------------


def encode_batch(events: Sequence[CacheEvent], *, now: float | None = None) -> bytes:
    """Encode a batch. ``now``: seconds since the epoch."""
    return msgspec.msgpack.encode(
        [time.time() if now is None else now, [_plain(event) for event in events], 0]
    )


def _plain(event: CacheEvent) -> dict[str, Any]:
    match event.kind:
        case "stored":
            return {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_hash,
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium or None,
                "lora_name": event.adapter or None,
                "group_idx": 0,
                "locality": "LOCAL",
                "ownership": event.owner or None,
                "kvplug_chains": list(event.chains),
            }
        case "removed":
            return {
                "type": "BlockRemoved",
                "block_hashes": list(event.block_hashes),
                "medium": event.medium or None,
                "group_idx": 0,
                "locality": "LOCAL",
                "ownership": event.owner or None,
            }
        case "cleared":
            return {"type": "AllBlocksCleared"}


def open_events(
    context: ConnectorContext, page_tokens: int, block_size: int
) -> tuple[BlockEvents, EventPublisher | None]:
    """The events of a saving engine, and the publisher for routers if the options name an address.

    Raises what the publisher raises.
    """
    options = context.options
    events = BlockEvents(
        num_workers=context.parallelism.num_workers,
        page_tokens=page_tokens,
        block_size=block_size,
        medium="CPU",
        owner=next(iter(context.config.stores), ""),
    )
    if options.events == "engine":
        return events, None
    publisher = EventPublisher(
        options.events,
        options.events_replay,
        allow_remote=context.config.allow_unauthenticated_data_plane,
    )
    events.listen(publisher.publish)
    return events, publisher
