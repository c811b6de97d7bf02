"""The sending half of a pipe: what is queued, and what the peer was told of.

    queued -> announced -> taken by the peer

Memory is registered by the caller's thread before the message is queued. A message that travels inline is the
caller's again at once; another one when the peer has taken it, since the peer reads it where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvplug import TimeoutError
from kvplug.transport import Deadline, Lifecycle, SendWindow, Transfer, WireError
from kvplug_nixl.agent import Agent, Lent, NixlError
from kvplug_nixl.pipe.content import Content, gpu_of
from kvplug_nixl.pipe.frames import MAX_MESSAGES, inline_frame, offer_frame
from kvplug_nixl.pipe.polling import poll_device


class _Message:
    __slots__ = ("content", "cost", "frame", "lent", "transfer")

    def __init__(self, content: Content, frame: list[Any], lent: Lent | None, cost: int) -> None:
        self.content = content
        """Kept until the peer has taken it: the peer may be reading."""
        self.frame = frame
        self.lent = lent
        self.cost = cost
        self.transfer = Transfer(content.nbytes)


class Outbox:
    """``announce(frame)`` tells the peer; ``fail_pipe(reason)``, called without locks, ends the pipe."""

    def __init__(
        self,
        agent: Agent,
        *,
        inline_bytes: int,
        peer: str,
        limit: int,
        lifecycle: Lifecycle,
        announce: Callable[[list[Any]], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._inline_bytes = inline_bytes
        self._lifecycle = lifecycle
        self._announce = announce
        self._fail_pipe = fail_pipe
        self._window = SendWindow(limit=limit, peer=peer, lifecycle=lifecycle)
        self._lock = self._window.lock
        self._queue: deque[_Message] = deque()
        self._announced: deque[_Message] = deque()
        self._unresolved: dict[int, _Message] = {}
        """Messages whose transfers have not ended, by identity."""

    @property
    def is_lending(self) -> bool:
        """Whether the peer may be reading memory of this process."""
        return any(each.lent is not None for each in tuple(self._announced))

    def send(self, content: Content, deadline: Deadline) -> Transfer:
        """Only one thread at a time. Raises as ``Pipe.send_tensor``."""
        with self._lock:
            self._window.wait_for_room(content.nbytes, deadline)
        try:
            self._wait_for_device(content, deadline)
            message = self._made(content)
        except NixlError:
            if self._lifecycle.ended:  # which closes the agent
                raise self._lifecycle.error() from None
            raise
        queued = False
        try:
            with self._lock:
                self._check()
                queued = True
                self._window.add(message.cost)
                self._unresolved[id(message)] = message
                self._queue.append(message)
            self._pump()
        except BaseException as e:
            if queued:  # Ctrl-C: whether the peer was told is not known
                self._fail_pipe(f"a message was not announced: {e!r}")
            else:
                self._take_back(message)
            raise
        return message.transfer

    def drain(self, deadline: Deadline) -> bool:
        """As :meth:`SendWindow.drain`."""
        return self._window.drain(deadline)

    def taken(self, count: int) -> None:
        """The peer has taken so many messages more.

        Raises:
            WireError: so many were not announced.
        """
        with self._lock:
            if count > len(self._announced):
                raise WireError(f"it has taken {count} messages of {len(self._announced)} announced ones")
            done = [self._announced.popleft() for _ in range(count)]
            for message in done:
                self._window.settle(message.cost)
        for message in done:
            self._take_back(message)
            self._finish(message)
        self._pump()

    def fail(self) -> None:
        """Nothing more is announced; every unresolved transfer fails with how the pipe ended. Idempotent.

        The memory that was lent is kept until the agent is closed.
        """
        with self._lock:
            self._queue.clear()
            self._window.end()
            lost = dict(self._unresolved)
        interrupted: BaseException | None = None
        for key, message in lost.items():
            try:
                message.transfer.fail(self._lifecycle.error())
            except BaseException as e:  # Ctrl-C, or of a callback; the other transfers must fail, too
                interrupted = e
            self._unresolved.pop(key, None)  # only now: a forked child ends what is in there
        if interrupted is not None:
            raise interrupted

    def forget(self) -> None:
        """The agent is closed: the peer reads nothing any more."""
        with self._lock:
            self._announced.clear()

    def _wait_for_device(self, content: Content, deadline: Deadline) -> None:
        """Until the device has written what the peer may then read.

        Raises:
            TimeoutError: it has not in time.
            KvplugError: the pipe has ended, or the device failed.
        """
        if content.tensors and not poll_device(content.tensors[0].device, self._check, deadline):
            raise TimeoutError("the device has not written the tensor in time; nothing was queued")

    def _check(self) -> None:
        """Raises KvplugError: the pipe has ended, and how."""
        if self._window.ended or self._lifecycle.ended:
            raise self._lifecycle.error()

    def _made(self, content: Content) -> _Message:
        cost = self._window.cost(content.nbytes)
        if content.nbytes <= self._inline_bytes:
            frame = inline_frame(content.prefix, content.data())
            return _Message(Content(b"", content.nbytes), frame, None, cost)
        lent = self._agent.lend(content.tensors)
        frame = offer_frame(
            content.prefix,
            lent.spans,
            gpu_of(content.tensors[0]),
            lent.metadata,
            starts_anew=lent.starts_anew,
        )
        return _Message(content, frame, lent, cost)

    def _pump(self) -> None:
        """Announce what there is room for, in order."""
        sent: list[_Message] = []
        with self._lock:
            while self._queue and len(self._announced) < MAX_MESSAGES and not self._window.ended:
                message = self._queue.popleft()
                self._announced.append(message)
                self._announce(message.frame)
                message.frame = []
                if message.lent is None:
                    sent.append(message)
        for message in sent:
            self._finish(message)

    def _finish(self, message: _Message) -> None:
        message.transfer.finish()
        self._unresolved.pop(id(message), None)

    def _take_back(self, message: _Message) -> None:
        if message.lent is not None:
            self._agent.let_go(message.lent.regions)
