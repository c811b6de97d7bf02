"""What is between the two ends of a pipe, and the one thread that works on it.

That thread makes all calls of NCCL, which takes those on a communicator one after the other. It sleeps until
the connection says something or a caller wants something; while the device is at work it looks after it, for
a moment without a pause, then at most a millisecond apart. Callers never wait inside NCCL, so a deadline
holds whatever NCCL does.

A communicator is aborted when its peer's process ends or hangs up, when NCCL reports an error, when the pipe
ends here, and when memory of the caller's has to be taken back. It is never used again: what connects anew
gets new ones.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, suppress
from typing import Final

from kvplug import TransportError, UnsupportedError
from kvplug.transport import Connection, Deadline, Lifecycle, WireError, close_after_fork, watch
from kvplug_pynccl.device import Device
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.pipe.control import Control
from kvplug_pynccl.pipe.frames import Frame, Kind
from kvplug_pynccl.pipe.inbox import Inbox
from kvplug_pynccl.pipe.outbox import Outbox
from kvplug_pynccl.pipe.way import Way

logger = logging.getLogger(__name__)

_LOOK_S: Final = 100e-6
"""What is under way is looked at for so long without a pause; most small messages are over by then."""
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_IDLE_LOOK_S: Final = 1.0
"""How often the communicators are asked how they are while nothing is under way."""
_ABORT_PATIENCE_S: Final = 2.0
"""How long the end of a pipe waits for NCCL to let go of what is under way."""
_LAST_STEP_S: Final = 0.5
"""What the peer has wholly received ends here, too, in much less."""
_STUCK_S: Final = 10.0
"""How long the pipe's thread may take to end before its transfers fail without it."""
_HANG_UP_S: Final = 0.5
"""A peer that ended shows first in NCCL, or first in its connection: so long the other is waited for."""
_OF_CONNECTIONS: Final = (Result.REMOTE_ERROR, Result.SYSTEM_ERROR)
_BEATS_PER_TIMEOUT: Final = 5


