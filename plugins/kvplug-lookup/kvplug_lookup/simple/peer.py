"""Connections to the peer engine that KV is loaded from: to match prompts, and to reach its buffers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from kvplug import AuthenticationError, ClosedError, ConfigError, HandshakeError, KvplugError, TimeoutError
from kvplug.engine import CacheGroup, ConnectorContext, PeerLink, reason_of
from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import BackgroundThread, Deadline, LookupBuffer, Timeout, WireError, close_after_fork
from kvplug_lookup.simple.entries import CLOSE_S, LOAD, MATCH, open_pipes

_log = logging.getLogger(__name__)

_RETRY_S = 0.5
"""The pause after a failed attempt to connect."""


def group_of(context: ConnectorContext) -> CacheGroup:
    """The only KV cache group of this engine.

    Raises:
        ConfigError: the engine has several groups, or a group with a window.
    """
    (group, *others) = context.cache.groups
    if others or group.window is not None:
        raise ConfigError(
            "the connector 'simple' supports one KV cache group, without a window; use 'lookup'"
        )
    return group


def peer_of(context: ConnectorContext) -> str | None:
    """The address of the engine to load from; ``None``: the config's host and port, which in the role "both"
    are this engine's own.

    Raises:
        ConfigError: `peers` names several engines, or a directory.
    """
    peers, addresses = context.config.peers, context.config.peer_addresses
    if not peers:
        return None
    if len(peers) > 1 or not addresses or context.config.require_role().produces:
        raise ConfigError(
            "peers: the connector 'simple' loads from one engine, with the role producer, into one with the"
            f" role consumer; got {', '.join(peers)}; 'lookup' loads from any number"
        )
    return addresses[0]


class PeerBuffer:
    """The lookup buffer of the peer's worker with this rank, over two pipes."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._peer = peer_of(context)
        self._endpoint = context.open_lookup()
        self.link: PeerLink | None = None
        """The latest link, with the agreement and the peer."""
        self._buffer: LookupBuffer | None = None
        self._is_closed = False

    def reached(self, deadline: Deadline, *, retry: bool = False) -> tuple[LookupBuffer, str | None]:
        """Return the buffer, and the hash algorithm of its entries. Reconnect if the peer has restarted.

        Raises:
            TimeoutError, PeerGoneError, HandshakeError, AuthenticationError, ClosedError.
        """
        if self.link is not None and self._buffer is not None and not self._buffer.is_lost:
            return self._buffer, self.link.agreement.checksum
        if self._buffer is not None:
            self._buffer.abort()
        context, rank = self._context, self._context.parallelism.worker_rank
        link = context.peers.connect(rank, LOAD, deadline.remaining(), retry=retry, peer=self._peer)
        self.link = link
        try:
            signal, data = open_pipes(link, context.config.device, deadline)
            self._buffer = self._endpoint.reach(signal, data)
        finally:
            link.close()
        if self._is_closed:
            self._buffer.abort()
        return self._buffer, link.agreement.checksum

    def close(self) -> None:
        """Close the buffer, and end calls of other threads."""
        self._is_closed = True
        if self.link is not None:
            self.link.close()
        if self._buffer is not None:
            self._buffer.close(CLOSE_S)


@attrs.define(eq=False)
class Question:
    """How many tokens of a prompt does each worker of the peer engine hold?"""

    tokens: tuple[int, ...]
    extra: bytes
    generation: int
    """Generation of the request."""
    asked_at: float = attrs.field(factory=time.monotonic)
    answer: int | None = None
    """The lowest number among the workers; ``None``: not known yet."""


