"""Serves peers that follow the index of the first store, or load its pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvplug import KvplugError
from kvplug.engine import PeerLink, Peers
from kvplug.transport import Deadline, Outbox, PageEvent, WireError
from kvplug_lookup.connector.replica import MAX_PROMISED
from kvplug_lookup.connector.save import Tier

_log = logging.getLogger(__name__)

_MAX_LAG_BYTES = 64 << 20
"""A follower with more unread bytes than this, besides its first snapshot, is dropped. When it reconnects, it
gets a snapshot."""
_KEY_BYTES = 32
_HELLO_S = 10.0
_MAX_SERVED = 1024
"""Limit on peers that are served at once, each in a thread; others wait."""


class _Publisher:
    """Sends one follower every event of the store, and answers its pings in sequence with them."""

    def __init__(self, link: PeerLink, tier: Tier) -> None:
        self._link = link
        self._tier = tier
        self._outbox = Outbox(link.channel, "kvplug-lookup-events")
        self._unsubscribe = tier.store.subscribe(self._send_event)  # the snapshot first, however large
        self._outbox.limit(_MAX_LAG_BYTES)

    def run(self) -> None:
        """Answer pings, and touch pages that the follower will load, until it leaves."""
        try:
            while True:
                message = self._link.channel.recv(timeout=None)
                if isinstance(message, dict) and "promised" in message:
                    self._tier.store.touch(self._tier.series.keys_of(_chains_in(message["promised"])))
                    continue
                if not isinstance(message, dict) or type(message.get("ping")) is not int:
                    raise WireError("a follower sent neither a ping nor promised pages")
                self._send({"pong": message["ping"]})
        except KvplugError as e:
            _log.debug("%s stopped following: %s", self._link.agreement.remote.engine_id, e)
        finally:
            self._unsubscribe()
            self._outbox.end()
            self._link.close()

    def _send_event(self, event: PageEvent) -> None:
        try:
            self._send(event.to_plain())
        except KvplugError as e:
            _log.warning("%s cannot be sent an event: dropped: %s", self._link, e)
            self._link.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._outbox.send(message):
            return
        if self._outbox.is_full and not self._link.channel.closed:
            _log.warning("%s does not read its events: dropped", self._link)
        self._link.close()  # wakes the thread that waits for pings


def _chains_in(joined: object) -> list[bytes]:
    """Raises WireError."""
    if type(joined) is not bytes or len(joined) % _KEY_BYTES or len(joined) > MAX_PROMISED * _KEY_BYTES:
        raise WireError("a follower sent a malformed list of promised pages, or too many")
    return [joined[at : at + _KEY_BYTES] for at in range(0, len(joined), _KEY_BYTES)]


class Service:
    """Serves the pages of one store to peers until it is closed."""

    def __init__(self, peers: Peers, tier: Tier, hello: Mapping[str, Any]) -> None:
        """``hello``: the first message to every peer."""
        self._tier = tier
        self._hello = hello
        self._links: set[PeerLink] = set()
        self._server = peers.serve(self._serve, max_served=_MAX_SERVED)
        self.contact = self._server.contact
        """The contact for peers."""

    @property
    def num_served(self) -> int:
        """Number of peers that are being served."""
        return len(self._links)

    def close(self) -> None:
        """Stop listening, and close all links."""
        self._server.close()

    def _serve(self, link: PeerLink, _: Deadline) -> None:
        remote = link.agreement.remote
        if remote.purpose not in ("events", "store"):
            raise WireError(f"connector 'lookup' does not know the link purpose {remote.purpose!r}")
        store = self._tier.store
        if not store.has_events:
            link.channel.send(
                {"error": "its first store is shared: name that store in `stores` here, too"},
                timeout=_HELLO_S,
            )
            return
        self._links.add(link)
        try:
            link.channel.send(self._hello, timeout=_HELLO_S)
            if remote.purpose == "events":
                _Publisher(link, self._tier).run()
            else:
                store.serve(link)
        finally:
            self._links.discard(link)