class Link:
    """One connection, two communicators, two streams, one thread. The process's watcher looks at the peer."""

    def __init__(
        self,
        connection: Connection,
        outgoing: Way,
        incoming: Way,
        device: Device,
        *,
        max_in_flight_bytes: int,
        check_order: bool,
        pidfd: int | None,
        heartbeat_s: float | None,
    ) -> None:
        """Owns all of it from here on, once it is made; the peer's ``pidfd`` stays the caller's.

        ``heartbeat_s``: at least one of the two ends has no pidfd of the other, as both have found out; so
        long a silence is death.
        """
        self.peer = connection.describe
        self.lifecycle = Lifecycle(f"the pipe to {self.peer}")
        self.control = Control(connection)
        self._device = device
        self._ways = (outgoing, incoming)
        self._stopping = False
        self._stuck: object = None
        self._heartbeat_s = heartbeat_s
        self.outbox = Outbox(
            outgoing,
            peer=self.peer,
            limit=max_in_flight_bytes,
            lifecycle=self.lifecycle,
            say=self.control.say,
            wake=self.control.wake,
            break_down=self._break_down,
        )
        self.inbox = Inbox(
            incoming,
            device,
            peer=self.peer,
            check_order=check_order,
            lifecycle=self.lifecycle,
            say=self.control.say,
            wake=self.control.wake,
            break_down=self._break_down,
        )
        close_after_fork(self)
        self._thread = threading.Thread(target=self._run, name="kvplug-pynccl-pipe", daemon=True)
        self._begun = threading.Event()
        """It was started, or cannot be."""
        with ExitStack() as undo:
            undo.callback(self._begun.set)
            undo.callback(self.control.close)
            self._watch = watch(pidfd=pidfd, sock=self.control.sock, on_gone=self._peer_gone)
            undo.callback(self._watch.close)
            self._thread.start()
            self._begun.set()
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<pipe pynccl to {self.peer}, {self.state}>"

    @property
    def state(self) -> str:
        return "closed" if self.lifecycle.closed else "ended" if self.lifecycle.ended else "open"

    def close(self, deadline: Deadline) -> None:
        """What is queued is sent until then. Idempotent."""
        if not self.lifecycle.close("is closed"):
            return
        self.inbox.wake_callers()
        if not self._is_inside():  # in a callback of a transfer nobody else would send
            self.outbox.drain(deadline)
        self._end()
        if not self._is_inside():
            self._thread.join(2 * _ABORT_PATIENCE_S)

    def abort(self) -> None:
        """At once, beside the caller. Also ends a :meth:`close` that is still draining in another thread."""
        if self.lifecycle.close("was aborted") or not self._stopping:
            self._end()

    def _is_inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _end(self) -> None:
        """Wake everybody. The thread lets go of everything. Blocks nowhere."""
        first, self._stopping = not self._stopping, True
        self.outbox.end()
        self.inbox.end()
        self.control.wake()
        if first and not self._is_inside():
            with suppress(RuntimeError):  # no more threads just now
                threading.Thread(target=self._see_to_it, name="kvplug-pynccl-end", daemon=True).start()

    def _see_to_it(self) -> None:
        """Every transfer ends, also where a call of NCCL, or of the GPU's driver, does not return."""
        self._begun.wait()  # the watch may be quicker than its maker
        if self._thread.ident is None:
            return
        self._thread.join(_STUCK_S)
        if self._thread.is_alive():
            logger.error("%r: a call of NCCL does not return; what it holds is not given back", self)
            self._stuck = self.outbox.in_use
            self.outbox.fail()

    def _after_fork_in_child(self) -> None:
        self._stopping = True
        self.lifecycle.after_fork()
        self.control.inherit()
        self.outbox.inherit()

    # -- bad news, from any thread -------------------------------------------------------------------

    def _peer_gone(self, reason: str) -> None:
        if self.lifecycle.lose_peer(reason):
            logger.debug("%r: %s", self, reason)
        self._end()

    def _break_down(self, reason: str) -> None:
        if self.lifecycle.fail(reason):
            logger.warning("%r: %s", self, reason)
        self._end()

    def _nccl_failed(self, error: NcclError) -> None:
        if error.result in _OF_CONNECTIONS and self.control.has_hung_up(_HANG_UP_S):
            self._peer_gone(f"its connection ended, and NCCL's: {error}")
        elif error.result == Result.REMOTE_ERROR:
            self._peer_gone(str(error))
        else:
            self._break_down(str(error))

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._device.current():
                self._work()
        except WireError as e:
            self._break_down(f"what its peer says cannot be: {e}")
        except NcclError as e:
            self._nccl_failed(e)
        except TransportError as e:
            self._break_down(str(e))
        except BaseException as e:  # a callback may raise SystemExit, which nobody would see
            if not self._stopping:
                self._break_down(f"its thread failed: {e!r}")
        finally:
            try:
                if not self.lifecycle.closed and not self.lifecycle.broken:
                    self._hear_last_words()
            finally:
                self._let_go()

    def _work(self) -> None:
        control = self.control
        now = time.monotonic()
        heard = stirred = next_beat = next_look = now
        pause = _SHORTEST_PAUSE_S
        busy = False
        while not self._stopping:
            if busy:
                if now - stirred >= _LOOK_S:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                control.sleep(0)
            else:
                control.sleep(max(0.0, min(next_beat, next_look) - now))
            asked = time.monotonic()  # what came before is read now, however long this process was stopped
            frames = control.receive_now()
            for frame in frames:
                self._hear(frame)
            if control.ended:
                self._peer_gone("it closed the connection")
                return
            sending = self.outbox.step()
            was, busy = busy, self.inbox.step() or sending
            control.send_now()
            now = time.monotonic()
            if frames:
                heard = asked
            if frames or not was:
                stirred, pause = now, _SHORTEST_PAUSE_S
            if now >= next_look:
                next_look = now + _IDLE_LOOK_S
                if not busy:
                    for way in self._ways:
                        way.comm.is_settled()
            if self._heartbeat_s is None:
                next_beat = next_look
            elif asked - heard >= self._heartbeat_s:
                self._peer_gone(f"silent for {asked - heard:.1f} s")
            elif now >= next_beat:
                next_beat = now + self._heartbeat_s / _BEATS_PER_TIMEOUT
                control.say(Frame(Kind.BEAT).pack())

    def _hear(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.ANNOUNCE:
                self.inbox.announce(frame)
            elif frame.kind is Kind.CLEAR:
                self.outbox.clear(frame)
            elif frame.kind is Kind.TAKEN:
                self.outbox.take(frame)
        except UnsupportedError as e:
            raise WireError(str(e)) from e

    def _hear_last_words(self) -> None:
        """A peer that has gone may have said before what it had taken: that is done, however NCCL sees it."""
        deadline = Deadline.after(_LAST_STEP_S)
        try:
            while not deadline.expired and (frames := self.control.receive_now()):
                for frame in frames:
                    if frame.kind is Kind.TAKEN:
                        self.outbox.take(frame)
        except WireError as e:
            logger.debug("%r: its last words were none: %s", self, e)
        self.outbox.settle_taken(deadline)

    def _let_go(self) -> None:
        """Whoever waits has been woken. NCCL has some time to end what is under way: its memory is in use."""
        if not self.lifecycle.ended:
            self.lifecycle.lose_peer("its thread ended")
        self._end()
        self._watch.close()
        self.control.hang_up()
        in_use = (self._stuck, self.outbox.in_use, self.inbox.in_use)
        until = Deadline.after(_ABORT_PATIENCE_S)
        for over in [way.comm.abort(in_use) for way in self._ways]:
            if not over.wait(until.remaining()):
                logger.error("%r: NCCL does not end what is under way; what it holds is not given back", self)
        for way in self._ways:
            way.stream.close()
        self.outbox.fail()
        self.control.close()