class PeerMatcher:
    """Asks the workers of the peer engine in a thread, so that the scheduler never waits for another process.

    It reconnects to an engine that has restarted. Without a connection the answer is 0.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._context, self._peer = context, peer_of(context)
        self._timeout_s: float = context.options.match_timeout_s
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._links: list[PeerLink] = []
        """Links to every worker, or to none."""
        self._error: KvplugError | None = None
        """Why there are no links."""
        self._retry_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.is_closed = False
        self.is_refused = False
        """A worker's handshake was refused, so this engine cannot load."""
        close_after_fork(self)
        self._thread = BackgroundThread(self._run, name="kvplug-simple-match", stop=self._stop)
        self._thread.start()

    def check_open(self) -> None:
        """Raises ClosedError: this side is shut down, or in a forked child."""
        if self.is_closed:
            raise ClosedError("this connector was shut down, or belongs to the parent process")

    def ask(self, question: Question) -> None:
        """Queue a question. Its ``answer`` is set later."""
        self._questions.put(question)

    def wait_until_ready(self, timeout: Timeout) -> None:
        """Wait until every worker of the peer engine is connected.

        Raises:
            TimeoutError, HandshakeError, AuthenticationError, ClosedError.
        """
        self.check_open()
        deadline = Deadline.after(timeout, self._context.config.connect_timeout_s)
        with self._lock:
            while not self._links:
                self.check_open()
                if isinstance(self._error, HandshakeError | AuthenticationError):
                    raise self._error
                if deadline.expired:
                    address = self._context.peers.address_of(0, self._peer)
                    why = self._error or f"{address} has not answered yet"
                    raise TimeoutError(f"no connection to all workers of the peer engine: {why}")
                self._changed.wait(deadline.remaining())

    def close(self) -> None:
        self._stop()
        self._thread.join(CLOSE_S)

    def _stop(self) -> None:
        self.is_closed = True
        self._questions.put(None)
        self._context.peers.close()  # ends an attempt to connect
        for link in self._links:
            link.close()
        with self._lock:
            self._changed.notify_all()

    def _after_fork_in_child(self) -> None:
        self.is_closed = True

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_closed:
            pause = None if self._links else max(0.0, self._retry_at - time.monotonic())
            try:
                question = self._questions.get(timeout=pause)
            except queue.Empty:
                self._connect()
            else:
                if question is not None:
                    question.answer = self._answer(question)
        self._set([], ClosedError("this connector was shut down"))

    def _answer(self, question: Question) -> int:
        began, stats = time.perf_counter(), self._context.stats
        asked = {"tokens": pack_tokens(question.tokens), "extra": question.extra}
        for _ in range(2):  # once more if the engine has restarted since the last question
            if not self._connect():
                break
            try:
                found = min(self._ask(link, asked) for link in self._links)
            except KvplugError as e:
                self._set([], e)
            else:
                if found:
                    stats.record("match", seconds=time.perf_counter() - began, tokens=found)
                else:
                    stats.fail("match", "absent")
                return found
        stats.fail("match", reason_of(self._error or TimeoutError("there is no connection")))
        return 0

    def _ask(self, link: PeerLink, asked: Mapping[str, Any]) -> int:
        deadline = Deadline.after(self._timeout_s)
        link.channel.send(asked, timeout=deadline.remaining())
        found = link.channel.recv(timeout=deadline.remaining())
        if type(found) is not int or not 0 <= found <= len(asked["tokens"]) // 4:
            raise WireError(f"{link.channel.peer} sent a malformed number of tokens")
        return found

    def _connect(self) -> bool:
        """Connect to every worker if needed, and if a retry is due. Return whether they are connected."""
        if self._links or time.monotonic() < self._retry_at:
            return bool(self._links)
        links: list[PeerLink] = []
        connect = partial(self._context.peers.connect, retry=False, peer=self._peer)
        ranks = range(self._context.parallelism.num_workers)
        try:
            links.extend(connect(rank, MATCH, self._timeout_s) for rank in ranks)
        except KvplugError as e:
            for link in links:
                link.close()
            if str(e) != str(self._error) and not self.is_closed:
                _log.warning("cannot load KV: %s", e)
            self._retry_at = time.monotonic() + _RETRY_S
            self._set([], e)
        else:
            self.is_refused = False
            self._set(links, None)
        return bool(self._links)

    def _set(self, links: list[PeerLink], error: KvplugError | None) -> None:
        for link in self._links:
            link.close()
        with self._lock:
            self._links, self._error = links, error
            self._changed.notify_all()
