"""The one thread of a pipe: it makes all calls of NCCL, and looks after the connection.

NCCL takes the calls on a communicator one after the other. The thread sleeps until the peer sends something
or a caller wants something; while the device is at work it polls it, for a moment without a pause, then at
most a millisecond apart. Callers never wait inside NCCL, so a deadline holds whatever NCCL does.

A communicator is aborted when its peer's process ends or hangs up, when NCCL reports an error, when the pipe
ends here, and when memory of the caller's has to be taken back. It is never used again: a new connection gets
new ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from kvplug import TransportError, UnsupportedError
from kvplug.transport import BackgroundThread, Deadline, Lifecycle, Watch, WireError
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.pipe.control import ControlConnection
from kvplug_pynccl.pipe.frames import Frame, FrameType
from kvplug_pynccl.pipe.inbox import Inbox
from kvplug_pynccl.pipe.outbox import Outbox

logger = logging.getLogger(__name__)

_POLL_S: Final = 100e-6
"""The device is polled for so long without a pause; most small messages have arrived by then."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_IDLE_CHECK_S: Final = 1.0
"""How often the communicators are asked for errors while no operation is running."""
_ABORT_WAIT_S: Final = 2.0
"""How long the end of a pipe waits for NCCL to let go of the running operations."""
_FINAL_STEP_S: Final = 0.5
"""An operation whose message the peer has taken ends here, too, in much less."""
_STUCK_S: Final = 10.0
"""How long the thread may take to end before its transfers fail without it."""
_HANG_UP_S: Final = 0.5
"""A peer that ended shows first in NCCL, or first in its connection: how long to wait for the latter."""
_CONNECTION_RESULTS: Final = (Result.REMOTE_ERROR, Result.SYSTEM_ERROR)


