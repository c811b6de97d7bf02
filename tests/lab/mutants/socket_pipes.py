"""The sample's pipe with one fault each that only shows between processes, in forks, or in what is left."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# Where the sample is installed it is that one; the other processes import this file too.
sys.path.append(str(Path(__file__).parents[3] / "docs" / "examples" / "kvplug-sample"))

from kvplug.errors import PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    PartialMessage,
    Pipe,
    PipeListener,
    Timeout,
    Transfer,
)
from kvplug_lab.mutants import breaks
from kvplug_sample import pipe as sample
from kvplug_sample.options import SampleOptions
from kvplug_sample.pipe import SamplePipe
from kvplug_testing import PipeContract

kept: list[Any] = []


class Wrapper(PipeListener):
    """No fault: a listener of the sample."""

    def __init__(self, inner: PipeListener) -> None:
        self.inner = inner

    @property
    def contact(self) -> str:
        return self.inner.contact

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return self.inner.accept(timeout)

    def close(self) -> None:
        self.inner.close()


class Mutant(PipeContract):
    """One fault, in ``pipe`` or in ``listener``; ``breaks`` are the laws that it breaks."""

    options_class = SampleOptions
    pipe: type[SamplePipe] = SamplePipe
    listener: type[Wrapper] = Wrapper
    parts = ("listener", "pipe")

    def make_endpoint(self, context: Any) -> Any:
        vars(sample).update(SamplePipe=self.pipe)  # what endpoints make
        endpoint = sample.SampleEndpoint(context)
        listen = endpoint.listen
        vars(endpoint).update(listen=lambda: self.listener(listen()))
        return endpoint


# -- deaths ----------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-2")
class TestSeesOnlyItsSocket(SamplePipe):
    """The peer's process is not watched: while a child of it holds the socket it looks alive."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._watch.close()


@breaks(Mutant, "ALL-2")
class TestWakesNobody(SamplePipe):
    """A death is noted for the next call, and a blocked call stays blocked."""

    def _peer_gone(self, reason: str) -> None:
        self._lifecycle.lose_peer(reason)


@breaks(Mutant, "ALL-2")
class TestReturnsWhatCameOfAMessage(SamplePipe):
    """When the peer dies in the middle of a message, the received part is returned as the whole message."""

    def _fill(self, *args: Any) -> bool:
        try:
            return super()._fill(*args)
        except PeerGoneError:
            return True


class ByteByByteSocket:
    """A socket that sends what is as short as the start of a message a byte at a time."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sendall(self, part: memoryview) -> None:
        step = 1 if len(part) < 256 else len(part)
        for at in range(0, len(part), step):
            self._inner.sendall(part[at : at + step])


class ByteByByte(SamplePipe):
    """No fault: the start of a message is sent a byte at a time, so that a death can cut it anywhere."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sock: Any = ByteByByteSocket(self._sock)

    @property
    def in_header(self) -> bool:
        """Whether only a part of a header has come of the next message."""
        return bool(self._prefix)

    def _missing(self) -> int:
        return min(1, super()._missing())


@breaks(Mutant, "ALL-2")
class TestWaitsForTheRestOfAHeader(ByteByByte):
    """When the peer dies in the middle of a header, the rest of it is waited for."""

    def _next_message(self, deadline: Deadline) -> PartialMessage:
        try:
            return super()._next_message(deadline)
        except PeerGoneError:
            if self.in_header:
                threading.Event().wait(deadline.remaining())
                raise TimeoutError("the rest of a header did not come in time") from None
            raise


@breaks(Mutant, "ALL-2")
class TestTakesAPartOfAHeaderForNone(ByteByByte):
    """When the peer dies in the middle of a header, the received part is taken for the message ``None``."""

    def _next_message(self, deadline: Deadline) -> PartialMessage:
        try:
            return super()._next_message(deadline)
        except PeerGoneError:
            if self.in_header:
                return PartialMessage(None)
            raise


@breaks(Mutant, "ALL-5")
class TestForgetsWhatWaited(SamplePipe):
    """When the peer dies, transfers that were still queued are dropped and not failed."""

    def _peer_gone(self, reason: str) -> None:
        self._queue.clear()
        super()._peer_gone(reason)


@breaks(Mutant, "ALL-2")
class TestTakesADeathForAClose(SamplePipe):
    """When the peer dies, calls raise that the pipe was closed here."""

    def _peer_gone(self, reason: str) -> None:
        self._lifecycle.close("is closed")
        super()._peer_gone(reason)


@breaks(Mutant, "END-2")
class TestListenerEndsWithABadPeer(Wrapper):
    """A peer that is dead when it is accepted ends the listener."""

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        pipe = super().accept(timeout)
        if pipe._lifecycle.ended:
            self.close()
            raise pipe._lifecycle.error()
        return pipe


@breaks(Mutant, "END-2")
class TestListenerServesOneAtATime(Wrapper):
    """No peer is accepted before the one that was accepted last has sent something, or is gone."""

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        import select

        last = vars(self).get("last")
        if last is not None and last._sock.fileno() >= 0:
            select.select([last._sock], [], [], 20.0)
        self.last = super().accept(timeout)
        return self.last


