"""The pipe "cuda-ipc": each end copies from memory of the other end's GPU, which it has mapped.

A sender copies a message into its own staging memory, piece by piece, and offers each piece to the peer. The
receiver copies the pieces from there to where they belong. So a message is copied twice, and only values of
the control channel go over the connection. Copies wait on the sender's GPU for what the caller has queued
before; a piece is offered when this end's host has seen that its copy is done.

A peer that has ended the pipe leaves its staging memory for some seconds, so that what it has wholly offered
can still be received. Memory is freed only when the peer has unmapped it, or its process has ended.
"""

from __future__ import annotations

import os
import select
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.transport import Deadline, OfferPipe, PeerIdentity, WireError
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.cudart.library import Event
from kvplug_cuda_ipc.device import Device
from kvplug_cuda_ipc.memory import Mapping, Ring, Staging

if TYPE_CHECKING:
    from torch import Tensor

UNMAPPED: Final = ["unmapped"]
"""The last value that an end sends: it has unmapped the other's memory."""
_UNTAKEN_S: Final = 10.0
"""Seconds for which messages of a peer that has ended the pipe can be received. It keeps their memory."""
_COPY_S: Final = 5.0
"""Seconds that a call waits at its end for copies under way. They wait for nothing, so they take longer only
on a device that hangs."""
END_S = 10.0
"""Seconds that a process may take to end after its connection did. A process that lives on without its
connection may unmap this end's memory whenever it likes."""


@attrs.frozen(kw_only=True)
class CudaIpcPipeSettings(OfferPipe.Settings):
    """Sizes are in bytes."""

    device: Device
    staging_bytes: int
    piece_bytes: int


