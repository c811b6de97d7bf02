"""The pipe "cuda-ipc": each end copies from memory of the other end's GPU, which it has mapped.

A sender copies a message into its own staging memory, piece by piece, and announces each piece to the peer.
The receiver copies the pieces from there to where they belong, and tells the sender which it has taken. So a
message is copied twice, and only frames go over the connection.

Two threads: the reader receives frames and notices the peer's end; the worker follows the copies under way,
and at the end unmaps and frees memory. Callers receive in their own thread. A device is only ever asked, not
waited for, and no work on a device waits for another process, which may never go on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, UnsupportedError
from kvplug.transport import (
    BackgroundThread,
    Blocks,
    Channel,
    Deadline,
    DuplexPipe,
    NamedExhaustion,
    Timeout,
    Transfer,
    Watch,
    WireError,
)
from kvplug_cuda_ipc.backoff import Backoff
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.device import Device, Stream
from kvplug_cuda_ipc.memory import Mapping, Staging
from kvplug_cuda_ipc.peer_process import PeerProcess
from kvplug_cuda_ipc.pipe.content import Target, content_of, content_of_blocks
from kvplug_cuda_ipc.pipe.frames import FrameKind, Piece, decode, encode
from kvplug_cuda_ipc.pipe.inbox import Inbox
from kvplug_cuda_ipc.pipe.outbox import Outbox
from kvplug_cuda_ipc.pipe.pieces import AnnouncedPieces

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S: Final = 1.0
"""Seconds between two looks of the reader at the pipe's state, while no frame arrives."""
_SEND_S: Final = 5.0
"""Seconds that the peer may take to read a frame. The connection holds all frames that may be unread."""
_UNTAKEN_S: Final = 10.0
"""Seconds for which messages of a peer that has closed the pipe can be received. It keeps their memory."""
_JOIN_WORKER_S: Final = 1.0
"""Seconds that ``close`` waits until everything is given back; while the peer is stopped it takes longer."""


@attrs.frozen(kw_only=True)
class CudaIpcPipeSettings(DuplexPipe.Settings):
    """What a pipe needs to know besides its connection and memory. Sizes are in bytes."""

    device: Device
    max_in_flight_bytes: int
    staging_bytes: int
    piece_bytes: int


