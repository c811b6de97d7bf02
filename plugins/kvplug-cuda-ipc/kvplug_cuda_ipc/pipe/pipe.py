"""The pipe "cuda-ipc": each end has memory on its GPU that the other end has mapped, and copies from.

A sender copies a message into its own staging memory, piece by piece, and tells the peer of each piece. The
receiver copies the pieces from there to where they belong, and says which it has taken. Three copies of a
message are under way at most: into staging memory, out of it, and what the connection says.

Two threads: the reader hears what the peer says, and its end; the mover looks after copies under way, and
gives everything back in the end. Receiving is done by its caller. Nobody waits for a device but by asking,
and no work on a device waits for another process, which may never go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Blocks,
    Channel,
    Deadline,
    ExclusiveUse,
    Lifecycle,
    Pipe,
    Timeout,
    Transfer,
    WireError,
    close_after_fork,
)
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.device import Device
from kvplug_cuda_ipc.memory import Borrower, Mapping, Staging
from kvplug_cuda_ipc.pace import Pace
from kvplug_cuda_ipc.pipe.content import NOTHING, Target, content_of, content_of_blocks
from kvplug_cuda_ipc.pipe.inbox import Inbox
from kvplug_cuda_ipc.pipe.outbox import Outbox
from kvplug_cuda_ipc.pipe.words import Kind, read

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""How often the reader looks up while the peer says nothing."""
_SAY_S: Final = 5.0
"""How long the peer may leave unread what it is told. The connection holds all that one may say."""
_LEFT_S: Final = 10.0
"""How long messages of a peer that has closed the pipe can be received: it keeps their memory."""
_CLOSE_S: Final = 1.0
"""How long ``close`` waits for everything to be given back; a peer that is stopped takes longer."""
_BEATS_PER_TIMEOUT: Final = 5


@attrs.frozen(kw_only=True)
class Tuning:
    """What a pipe needs to know beside its connection."""

    device: Device
    staging_bytes: int
    piece_bytes: int
    max_in_flight_bytes: int
    timeout_s: float
    heartbeat_timeout_s: float


