"""The receiving half of a pipe: reads messages from the peer's memory to where they belong.

The caller's own thread reads, in pieces. After the last piece it reads the peer's fence: a few bytes that the
peer changes before it takes any memory back. So what is returned was the message while it was read. Where UCX
needs the peer's help for a read, a stopped peer leaves one under way for as long as it likes, and it may go
on later: such reads go through memory of the pipe's, and the next call goes on with them.

UCX knows nothing of streams. So memory on a device is written when the device has done what the caller's
stream was given before: kernels of the caller's may still read that memory, or what it was used for last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.net.wire.tensors import memory_of, memory_of_writable
from kvplug.transport import Deadline, Lifecycle, MessageLimit, PartialMessage
from kvplug_nixl.agent import HOST, Agent, NixlError, Read, Region, Span
from kvplug_nixl.pipe.announced import AnnouncedMessages
from kvplug_nixl.pipe.content import Target, cut, from_bytes, gpu_of, matched, new_tensor, put
from kvplug_nixl.pipe.fence import PeerFence
from kvplug_nixl.pipe.frames import Inline, Offer
from kvplug_nixl.pipe.polling import poll, poll_device

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES: Final = 32 << 20
"""Of a message that is read at once: the deadline and the peer are looked at in between."""
_HELPED_BYTES: Final = 4 << 20
"""The same, where reads need the peer's help."""
_READ_S: Final = 5.0
"""Seconds that a call waits for a read under way which needs no help of the peer."""
_NOTICE_S: Final = 1.0
"""Seconds until the pipe's reader has noticed a peer whose memory is gone."""


class _Message(PartialMessage):
    __slots__ = ("inline", "is_learnt", "is_taken", "local", "offer", "pending", "regions")

    def __init__(self, came: Inline | Offer) -> None:
        super().__init__(came.meta)
        self.offer = came if isinstance(came, Offer) else None
        self.inline = came.data if isinstance(came, Inline) else None
        self.pending: tuple[Read, int] | None = None
        """A read into memory of the pipe's, and its number of bytes."""
        self.local: list[Span] = []
        self.regions: list[Region] = []
        """Those that the read needs."""
        self.is_learnt = False
        """The agent knows the memory that it lies in."""
        self.is_taken = self.offer is None
        """It is complete, in memory of the pipe's, and needs nothing of the peer any more."""