class CudaIpcPipe(DuplexPipe):
    """One channel, staging memory that the peer has mapped, and the peer's staging memory."""

    def __init__(
        self,
        channel: Channel,
        staging: Staging,
        mapping: Mapping,
        settings: CudaIpcPipeSettings,
        *,
        peer_process: PeerProcess,
        peer: str,
        silence_s: float | None,
    ) -> None:
        """Owns all of it from here on, unless it raises.

        ``silence_s``: seconds of silence that both ends take for death, with heartbeats, because one of them
        does not see the other's process; ``None``: both see it, and send none.

        Raises:
            TransportError, ResourceExhaustedError: there are no more streams, or threads.
        """
        super().__init__(peer, settings, device=settings.device.name)
        self.channel = channel
        """Carries the frames."""
        self._peer_process = peer_process
        self._staging = staging
        self._device = device = settings.device
        self._silence_s = silence_s
        self._pieces = AnnouncedPieces(mapping.nbytes, self._lifecycle)
        self._unmapped = threading.Event()
        """The peer has unmapped this end's memory, or has ended."""
        with contextlib.ExitStack() as undo:
            self._streams: list[Stream] = []
            for _ in range(2):
                self._streams.append(device.new_stream())
                undo.callback(self._streams[-1].close)
            self._outbox = Outbox(
                staging,
                device,
                self._streams[0],
                peer=peer,
                limit=settings.max_in_flight_bytes,
                piece_bytes=settings.piece_bytes,
                lifecycle=self._lifecycle,
                announce=self._announce,
                fail_pipe=self._fail,
            )
            self._inbox = Inbox(
                self._pieces,
                mapping,
                device,
                self._streams[1],
                peer=peer,
                message_limit=self._limit,
                lifecycle=self._lifecycle,
                taken=self._taken,
                fail_pipe=self._fail,
            )
            both_run = queue.SimpleQueue[bool]()
            # At exit the worker has the reader end: when the peer has unmapped this end's memory.
            self._reader, self._worker = (
                BackgroundThread(run, args=(both_run,), name=f"kvplug-cuda-ipc-{what}", stop=self.abort)
                for run, what in ((self._read, "read"), (self._work, "work"))
            )
            with NamedExhaustion("a pipe needs two threads"):
                try:
                    self._reader.start()
                    self._worker.start()
                except BaseException:
                    both_run.put(False)
                    raise
            for _ in range(2):
                both_run.put(True)
            undo.pop_all()

    # -- moving bytes ----------------------------------------------------------------------------------

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        with self._on_device():
            return self._outbox.send(content_of(tensor, self._device), self._deadline(timeout))

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        with self._on_device():
            return self._inbox.receive(Target(self._device, out=out), self._deadline(timeout))

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        with self._on_device():
            return self._outbox.send(content_of_blocks(blocks, self._device), self._deadline(timeout))

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        with self._on_device():
            self._inbox.receive(Target(self._device, blocks=blocks), self._deadline(timeout))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.is_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured on this stream, and messages of a pipe cannot be part of one"
            )
        with self._device.current():
            yield

    # -- how it ends -----------------------------------------------------------------------------------

    def _drain(self, deadline: Deadline) -> None:
        self._pieces.stop()
        if threading.current_thread() is not self._worker:  # in a transfer's callback it has to go on
            self._outbox.drain(deadline)

    def _release(self) -> None:
        """The worker, which is woken, gives everything back."""
        self._pieces.stop()
        self._outbox.fail()

    def _join_threads(self) -> None:
        if threading.current_thread() not in (self._worker, self._reader):
            self._worker.join(_JOIN_WORKER_S)

    def _release_in_child(self) -> None:
        # The channel closes itself.
        self._peer_process.close()

    def _peer_closed(self) -> None:
        """What the peer has wholly announced stays where it is, and can be received."""
        lost = self._pieces.has_incomplete
        self._lifecycle.lose_peer("it ended within a message" if lost else self._lifecycle.CLOSED_BY_PEER)
        self._pieces.expect_no_more()
        self._outbox.fail()

    # -- sending frames, in any thread, maybe with locks -------------------------------------------------

    def _announce(self, piece: Piece) -> None:
        self._send_frame(FrameKind.PIECE, piece)

    def _taken(self, count: int) -> None:
        self._send_frame(FrameKind.TAKEN, count)

    def _send_frame(self, kind: FrameKind, content: Piece | int | None = None) -> None:
        try:
            self.channel.send(encode(kind, content), timeout=_SEND_S)
        except (ClosedError, PeerGoneError, WireError):
            pass  # the reader notices it, and ends the pipe
        except TimeoutError as e:
            self._lifecycle.fail(f"the peer does not read: {e}")  # the reader ends it

    # -- the reader ------------------------------------------------------------------------------------

    def _read(self, both_run: queue.SimpleQueue[bool]) -> None:
        """Until the peer has unmapped this end's memory, or is gone."""
        if not both_run.get():
            return
        try:
            self._device.adopt()
            self._read_frames()
        except PeerGoneError as e:
            with contextlib.suppress(SystemExit):  # of a callback; the peer may have this end's memory mapped
                self._peer_gone(str(e))
            self._peer_process.wait_for_end()
        except ClosedError:
            pass
        except BaseException as e:
            self._fail(f"its frames are not read any more: {e}")
        finally:
            self._peer_process.close()
            self._unmapped.set()

    def _read_frames(self) -> None:
        silence_s = self._silence_s
        interval_s = _POLL_S if silence_s is None else silence_s / Watch.Terms.BEATS_PER_TIMEOUT
        heard = next_beat = time.monotonic()
        kind: FrameKind | None = None
        while kind is not FrameKind.UNMAPPED:
            kind = None
            try:
                value = self.channel.recv(interval_s)
            except TimeoutError:
                pass
            else:
                heard = time.monotonic()
                kind = self._handle(value)
            now = time.monotonic()
            if silence_s is not None and not self._let_go:
                if now - heard >= silence_s:
                    self._peer_gone(f"silent for {now - heard:.1f} s")
                elif now >= next_beat:
                    next_beat = now + interval_s
                    self._send_frame(FrameKind.HEARTBEAT)
            if self._lifecycle.broken and not self._let_go:
                self._end()

    def _handle(self, value: Any) -> FrameKind | None:
        """A frame has come; returns its kind. After the end, only the last one has an effect."""
        try:
            kind, content = decode(value)
            if kind in (FrameKind.GOODBYE, FrameKind.UNMAPPED):
                self._peer_closed()
            elif self._let_go or self._lifecycle.peer_lost:
                pass
            elif kind is FrameKind.PIECE:
                self._pieces.add(content)
            elif kind is FrameKind.TAKEN:
                self._outbox.taken(content)
            return kind
        except WireError as e:
            self._fail(f"the peer sent what cannot be: {e}")
        except CudaError as e:
            self._fail(str(e))
        return None

    # -- the worker ------------------------------------------------------------------------------------

    def _work(self, both_run: queue.SimpleQueue[bool]) -> None:
        both_run.get()
        try:
            self._device.adopt()
            backoff = Backoff()
            while self._outbox.wait_for_work():
                if self._outbox.step():
                    backoff.reset()
                else:
                    backoff.pause()
        except CudaError as e:
            self._fail(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which would end the thread in silence
            if not self._let_go:
                self._fail(f"its thread failed: {e!r}")
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Unmap the peer's memory before the peer frees it; free this end's once it is unused everywhere."""
        self._send_frame(FrameKind.GOODBYE)
        try:
            self._inbox.unmap(Deadline.after(_UNTAKEN_S))
        except CudaError as e:
            self._logger.warning("%r: the peer's memory was not unmapped: %s", self, e)
        self._send_frame(FrameKind.UNMAPPED)
        backoff = Backoff()
        with contextlib.suppress(CudaError):  # the device has failed, and does nothing more
            while not self._outbox.is_idle():
                backoff.pause()
        self._unmapped.wait()
        self.channel.close()
        try:
            self._staging.free()
        except KvplugError as e:
            self._logger.warning("%r: its memory was not freed: %s", self, e)
        for stream in self._streams:
            stream.close()