class CudaIpcPipe(Pipe):
    """One channel, memory of ours that the peer has mapped, and the peer's that we have."""

    def __init__(
        self,
        channel: Channel,
        staging: Staging,
        mapping: Mapping,
        tuning: Tuning,
        *,
        borrower: Borrower,
        peer: str,
        heartbeat_s: float | None,
    ) -> None:
        """Owns all of it from here on, unless it raises.

        ``heartbeat_s``: at least one of the two ends does not see the other's process, as both have found
        out; so long a silence is death.

        Raises:
            TransportError: there are no streams, or no threads.
        """
        self._peer = peer
        self._channel = channel
        self._borrower = borrower
        self._staging = staging
        self._tuning = tuning
        self._lifecycle = Lifecycle(f"the pipe to {peer}")
        self._heartbeat_s = heartbeat_s
        self._stopping = False
        self._unmapped = threading.Event()
        """The peer has nothing of ours open any more."""
        self._sending, self._receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        device = tuning.device
        self._streams = [device.new_stream(), device.new_stream()]
        self._outbox = Outbox(
            staging,
            device,
            self._streams[0],
            peer=peer,
            limit=tuning.max_in_flight_bytes,
            piece_bytes=tuning.piece_bytes,
            lifecycle=self._lifecycle,
            say=self._say,
            break_down=self._break_down,
        )
        self._inbox = Inbox(
            mapping,
            device,
            self._streams[1],
            peer=peer,
            lifecycle=self._lifecycle,
            say=self._say,
            break_down=self._break_down,
        )
        close_after_fork(self)
        self._reader = threading.Thread(target=self._read, name="kvplug-cuda-ipc-read", daemon=True)
        self._mover = threading.Thread(target=self._move, name="kvplug-cuda-ipc-move", daemon=True)

    def start(self) -> None:
        """Once, before anything else.

        Raises:
            TransportError: this process can have no more threads.
        """
        try:
            self._mover.start()
        except RuntimeError as e:
            for stream in self._streams:
                stream.close()
            raise TransportError(f"a pipe needs threads: {e}") from e

    def __repr__(self) -> str:
        state = "closed" if self._lifecycle.closed else "ended" if self._lifecycle.ended else "open"
        return f"<CudaIpcPipe to {self._peer}, {state}>"

    @property
    def closed(self) -> bool:
        return self._lifecycle.closed

    @property
    def peer(self) -> str:
        return self._peer

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            with self._on_device():
                content = NOTHING if tensor is None else content_of(tensor, self._tuning.device)
                return self._outbox.send(content, deadline)

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        self._check_open()
        with self._receiving.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            with self._on_device():
                return self._inbox.receive(Target(self._tuning.device, out=out), deadline)

    def send_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer:
        if self._lifecycle.ended:
            raise self._lifecycle.error()
        with self._sending.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            with self._on_device():
                content = content_of_blocks(Blocks(views, block_ids), self._tuning.device)
                return self._outbox.send(content, deadline)

    def recv_blocks(
        self, views: Sequence[Tensor], block_ids: Sequence[int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        self._check_open()
        blocks = Blocks(views, block_ids)
        blocks.check_distinct()
        with self._receiving.taken():
            deadline = Deadline.after(timeout, self._tuning.timeout_s)
            with self._on_device():
                self._inbox.receive(Target(self._tuning.device, blocks=blocks), deadline)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._tuning.timeout_s)
        if not self._lifecycle.close("is closed"):
            return
        here = threading.current_thread()
        self._inbox.wake()
        if here is not self._mover:  # in a callback of a transfer nobody else would copy
            self._outbox.drain(deadline)
        self._end()
        if here not in (self._mover, self._reader):
            self._mover.join(_CLOSE_S)

    def abort(self) -> None:
        # Also ends a close() that is still draining in another thread.
        if self._lifecycle.close("was aborted") or not self._stopping:
            self._end()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        device = self._tuning.device
        if device.is_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured on this stream, and messages of a pipe cannot be part of one"
            )
        with device.current():
            yield

    def _check_open(self) -> None:
        # A peer that has closed the pipe may have left whole messages behind.
        if self._lifecycle.closed or self._lifecycle.broken:
            raise self._lifecycle.error()

    def _end(self) -> None:
        """Wake everybody; the mover gives everything back. Blocks nowhere."""
        self._stopping = True
        self._inbox.end()
        self._outbox.end()

    def _after_fork_in_child(self) -> None:
        # The channel closes itself.
        self._stopping = True
        self._lifecycle.after_fork()
        self._borrower.close()
        self._outbox.inherit()

    # -- what is said, and bad news, from any thread ---------------------------------------------------

    def _say(self, value: Any) -> None:
        try:
            self._channel.send(value, timeout=_SAY_S)
        except (ClosedError, PeerGoneError, WireError):
            pass  # the reader hears it, and says so
        except TimeoutError as e:
            self._lifecycle.fail(f"it does not read what it is told: {e}")  # the reader ends it

    def _peer_over(self) -> None:
        """What it has wholly told of stays where it is, and can be received."""
        self._lifecycle.lose_peer("it closed the pipe")
        self._inbox.expect_no_more()
        self._outbox.end()

    def _peer_gone(self, reason: str) -> None:
        if self._lifecycle.lose_peer(reason):
            logger.debug("%r: %s", self, reason)
        self._end()

    def _break_down(self, reason: str) -> None:
        if self._lifecycle.fail(reason):
            logger.warning("%r: %s", self, reason)
        self._end()

    # -- the reader ------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Until the peer has let go of our memory, or is gone."""
        try:
            self._tuning.device.adopt()
            self._listen()
        except PeerGoneError as e:
            self._peer_gone(str(e))
            self._borrower.wait_for_end()
        except ClosedError:
            pass
        except BaseException as e:
            self._break_down(f"its peer is not heard any more: {e}")
        finally:
            self._borrower.close()
            self._unmapped.set()

    def _listen(self) -> None:
        pause = _LOOK_S if self._heartbeat_s is None else self._heartbeat_s / _BEATS_PER_TIMEOUT
        heard = next_beat = time.monotonic()
        kind: Kind | None = None
        while kind is not Kind.UNMAPPED:
            kind = None
            try:
                value = self._channel.recv(pause)
            except TimeoutError:
                value = None
            else:
                heard = time.monotonic()
                kind = self._hear(value)
            now = time.monotonic()
            if self._heartbeat_s is not None and not self._stopping:
                if now - heard >= self._heartbeat_s:
                    self._peer_gone(f"silent for {now - heard:.1f} s")
                elif now >= next_beat:
                    next_beat = now + pause
                    self._say([Kind.BEAT.value])
            if self._lifecycle.broken and not self._stopping:
                self._end()

    def _hear(self, value: Any) -> Kind | None:
        """What it was about; nothing but the last word counts once the pipe has ended."""
        try:
            kind, about = read(value)
            if kind in (Kind.OVER, Kind.UNMAPPED):
                self._peer_over()
            elif self._stopping or self._lifecycle.peer_lost:
                pass
            elif kind is Kind.PIECE:
                self._inbox.told(about)
            elif kind is Kind.TAKEN:
                self._outbox.taken(about)
            return kind
        except WireError as e:
            self._break_down(f"what its peer says cannot be: {e}")
        except CudaError as e:
            self._break_down(str(e))
        return None

    # -- the mover -------------------------------------------------------------------------------------

    def _move(self) -> None:
        device = self._tuning.device
        try:
            device.adopt()
            self._reader.start()
            pace = Pace()
            while self._outbox.wait_for_work():
                if self._outbox.step():
                    pace.stir()
                else:
                    pace.rest()
        except CudaError as e:
            self._break_down(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which nobody would see
            if not self._stopping:
                self._break_down(f"its thread failed: {e!r}")
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Memory is unmapped before its owner frees it, and freed when nothing is copied to or from it."""
        self._say([Kind.OVER.value])
        try:
            self._inbox.leave(Deadline.after(_LEFT_S))
        except CudaError as e:
            logger.warning("%r: what its peer lent was not unmapped: %s", self, e)
        self._say([Kind.UNMAPPED.value])
        pace = Pace()
        with contextlib.suppress(CudaError):  # the device has failed, and does nothing more
            while not self._outbox.settled():
                pace.rest()
        if self._reader.ident is None:  # it could not be started
            self._read()
        self._unmapped.wait()
        self._channel.close()
        try:
            self._staging.free()
        except KvplugError as e:
            logger.warning("%r: its memory was not given back: %s", self, e)
        for stream in self._streams:
            stream.close()
