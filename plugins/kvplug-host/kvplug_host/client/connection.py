"""One link to a store in another process: requests over a channel, pages over a pipe or out of memory that is
mapped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvplug import HandshakeError, TransportError
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    JobTask,
    MissReason,
    NamedExhaustion,
    Outbox,
    Store,
    Usage,
)
from kvplug_host import protocol
from kvplug_host.client.mapping import Mapping, offered_mapping
from kvplug_host.client.page_pipe import PagePipe
from kvplug_host.client.put_turns import PutTurns
from kvplug_host.client.requests import Requests
from kvplug_host.link_end import failing
from kvplug_host.options import HostOptions

_log = logging.getLogger(__name__)


class Connection:
    """Owns the link. A thread receives from the channel, once :meth:`begin` was called."""

    def __init__(
        self,
        link: Store.Link,
        context: Store.Context,
        deadline: Deadline,
        *,
        note_usage: Callable[[Usage], None],
        lost: Callable[[set[JobTask]], None],
        stop: Callable[[], object],
    ) -> None:
        """Receives the first message, and prepares pipe and memory.

        Args:
            note_usage: called with what the store holds, whenever an answer states it.
            lost: called once when the link has ended, with the jobs that waited for the store.
            stop: ends this end, without waiting, when the program leaves.

        Raises:
            WireError: the other end serves no store "host", or another version of it.
            TimeoutError, PeerGoneError, ClosedError: the other end does not answer.
        """
        self.peer = link.channel.peer
        self._link = link
        self._lost = lost
        self._outbox = Outbox(link.channel, "kvplug-host-send")
        self.requests = Requests(self._outbox, note_usage)
        self._thread = BackgroundThread(self._receive_all, name="kvplug-host-client", stop=stop)
        self.pages: PagePipe | None = None
        """``None``: there is no pipe for pages."""
        self.mapping: Mapping | None = None
        """``None``: the store's memory is not mapped."""
        self.is_lost = False
        options: HostOptions = context.options if context.options is not None else HostOptions()
        hello = protocol.hello_in(link.channel.recv(timeout=deadline.remaining()), self.peer)
        self.epoch = hello.epoch
        if hello.usage is not None:
            note_usage(hello.usage)
        self.put_turns = PutTurns(protocol.MAX_PUTS)
        try:
            pipe = link.open_pipe(protocol.PIPE, timeout=deadline.remaining())
        except (HandshakeError, TransportError) as e:  # both ends have the reason
            NamedExhaustion.check(e, "a pipe to a store")
            _log.info("there is no pipe to the store of %s: %s", self.peer, e)
        else:
            self.pages = PagePipe(pipe, self.requests, stop=stop, failed=self._fail)
        try:
            if options.map:
                self.mapping = offered_mapping(hello, context.credentials, deadline)
            if self.mapping is not None and self.pages is not None:
                self.pages.lend(self.mapping.put_memory)
            _log.info("pages of the store of %s are read: %s", self.peer, self.route)
        except BaseException:
            self.release()
            raise

    @property
    def route(self) -> str:
        """How pages come, in words."""
        if self.mapping is not None:
            return "its memory is mapped"
        return f"over a pipe to {self.pages.pipe.peer}" if self.pages is not None else "not at all"

    def begin(self) -> None:
        """Receive answers from now on. Raises ResourceExhaustedError: no thread could start."""
        with NamedExhaustion("a store in another process"):
            self._thread.start()

    def note_wrong(self, key: bytes, reason: MissReason, generation: int = 0) -> None:
        """A page was found to be wrong. Have the store remove it."""
        _log.warning("the store 'host' has given a wrong page (%s), which is removed", reason)
        self.requests.notify(protocol.Wrong(keys=key, generation=generation))

    # -- what comes ----------------------------------------------------------------------------

    def _receive_all(self) -> None:
        channel = self._link.channel
        try:
            with failing(self._fail, "receiving its answers failed"):
                while True:
                    self.requests.answered(channel.recv(timeout=None))
        finally:
            self.lose()

    def _fail(self, reason: str | None) -> None:
        if reason is not None:
            _log.warning("the store of %s is not used any more: %s", self.peer, reason)
        self._link.close()

    # -- the end -------------------------------------------------------------------------------

    def lose(self) -> None:
        """The store is gone. Copies out of mapped memory continue."""
        self.is_lost = True
        waiting = self.requests.end(MissReason.STORE_GONE)
        self._link.close()
        self._outbox.end()
        self._lost(waiting.union(self.release()))

    def give_up(self, reason: MissReason) -> None:
        """Send nothing any more, and have the threads end. Does not wait."""
        self.is_lost = True
        self.requests.end(reason)
        self._link.close()

    def release(self) -> list[JobTask]:
        """End the pipe, and drop the memory. Returns the gets of which pieces were to come."""
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            mapping.put_memory.end()
        return self.pages.end() if self.pages is not None else []

    def join(self, deadline: Deadline) -> None:
        """Wait for the threads, after :meth:`release`."""
        self._outbox.end()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(deadline.remaining())
        if self.pages is not None:
            self.pages.join(deadline)