class CudaIpcPipe(OfferPipe):
    """Staging memory that the peer has mapped, and the peer's staging memory."""

    NAME = "cuda-ipc"

    def __init__(
        self, join: OfferPipe.Join, staging: Staging, mapping: Mapping, settings: CudaIpcPipeSettings
    ) -> None:
        """Take ownership of all arguments, unless this raises.

        Raises:
            TransportError, ResourceExhaustedError: there are no more streams, or threads.
        """
        super().__init__(join, settings)
        self._runtime = settings.device.runtime
        self._staging = staging
        self._mapping = mapping
        self._ring = Ring(staging.nbytes)
        self._piece_bytes = min(settings.piece_bytes, staging.nbytes // 2)
        self._has_said_goodbye = False
        self._staging_stream = settings.device.new_stream()
        try:
            self._start()
        except BaseException:
            self._staging_stream.close()
            raise

    # -- sending -----------------------------------------------------------------------------------------

    def _prepare(self, message: OfferPipe.SentMessage) -> None:
        message.is_copied = True
        message.place = self.spans_of(message.content.tensors)

    def _next_offer(self, message: OfferPipe.SentMessage) -> OfferPipe.Offer | None:
        content, runtime, stream = message.content, self._runtime, self._staging_stream.handle
        nbytes = min(self._piece_bytes, content.nbytes - message.num_offered)
        if not nbytes:
            return OfferPipe.Offer(message, 0, None, 0)
        offset = self._ring.reserve(nbytes)
        if offset is None:
            return None
        if not message.num_offered:
            assert isinstance(content.ready, Event)
            runtime.stream_wait_event(stream, content.ready)
        to = self._staging.address + offset
        for _, address, length in self.cut(message.place, message.num_offered, nbytes):
            runtime.memcpy_async(to, address, length, stream)
            to += length
        return OfferPipe.Offer(message, nbytes, runtime.event(stream), offset)

    def _place_of(self, offer: OfferPipe.Offer) -> int:
        if offer.is_last:
            offer.message.drop_tensors()
        return int(offer.place)

    def _taken_back(self, offer: OfferPipe.Offer) -> None:
        if offer.nbytes:
            self._ring.release()

    # -- receiving ---------------------------------------------------------------------------------------

    def _read_place(self, meta: Any, nbytes: int, place: Any) -> int:
        match place:
            case int(offset) if 0 <= offset <= self._mapping.nbytes - nbytes:
                return offset
        raise WireError("it offers bytes that lie outside of its memory")

    def _move(
        self,
        message: OfferPipe.ComingMessage,
        memory: list[Tensor],
        deadline: Deadline,
        *,
        in_place: bool,
    ) -> bool:
        spans, enqueued = self.spans_of(memory), message.got
        under_way: deque[tuple[int, Event]] = deque()
        backoff = self.Backoff()
        try:
            while message.got < message.nbytes:
                self._coming.check()
                moved = self._finish_copies(message, under_way)
                before = enqueued
                for offer in self._coming.after(len(under_way)):
                    if enqueued == message.nbytes:
                        break  # it belongs to the next message
                    self._copy_piece(spans, enqueued, offer)
                    enqueued += offer.nbytes
                    under_way.append((offer.nbytes, self._runtime.event(self._stream.handle)))
                if moved or enqueued > before:
                    backoff.reset()
                elif deadline.expired:
                    break
                elif under_way:
                    backoff.pause()
                else:
                    self._coming.oldest(deadline)  # waits for one
        finally:
            if under_way and not self._ends(under_way[-1][1]):
                self._hung.append(memory)
                raise TransportError(
                    "a copy on the device does not end: the memory that was given may still be written to"
                )
            self._finish_copies(message, under_way)
        return message.got == message.nbytes

    def _copy_piece(self, spans: list[tuple[int, int]], at: int, offer: OfferPipe.ComingOffer) -> None:
        source = self._mapping.address + offer.place
        for _, address, length in self.cut(spans, at, offer.nbytes):
            self._runtime.memcpy_async(address, source, length, self._stream.handle)
            source += length

    def _finish_copies(self, message: OfferPipe.ComingMessage, under_way: deque[tuple[int, Event]]) -> bool:
        """Take the pieces whose copies have ended. Return whether there were any."""
        count = 0
        while under_way and under_way[0][1].is_done():
            nbytes, _ = under_way.popleft()
            message.got += nbytes
            count += 1
        if count:
            self._take(count)
        return count > 0

    def _ends(self, copied: Event) -> bool:
        """Return whether a copy ends within ``_COPY_S``. The call's deadline does not count: a copy waits for
        nothing."""
        try:
            return self._poll(copied.is_done, lambda: None, Deadline.after(_COPY_S))
        except CudaError:
            return True  # the device has failed, and writes nothing more

    # -- how it ends -------------------------------------------------------------------------------------

    def _on_goodbye(self, is_closed: bool) -> None:
        self._has_said_goodbye = True
        super()._on_goodbye(is_closed)

    def _survives(self, offer: OfferPipe.ComingOffer) -> bool:
        return self._has_said_goodbye

    def _give_back(self) -> None:
        """Unmap the peer's memory before the peer frees it; free this end's once it is unused everywhere."""
        self._tell("goodbye", False)
        if self._has_said_goodbye:
            self._coming.wait_until_taken(Deadline.after(_UNTAKEN_S))
        self._coming.stop()
        try:
            super()._give_back()
        except CudaError as e:
            self._logger.warning("%r: the peer's memory was not unmapped: %s", self, e)
        self._tell(*UNMAPPED)
        backoff = self.Backoff()
        try:
            while not all(offer.ready is None or offer.ready.is_done() for offer in self._pending):
                backoff.pause()
        except CudaError as e:  # the device does nothing more
            self._logger.debug("%r: %s", self, e)
        wait_until_unmapped(self.channel, self._pidfd)
        self._staging_stream.close()
        self._staging.free()

    def _free(self) -> None:
        self._mapping.close()


def wait_until_unmapped(channel: Any, pidfd: int | None) -> None:
    """Wait until the peer has unmapped this end's memory, or its process has ended."""
    try:
        while channel.recv(None) != UNMAPPED:
            pass
    except PeerGoneError:
        wait_for_end(channel.peer, pidfd)
    except KvplugError:
        pass


def wait_for_end(process: PeerIdentity, pidfd: int | None) -> None:
    """Wait until a process has ended: the connection of a process that is killed ends before the process
    does. Return at once for this process, which returns the memory itself."""
    if pidfd is not None and not (process.visible and process.pid == os.getpid()):
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(END_S * 1000)