class Inbox:
    """``taken()`` tells the peer; ``ask_for_help()`` says that a read needs it; ``fail_pipe(reason)``, called
    without locks, ends the pipe."""

    def __init__(
        self,
        agent: Agent,
        announced: AnnouncedMessages,
        fence: PeerFence,
        *,
        device: str,
        needs_help: bool,
        peer: str,
        message_limit: MessageLimit,
        lifecycle: Lifecycle,
        taken: Callable[[], None],
        ask_for_help: Callable[[], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._announced = announced
        self._fence = fence
        self._device = device
        self._needs_help = needs_help
        self._peer = peer
        self._limit = message_limit
        self._lifecycle = lifecycle
        self._taken = taken
        self._ask_for_help = ask_for_help
        self._fail_pipe = fail_pipe
        self._message: _Message | None = None
        self._landing: Tensor | None = None
        self._landing_local: list[Span] = []
        self._kept: list[object] = []
        """Memory that a read which hangs may still write to, until the agent is closed."""
        self._reading = threading.Lock()
        """Held while the agent is in use for a message."""

    def receive(self, target: Target, deadline: Deadline) -> Tensor | None:
        """Only one thread at a time. Raises as ``Pipe.recv_tensor``."""
        message = self._message or self._next(deadline)
        target.check(message.meta)
        with self._reading:
            if not message.is_taken or message.offer is None:
                self._announced.check()
            self._message = message
            in_place = False
            if message.inline is not None and message.meta is not None and message.own is None:
                if target.is_new:
                    self._limit.check(message.nbytes, self._peer)
                message.own = from_bytes(message.meta, message.inline, self._device)
                message.got = message.nbytes
            if message.offer is not None and not message.is_taken:
                in_place = self._read(message, message.offer, target, deadline)
            value = target.value(None if in_place else message.own)
            if message.offer is None:
                self._take()
            self._message = None
            return value

    def close(self) -> None:
        """After the end: give up what no call goes on with, and the agent."""
        with self._reading:
            message = self._message
            if message is not None and not message.is_taken:
                self._message = None
                if message.pending is not None:
                    message.pending[0].forget()
            self._fence.forget()
            self._agent.close()
            self._kept.clear()

    def _next(self, deadline: Deadline) -> _Message:
        came = self._announced.oldest(deadline)
        if came is None:
            raise TimeoutError(f"no message has arrived from {self._peer}; it is alive as far as can be seen")
        return _Message(came)

    def _take(self) -> None:
        try:
            self._announced.take()
            self._taken()
        except BaseException as e:  # Ctrl-C: the peer may or may not have been told
            self._fail_pipe(f"{PartialMessage.INTERRUPTED}: {e!r}")
            raise

    # -- reading -----------------------------------------------------------------------------------------

    def _read(self, message: _Message, offer: Offer, target: Target, deadline: Deadline) -> bool:
        """Read all that is left of it. Whether it went into the caller's memory."""
        memory = None if message.own is not None else target.memory()
        if memory is None:
            if message.own is None:
                if target.is_new:
                    self._limit.check(message.nbytes, self._peer)
                message.own = new_tensor(offer.meta, self._device)
            memory = [message.own]
        in_place = memory[0] is not message.own
        try:
            if self._fill(message, offer, memory, deadline, in_place=in_place):
                message.is_taken = True
                self._take()
            elif in_place and message.got:
                self._keep(message, memory)
        except PeerGoneError:
            self._message = None
            raise
        except BaseException as e:
            if not self._lifecycle.ended:
                self._fail_pipe(
                    str(e) if isinstance(e, KvplugError) else f"{PartialMessage.INTERRUPTED}: {e!r}"
                )
            raise
        if not message.is_taken:
            raise message.late(self._peer)
        return in_place

    def _fill(
        self, message: _Message, offer: Offer, memory: list[Tensor], deadline: Deadline, *, in_place: bool
    ) -> bool:
        """Whether all is there, and was the peer's until then; False at the deadline."""
        if message.pending is None and not poll_device(
            memory[0].device, self._announced.check_offered, deadline
        ):
            return False
        if not message.is_learnt:
            self._agent.learn(offer.metadata, starts_anew=offer.starts_anew)
            message.is_learnt = True
        landing = self._landed() if self._needs_help else None
        if landing is None and not message.regions:
            message.local, message.regions = self._agent.hold(memory)
        # memory of the caller's must be left alone when the call ends
        must_end = in_place and landing is None
        until = Deadline.after(_READ_S) if must_end else deadline
        try:
            while message.got < message.nbytes:
                if message.pending is None:
                    message.pending = self._begin(message, offer, gpu_of(memory[0]))
                read, nbytes = message.pending
                if not self._wait(read, until, must_end=must_end):
                    if must_end:
                        self._kept.append(memory)
                        raise TransportError(
                            "a read does not end: the memory that was given may still be written to"
                        )
                    return False
                message.pending = None
                if landing is not None:
                    put(memory, message.got, landing[:nbytes])
                message.got += nbytes
                if deadline.expired and message.got < message.nbytes:
                    return False
            return self._fence.check(lambda read: self._wait(read, until))
        except (NixlError, PeerGoneError) as e:
            message.pending = None
            self._raise_if_gone(e)
            raise
        finally:
            if message.pending is None:
                self._agent.let_go(message.regions)
                message.regions = []

    def _landed(self) -> Tensor:
        """Memory for reads that need the peer's help."""
        import torch

        if self._landing is None:
            self._landing = torch.empty(_HELPED_BYTES, dtype=torch.uint8)
            self._landing_local, _ = self._agent.hold([self._landing])
        return self._landing

    def _begin(self, message: _Message, offer: Offer, here: int) -> tuple[Read, int]:
        """The next read, and its number of bytes."""
        left = message.nbytes - message.got
        if self._needs_help:
            nbytes, here = min(_HELPED_BYTES, left), HOST
            ours = cut(self._landing_local, 0, nbytes)
        else:
            nbytes = min(_PIECE_BYTES, left)
            ours = cut(message.local, message.got, nbytes)
        pairs = list(matched(ours, cut(offer.spans, message.got, nbytes)))
        mine, theirs = [each for each, _ in pairs], [each for _, each in pairs]
        return self._agent.read(mine, theirs, here=here, there=offer.device), nbytes

    def _wait(self, read: Read, deadline: Deadline, *, must_end: bool = False) -> bool:
        """Until a read is done; False: the deadline has passed, and it is still under way.

        ``must_end``: it writes to memory of the caller's, so the pipe's end is looked at only after it.

        Raises:
            KvplugError: the pipe has ended, or the read has failed.
        """
        asked = False

        def check() -> None:
            nonlocal asked
            if not asked:
                asked = True
                self._ask_for_help()
            if not must_end:
                self._announced.check_offered()

        if not poll(read.is_done, check, deadline):
            return False
        self._announced.check_offered()
        return True

    def _raise_if_gone(self, error: KvplugError) -> None:
        """A peer that ends takes its memory along, which may be seen before the end itself."""
        deadline = Deadline.after(_NOTICE_S)
        while not self._lifecycle.ended and not deadline.expired:
            self._announced.pause(0.02)
        if self._lifecycle.peer_lost:
            raise self._lifecycle.error() from error
        self._announced.check_offered()

    def _keep(self, message: _Message, memory: list[Tensor]) -> None:
        """Copy what has arrived out of the caller's memory, which is the caller's again after this."""
        assert message.meta is not None
        own = message.allocate_own(lambda meta: new_tensor(meta, self._device), self._fail_pipe)
        if all(each.is_cpu for each in (own, *memory)):
            mine, at = memory_of_writable(own), 0
            for each in memory:
                nbytes = min(each.numel() * each.element_size(), message.got - at)
                mine[at : at + nbytes] = memory_of(each)[:nbytes]
                at += nbytes
        else:
            import torch

            flat = own.reshape(-1).view(torch.uint8)
            at = 0
            for each in memory:
                part = each.reshape(-1).view(torch.uint8)[: message.got - at]
                flat[at : at + len(part)].copy_(part)
                at += len(part)
        message.own = own