class PipeWorker:
    """``lost(reason)``: the peer is gone. ``fail_pipe(reason)``: the stream cannot be trusted any more.

    Both are called without locks, and call :meth:`stop`.
    """

    def __init__(
        self,
        control: ControlConnection,
        outbox: Outbox,
        inbox: Inbox,
        device: Device,
        *,
        lifecycle: Lifecycle,
        silence_s: float | None,
        lost: Callable[[str], None],
        fail_pipe: Callable[[str], None],
    ) -> None:
        """``silence_s``: seconds of silence that count as the peer's death; ``None``: it is seen."""
        self._control = control
        self._outbox = outbox
        self._inbox = inbox
        self._directions = (outbox.direction, inbox.direction)
        self._device = device
        self._lifecycle = lifecycle
        self._silence_s = silence_s
        self._lost = lost
        self._fail_pipe = fail_pipe
        self._stopping = False
        self._stuck: object = None
        """What the device was reading when a call of NCCL did not return."""
        self._thread = BackgroundThread(self._run, name="kvplug-pynccl-pipe", stop=self.stop)
        self._begun = threading.Event()
        """The thread was started, or cannot be."""

    def start(self, pidfd: int | None) -> None:
        """Watch the peer, and start the thread. Owns ``pidfd`` from here on.

        If it raises, the connection is closed, and the directions are still the caller's.
        """
        with ExitStack() as undo:
            undo.callback(self._begun.set)
            undo.callback(self._control.close)
            # Heartbeats are frames: this connection carries others as well.
            self._watch = Watch(pidfd=pidfd, sock=self._control.sock, on_gone=self._lose)
            undo.callback(self._watch.close)
            self._thread.start()
            self._begun.set()
            undo.pop_all()

    def is_current(self) -> bool:
        """Whether the caller is this thread: in a callback of a transfer."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Wake every caller, and have the thread release everything. Does not block. Idempotent.

        Another thread takes the locks for that. A signal's handler may be the caller: its own thread may hold
        one of the locks, and the worker another one while it waits for the first.
        """
        first, self._stopping = not self._stopping, True
        if self.is_current():
            self._wake_all()
        elif first:
            try:
                BackgroundThread(self._supervise, name="kvplug-pynccl-end", stop=self.stop).start()
            except RuntimeError:  # no more threads just now
                self._wake_all()

    def join(self) -> None:
        """Wait for the thread to be gone, after :meth:`stop`, but not for a call of NCCL that hangs."""
        if not self.is_current():
            self._thread.join(2 * _ABORT_WAIT_S)

    def _wake_all(self) -> None:
        self._outbox.end()
        self._inbox.end()
        self._control.wake()

    def _supervise(self) -> None:
        """Every call and transfer ends, even if a call of NCCL, or of the GPU's driver, does not return."""
        self._wake_all()
        self._begun.wait()  # the watch may find the peer gone before the thread was started
        if self._thread.ident is None:
            return
        self._thread.join(_STUCK_S)
        if self._thread.is_alive():
            logger.error(
                "the pipe to %s: a call of NCCL does not return; what it holds is not given back",
                self._control.peer,
            )
            self._stuck = self._outbox.in_use
            self._outbox.fail()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._device.current():
                self._work()
        except WireError as e:
            self._fail_pipe(f"what its peer says cannot be: {e}")
        except NcclError as e:
            self._nccl_failed(e)
        except TransportError as e:
            self._fail_pipe(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which would end the thread in silence
            if not self._stopping:
                self._fail_pipe(f"its thread failed: {e!r}")
        finally:
            try:
                if not self._lifecycle.closed and not self._lifecycle.broken:
                    self._read_what_was_taken()
            finally:
                self._release()

    def _work(self) -> None:
        control = self._control
        now = time.monotonic()
        last_received = last_change = next_beat = next_check = now
        pause = _SHORTEST_PAUSE_S
        busy = False
        while not self._stopping:
            if busy:
                if now - last_change >= _POLL_S:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                control.wait(0)
            else:
                control.wait(max(0.0, min(next_beat, next_check) - now))
            asked = time.monotonic()  # what came before is read now, however long this process was stopped
            frames = control.receive_now()
            for frame in frames:
                self._handle(frame)
            if control.ended:
                self._lose("it closed the connection")
                return
            sending = self._outbox.step()
            was_busy, busy = busy, self._inbox.step() or sending
            control.send_now()
            now = time.monotonic()
            if frames:
                last_received = asked
            if frames or not was_busy:
                last_change, pause = now, _SHORTEST_PAUSE_S
            if now >= next_check:
                next_check = now + _IDLE_CHECK_S
                if not busy:
                    for direction in self._directions:
                        direction.comm.is_settled()
            if self._silence_s is None:
                next_beat = next_check
            elif asked - last_received >= self._silence_s:
                self._lose(f"silent for {asked - last_received:.1f} s")
            elif now >= next_beat:
                next_beat = now + self._silence_s / Watch.Terms.BEATS_PER_TIMEOUT
                control.send(Frame(FrameType.HEARTBEAT).pack())

    def _handle(self, frame: Frame) -> None:
        try:
            if frame.type is FrameType.ANNOUNCE:
                self._inbox.announce(frame)
            elif frame.type is FrameType.CLEAR:
                self._outbox.clear(frame)
            elif frame.type is FrameType.TAKEN:
                self._outbox.take(frame)
            elif frame.type is FrameType.GOODBYE:
                self._lose(Lifecycle.CLOSED_BY_PEER)
        except UnsupportedError as e:
            raise WireError(str(e)) from e

    def _lose(self, reason: str) -> None:
        """The peer is gone. What shows that first may be anything; that it has said goodbye counts most."""
        self._lost(Lifecycle.CLOSED_BY_PEER if self._control.peer_said_goodbye() else reason)

    def _nccl_failed(self, error: NcclError) -> None:
        if error.result in _CONNECTION_RESULTS and self._control.has_hung_up(_HANG_UP_S):
            self._lose(f"its connection ended, and NCCL's: {error}")
        elif error.result == Result.REMOTE_ERROR:
            self._lose(str(error))
        else:
            self._fail_pipe(str(error))

    def _read_what_was_taken(self) -> None:
        """What the peer took before it went is done, even if NCCL reports an error for it."""
        deadline = Deadline.after(_FINAL_STEP_S)
        try:
            while not deadline.expired and (frames := self._control.receive_now()):
                for frame in frames:
                    if frame.type is FrameType.TAKEN:
                        self._outbox.take(frame)
        except WireError as e:
            logger.debug("the pipe to %s: what its peer sent last cannot be: %s", self._control.peer, e)
        self._outbox.finish_taken(deadline)

    def _release(self) -> None:
        """Callers have been woken. NCCL gets some time to end what is running: its memory is in use."""
        if not self._lifecycle.ended:
            self._lifecycle.lose_peer("its thread ended")
        self.stop()
        self._watch.close()
        self._control.hang_up()
        in_use = (self._stuck, self._outbox.in_use, self._inbox.in_use)
        until = Deadline.after(_ABORT_WAIT_S)
        for over in [direction.comm.abort(in_use) for direction in self._directions]:
            if not over.wait(until.remaining()):
                logger.error(
                    "the pipe to %s: NCCL does not end what is running; what it holds is not given back",
                    self._control.peer,
                )
        for direction in self._directions:
            direction.stream.close()
        self._outbox.fail()
        self._control.close()
