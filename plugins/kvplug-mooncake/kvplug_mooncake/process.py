"""The store's handle of the client process: starts it, calls it, ends it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvplug import TransportError
from kvplug.transport import BackgroundThread, BlockingStore, Deadline, MissReason, Segment, close_after_fork
from kvplug_mooncake.landing import Landing, LateError, Slot
from kvplug_mooncake.protocol import (
    MAX_PACKET,
    Answer,
    Ping,
    Ready,
    Refused,
    Reply,
    Request,
    Setup,
    decode_reply,
    encode,
)

_START_S: Final = 10.0
"""Time limit for starting Python and Mooncake, and finding a master."""
_CLOSE_S: Final = 3.0
_REAP_S: Final = 1.0
_AGAIN_S: Final = 0.002
_PING_S: Final = 1.0


class ClientGoneError(TransportError):
    """The client process has ended."""


class _Call:
    __slots__ = ("answer", "done", "is_late", "slot")

    def __init__(self, slot: Slot | None) -> None:
        self.slot = slot
        self.done = threading.Event()
        self.answer: Answer | None = None
        self.is_late = False


class ClientProcess:
    """One client process, and the landing area that it shares with this process.

    Each client process has its own area: memory that an earlier one may still write to is not used again.
    """

    def __init__(self, setup: Setup, log_file: str | None = None) -> None:
        """Start the process, without waiting until it is ready.

        Raises:
            ResourceExhaustedError, OSError: memory, descriptors or threads ran out.
        """
        self._setup = setup
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._is_started = threading.Event()
        """Set when the process is ready, or has ended before."""
        self._is_ready = self._is_closing = self._is_gone = False
        self._why = "Mooncake's client process has ended"
        self.num_late = 0
        """Calls that were given up but have not ended."""
        segment, fd = Segment.create("mooncake", setup.landing_bytes)
        try:
            self.landing = Landing(segment.view)
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._process = _started(theirs.fileno(), fd, log_file)
                except BaseException:
                    self._sock.close()
                    raise
        finally:
            os.close(fd)
        close_after_fork(self)
        self._reader = BackgroundThread(self._read, name="kvplug-mooncake-client", stop=self._shut_down)
        try:
            self._sock.send(encode(setup))
            self._reader.start()
        except BaseException:
            self._reap()
            raise

    def wait_until_ready(self) -> None:
        """Return when the process can be called.

        Raises:
            TransportError: it failed to start; the message has the reason.
        """
        self._is_started.wait()
        if self._is_gone:
            raise TransportError(self._why)

    def _begin(self) -> bool:
        """Returns whether the process is ready."""
        self._sock.settimeout(_START_S)
        try:
            reply = self._received()
            self._sock.settimeout(None)
        except TimeoutError:
            self._why = (
                f"Mooncake's client was not ready within {_START_S:.0f} s: the master at {self._setup.master}"
                " does not answer"
            )
            return False
        if isinstance(reply, Refused):
            self._why = reply.reason
        elif not isinstance(reply, Ready):
            self._why = "Mooncake's client process ended at start: set options.mooncake.log_file to see why"
        return isinstance(reply, Ready)

    def _received(self) -> Reply | None:
        """The next message; ``None`` if the process has ended, or sent an invalid one."""
        try:
            packet = self._sock.recv(MAX_PACKET)
            return decode_reply(packet) if packet else None
        except TimeoutError:
            raise
        except (OSError, msgspec.DecodeError):
            return None

    # -- calls ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lent(self, nbytes: int, deadline: Deadline) -> Iterator[Slot]:
        """A slot for one call. If the call is given up, the slot is lent again only after the call's end.

        Raises:
            CapacityError: the landing area is smaller.
            LateError: no slot was free by the deadline.
        """
        slot = self.landing.take(nbytes, deadline)
        try:
            yield slot
        finally:
            if not slot.is_awaited:
                self.landing.give(slot)

    def call(self, make: Callable[[int], Request], deadline: Deadline, slot: Slot | None = None) -> Answer:
        """Send the request that ``make`` returns for a call's number, and wait for its answer.

        Args:
            slot: memory that the process may access until it answers.

        Raises:
            LateError: no answer arrived by the deadline.
            ClientGoneError: the process has ended.
            BlockingStore.PageError: the store was closed.
        """
        call = _Call(slot)
        with self._lock:
            if self._is_gone or self._is_closing:
                raise self._ended()
            number = next(self._numbers)
            self._calls[number] = call
        try:
            self._send(encode(make(number)), deadline)
        except BaseException:
            with self._lock:
                self._calls.pop(number, None)
            raise
        if not call.done.wait(deadline.remaining()):
            with self._lock:
                if not call.done.is_set():
                    call.is_late = True
                    self.num_late += 1
                    if slot is not None:
                        slot.is_awaited = True
                    raise LateError("Mooncake did not answer in time")
        if call.answer is None:
            raise self._ended()
        return call.answer

    def _ended(self) -> TransportError:
        if self._is_closing:
            return BlockingStore.PageError(MissReason.CLOSED, "the store was closed")
        return ClientGoneError("Mooncake's client process has ended")

    def _send(self, packet: bytes, deadline: Deadline) -> None:
        while True:
            try:
                with self._lock:  # the socket must not be closed meanwhile
                    if self._is_gone:
                        raise self._ended()
                    self._sock.send(packet, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if deadline.expired:
                    raise LateError("Mooncake's client process does not read") from None
                time.sleep(_AGAIN_S)
            except (BrokenPipeError, ConnectionResetError) as e:
                raise self._ended() from e

    def is_stuck(self) -> bool:
        """Whether the process does not answer a ping: it hangs, or all its lanes do."""
        try:
            self.call(Ping, Deadline.after(_PING_S))
        except LateError:
            return True
        except TransportError:
            pass
        return False

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def _read(self) -> None:
        try:
            self._is_ready = self._begin()
            if self._is_ready:
                self._is_started.set()
                self._take_answers()
        finally:
            self._reap()

    def _take_answers(self) -> None:
        while isinstance(reply := self._received(), Answer):
            with self._lock:
                call = self._calls.pop(reply.number, None)
                if call is None:
                    continue
                call.answer = reply
                call.done.set()
                late = call.is_late
                self.num_late -= late
            if late and call.slot is not None:
                self.landing.give(call.slot)

    def _reap(self) -> None:
        """Wait for the process's end, or kill it, after its socket was closed."""
        with self._lock:
            self._is_gone = True
            self._sock.close()
            calls, self._calls = self._calls, {}
        self._is_started.set()
        for call in calls.values():
            call.done.set()
        if self._is_closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        self._process.kill()
        self._process.wait()

    def _shut_down(self) -> None:
        """Make the process finish its calls and end. Does not wait."""
        self._is_closing = True
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process. Running calls fail. Does not wait."""
        self._process.kill()

    def close(self) -> None:
        """End the process, after its running calls unless one is late. Idempotent."""
        if self.num_late or not self._is_ready:
            self.kill()
        self._shut_down()
        self._reader.join(_CLOSE_S)
        if self._reader.is_alive():
            self.kill()
            self._reader.join(_REAP_S)

    def _after_fork_in_child(self) -> None:
        self._is_gone = True
        self._sock.close()
        self._process.returncode = 0  # it belongs to the parent


def _started(sock: int, memory: int, log_file: str | None) -> subprocess.Popen[bytes]:
    """Start the process in its own session, so that Ctrl-C does not reach it directly."""
    command = [sys.executable, "-P", "-m", "kvplug_mooncake.client", str(sock), str(memory)]
    with open(log_file or os.devnull, "ab") as log:
        return subprocess.Popen(
            command,
            pass_fds=(sock, memory),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVPLUG_")},
            start_new_session=True,
        )