# -- stops -----------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-3")
class TestTakesStoppedForDead(SamplePipe):
    """A peer that is stopped when a receive runs out of time counts as dead."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pid = args[0].peer.pid

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        try:
            return super().recv_tensor(*args, **given)
        except TimeoutError:
            status = Path(f"/proc/{self.pid}/stat").read_text()
            if status.rpartition(")")[2].split()[0] == "T":
                self._peer_gone("it is silent")
                raise self._lifecycle.error() from None
            raise


@breaks(Mutant, "PIPE-6")
class TestSkipsTheRest(SamplePipe):
    """A message in which a receive ran out of time is thrown away when its rest comes."""

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        if self._message is not None:
            super().recv_tensor(timeout=20.0)
        return super().recv_tensor(*args, **given)


@breaks(Mutant, "PIPE-3")
class TestHasNoBound(SamplePipe):
    """Whatever is sent to a stopped peer is queued."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window.limit = 1 << 40


# -- forks -----------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-6")
class TestTakesNoNoticeOfForks(SamplePipe):
    """In a forked child the pipe is as open as in the parent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for part in (self, self._lifecycle, self._descriptors):
            part._after_fork_in_child = lambda: None


@breaks(Mutant, "ALL-6")
class TestLeavesAForkedChildItsMemory(SamplePipe):
    """In a forked child the pipe's shared memory stays mapped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def _release(self) -> None:
        super()._release()
        self.memory.close()


class NeverEndsInAForkedChild(Transfer):
    """No fault by itself."""

    __slots__ = ()

    def _look_for_fork(self) -> None:
        pass


@breaks(Mutant, "ALL-6")
class TestForgetsTransfersInAForkedChild(SamplePipe):
    """In a forked child the parent's transfers stay under way for ever."""

    def _send_tensor(self, tensor: Any, timeout: Timeout) -> Transfer:
        transfer = super()._send_tensor(tensor, timeout)
        transfer.__class__ = NeverEndsInAForkedChild
        return transfer


# -- what is left ----------------------------------------------------------------------------------


@breaks(Mutant, "ALL-7")
class TestLeavesADescriptor(SamplePipe):
    """A copy of the descriptor outlives each connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.dup(self._sock.fileno())


@breaks(Mutant, "ALL-7")
class TestLeavesAThread(SamplePipe):
    """A thread outlives each connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@breaks(Mutant, "ALL-7")
class TestLeavesAName(Wrapper):
    """A listener that is closed goes on listening."""

    def close(self) -> None:
        kept.append(self.inner)


@breaks(Mutant, "ALL-7")
class TestKeepsEverySource(SamplePipe):
    """What was sent is never freed, though its transfer is done."""

    def send_tensor(self, tensor: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        vars(self).setdefault("sent", []).append(tensor)
        return super().send_tensor(tensor, timeout=timeout)


# -- the end of the program ------------------------------------------------------------------------


@breaks(Mutant, "ALL-8")
class TestIsAtWorkWhenTheProgramLeaves(SamplePipe):
    """A thread of the pipe is in calls of torch for a while after the end, also when the program leaves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=self.work, name="mutant", daemon=True).start()

    def work(self) -> None:
        import torch

        zeros = torch.zeros(1 << 16)
        ended = 0.0
        while not ended or time.monotonic() < ended + 0.5:
            zeros.neg_()
            if self.closed and not ended:
                ended = time.monotonic()


@breaks(Mutant, "ALL-8")
class TestKeepsTheProgramFromLeaving(SamplePipe):
    """When the program leaves, a thread of the pipe is waited for until the peer has closed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=self.wait, name="mutant").start()

    def wait(self) -> None:
        while not self._lifecycle.ended:
            time.sleep(0.01)


# -- what runs out ---------------------------------------------------------------------------------


class Short(Mutant):
    """A connect that meets a shortage ends by :meth:`meet`."""

    def make_endpoint(self, context: Any) -> Any:
        endpoint = super().make_endpoint(context)
        connect, met = endpoint.connect, list[ResourceExhaustedError]()

        def connecting(contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
            if met:
                self.meet(met[0])
            self.prepare()
            try:
                return connect(contact, timeout)  # type: ignore[no-any-return]
            except ResourceExhaustedError as e:
                if self.remembers:
                    met.append(e)
                self.meet(e)
                raise

        vars(endpoint).update(connect=connecting)
        return endpoint

    remembers = False

    def prepare(self) -> None:
        """Before each connect."""

    def meet(self, error: ResourceExhaustedError) -> None:
        raise error


class TestRemembersAShortage(Short):
    """After one shortage it connects no more, although there is enough again."""

    breaks = ("ALL-9",)
    remembers = True


class TestSaysNothingOfAShortage(Short):
    """The error names nothing that ran out."""

    breaks = ("ALL-9",)

    def meet(self, error: ResourceExhaustedError) -> None:
        raise TransportError("it cannot be connected")


class TestLetsAnErrorOfDescriptorsOut(Short):
    """A connect opens something itself, and the error is the system's."""

    breaks = ("ALL-9",)

    def prepare(self) -> None:
        os.close(os.open("/dev/null", os.O_RDONLY))


class TestLetsAnErrorOfThreadsOut(Short):
    """A connect starts a thread itself, and the error is Python's."""

    breaks = ("ALL-9",)

    def prepare(self) -> None:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


class TestLetsAnErrorOfMemoryOut(Short):
    """A connect takes memory itself, and the error is Python's."""

    breaks = ("ALL-9",)

    def prepare(self) -> None:
        bytearray(64 << 20)


class TestLetsAnErrorOfSpaceOut(Short):
    """A connect writes to shared memory itself, and the error is the system's."""

    breaks = ("ALL-9",)

    def prepare(self) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(bytes(1 << 20))


# -- the control -----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The sample's pipe as it is."""

    is_control = True
