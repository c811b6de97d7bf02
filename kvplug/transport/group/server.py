"""Rank 0 at work: the store, and a thread for each connection to it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvplug.errors import (
    CapacityError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    WireError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion, exhaustion_of
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.identity import this_process
from kvplug.net.trust.listener import Listener
from kvplug.transport.group.store import OK, Store

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
_LAST_ANSWERS_S = 1.0
_CONNECTIONS_PER_RANK = 256
"""Served at once, each in a thread: a rank has one, and one for each of its threads that waits."""
_ONE_WAY = frozenset({"taken", "collected"})
"""Requests without an answer."""


class StoreServer:
    """Serves a :class:`Store` at a listener, which it takes over.

    A rank's first connection is its membership: it joins there and then only holds it open, so that its end
    (by pidfd, hang-up, or TCP's probes of an idle line) is the rank's end. Requests come over others.
    """

    def __init__(self, listener: Listener | None, world_size: int, label: str) -> None:
        """Takes over the listener, also if it raises.

        Raises:
            ResourceExhaustedError: the process can start no more threads, or has no free descriptor.
        """
        self.store = Store(world_size)
        self._listener = listener
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers = 0
        self._most = _CONNECTIONS_PER_RANK * world_size
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        close_after_fork(self)
        try:
            with NamedExhaustion("serving a group"):
                self.store.add_self(this_process(label))
                if listener is not None:
                    self._start(self._accept, (), "kvplug group", listener.close)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def _start(self, target: Any, args: tuple[Any, ...], name: str, stop: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = BackgroundThread(run, name=name, stop=stop)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection = self._listener.accept(None)
            except ClosedError:
                return
            try:
                channel = Channel(connection, timeout_s=_ANSWER_TIMEOUT_S)
            except KvplugError as e:  # no descriptor is free to watch its peer
                logger.warning("%s is not served by the group: %s", connection.describe, e)
                continue
            try:
                with self._lock:
                    if self._closed:
                        channel.close()
                        return
                    crowded = len(self._channels) >= self._most
                    if not crowded:
                        self._channels.add(channel)
                        stop = partial(self._hang_up, channel)
                        self._start(self._serve, (channel,), f"kvplug group, {channel.peer}", stop)
            except RuntimeError as e:
                self._turn_away(channel, e)
                continue
            if crowded:
                logger.warning("%s is turned away: there are %d connections", channel.peer, self._most)
                channel.close()

    def _turn_away(self, channel: Channel, error: RuntimeError) -> None:
        """No thread could be started to serve it."""
        shortage = exhaustion_of(error, f"serving {channel.peer}")
        logger.warning("%s is not served by the group: %s", channel.peer, shortage or error)
        if shortage is not None:
            channel.decline(shortage)
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            match channel.recv():
                case ("join", int(rank), int(world_size)):
                    self._membership(channel, rank, world_size)
                case ("ask", int(rank)):
                    self._requests(channel, rank)
                case _:
                    raise WireError("neither joins nor asks")
        except (ClosedError, PeerGoneError):
            pass
        except KvplugError as e:
            logger.warning("a connection of %s to the group ends: %s", channel.peer, e)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _hang_up(self, channel: Channel) -> None:
        """The program leaves: end the thread of a connection, also one that waits for another rank."""
        self.store.close()
        channel.close()

    def _membership(self, channel: Channel, rank: int, world_size: int) -> None:
        try:
            self.store.join(rank, world_size, channel.peer)
        except WireError as e:
            channel.send(("refused", str(e)))
            return
        absent = "is gone"
        try:
            channel.send((OK, None))
            if channel.recv(None) == ("leave",):
                absent = "has left"
        finally:
            self.store.part(rank, absent)

    def _requests(self, channel: Channel, rank: int) -> None:
        if not self.store.is_member(rank, channel.peer):
            channel.send(("refused", f"{channel.peer} is not rank {rank} of this group"))
            return
        channel.send((OK, None))
        while True:
            request = channel.recv(None)
            with self._answering():
                answer = self.store.answer(rank, request)
                if _is_one_way(request):
                    continue
                try:
                    channel.send(answer)
                except CapacityError as e:
                    channel.send(("large", f"the answer is too large: {e}"))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        with self._lock:
            self._answers += 1
        try:
            yield
        finally:
            with self._lock:
                self._answers -= 1
                self._answered.notify_all()

    def close(self, deadline: Deadline) -> None:
        """Wait until the others have fetched their values, or the deadline; then end all threads."""
        self.store.drain(deadline)
        self.store.close()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            # Ranks that waited receive the reason now.
            self._answered.wait_for(lambda: not self._answers, _LAST_ANSWERS_S)
            self._closed = True
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _after_fork_in_child(self) -> None:
        self._closed = True


def _is_one_way(request: Any) -> bool:
    match request:
        case (str(kind), *_):
            return kind in _ONE_WAY
    return False


class LocalStore:
    """Rank 0's own access to its store."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        return self._server.store.answer(0, request)

    def send(self, request: tuple[Any, ...]) -> None:
        self._server.store.answer(0, request)

    def close(self, deadline: Deadline) -> None:
        self._server.close(deadline)
