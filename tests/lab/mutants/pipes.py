"""The pipe "memory" with one fault each, and the law that the fault breaks."""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections import deque
from typing import Any, ClassVar

from kvplug.errors import CapacityError, PeerGoneError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe import Transfer
from kvplug_lab.mutants import breaks
from kvplug_testing import PipeContract
from kvplug_testing.memory import pipe as memory
from kvplug_testing.memory.pipe import MemoryEndpoint, MemoryListener, MemoryPipe, PipeMessage
from kvplug_testing.simulated.streams import Stream, on_stream

MIB = 1 << 20
kept: list[Any] = []


class Mutant(PipeContract):
    """One fault: of ``pipe``, ``listener`` or ``endpoint_class``. ``breaks`` are the laws that it breaks."""

    transport = "memory"
    across_processes = False
    beyond_limit_bytes = 0
    pipe: type[MemoryPipe] = MemoryPipe
    listener: type[MemoryListener] = MemoryListener
    endpoint_class: type[MemoryEndpoint] = MemoryEndpoint
    parts = ("pipe", "listener", "endpoint_class")

    def make_endpoint(self, context: Any) -> Any:
        pipe, listener = self.pipe, self.listener

        class Endpoint(self.endpoint_class):  # type: ignore[name-defined, misc]
            def make_pipe(self) -> MemoryPipe:
                return pipe(self._context)

            def listen(self) -> MemoryListener:
                return listener(self._context.timeout_s)

        return Endpoint(context)


class Late(Mutant):
    """A transfer is under way until its message was received."""

    options: ClassVar[Any] = {"eager": False}


class Counting(MemoryPipe):
    """Counts the messages that it sends, from 1."""

    number = 0

    def _queue(self, message: PipeMessage, deadline: Deadline) -> None:
        self.number += 1
        self.queue_number(self.number, message, deadline)

    def queue_number(self, number: int, message: PipeMessage, deadline: Deadline) -> None:
        super()._queue(message, deadline)


def coming(pipe: MemoryPipe) -> Any:
    """The kind of the message that a pipe receives next; ``None`` without one."""
    return pipe._other._sent[0].meta if pipe._other._sent else None


# -- what arrives ----------------------------------------------------------------------------------


@breaks(Mutant, "PIPE-1")
class TestFlipsOneBit(MemoryPipe):
    """The lowest bit of the last byte of a message is lost."""

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        import torch

        message = super().recv_tensor(*args, **given)
        if message is not None and message.numel():
            message.view(-1).view(torch.uint8)[-1] &= 0xFE
        return message


@breaks(Mutant, "PIPE-1")
class TestDropsEveryThousandth(Counting):
    """Every 1,000th message is taken and never delivered."""

    def queue_number(self, number: int, *given: Any) -> None:
        if number % 1000:
            super().queue_number(number, *given)


@breaks(Mutant, "PIPE-1")
class TestSwapsTwo(Counting):
    """Message 900 comes after message 901."""

    def queue_number(self, number: int, message: PipeMessage, deadline: Deadline) -> None:
        if number == 900:
            self.kept = message
            return
        super().queue_number(number, message, deadline)
        if number == 901:
            super().queue_number(number, self.kept, deadline)


@breaks(Mutant, "PIPE-5")
class TestWritesTheBlockBehind(MemoryPipe):
    """The last row is written into the block behind the named one, too."""

    def recv_blocks(self, views: Any, block_ids: Any, **given: Any) -> None:
        super().recv_blocks(views, block_ids, **given)
        last = block_ids[-1] if len(block_ids) else 0
        for view in views:
            if last + 1 < len(view):
                view[last + 1] = view[last]


@breaks(Mutant, "PIPE-1")
class TestSendsTheLastLayerFirst(MemoryPipe):
    """The layers of one message come in another order."""

    def send_blocks(self, views: Any, block_ids: Any, **given: Any) -> Transfer:
        turned = BlockViews(views[::-1]) if isinstance(views, BlockViews) else views
        return super().send_blocks(turned, block_ids, **given)


@breaks(Mutant, "PIPE-5")
class TestReportsLayersThatHaveNotCome(MemoryPipe):
    """All layers are reported before the message is received."""

    def recv_blocks(self, views: Any, block_ids: Any, *, on_layer: Any = None, **given: Any) -> None:
        for layer in range(len(views)) if on_layer else ():
            on_layer(layer)
        super().recv_blocks(views, block_ids, **given)


@breaks(Mutant, "PIPE-1")
class TestReceivesIntoAPool(MemoryPipe):
    """What is received lies in a buffer that the next message of that size overwrites."""

    def recv_tensor(self, out: Any = None, **given: Any) -> Any:
        message = super().recv_tensor(out, **given)
        if message is None or out is not None or not message.numel():
            return message
        pool = self.__dict__.setdefault("_pool", {})
        kept = pool.setdefault((message.dtype, message.shape), message)
        memory.copy_into(kept, memory.memory_of(message))
        return kept


@breaks(Mutant, "PIPE-1")
class TestLosesScalars(MemoryPipe):
    """A tensor without dimensions comes as one with one dimension."""

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        message = super().recv_tensor(*args, **given)
        return message if message is None or message.dim() else message.view(1)


@breaks(Mutant, "PIPE-1")
class TestIgnoresConjugation(MemoryPipe):
    """A lazily conjugated tensor comes without its conjugation."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        if tensor is not None and tensor.is_conj():
            tensor = tensor.conj()
        return super().send_tensor(tensor, **given)


@breaks(Mutant, "PIPE-1")
class TestQueuesWhatItRefuses(MemoryPipe):
    """A tensor that cannot be sent is refused, and ``None`` sent for it."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        try:
            return super().send_tensor(tensor, **given)
        except TypeError:
            super().send_tensor(None, **given)
            raise


# -- sending, and what is held ---------------------------------------------------------------------


@breaks(Mutant, "PIPE-2")
class TestRefusesLargeMessages(MemoryPipe):
    """A message larger than the limit is refused."""

    def _queue(self, message: PipeMessage, deadline: Deadline) -> None:
        if message.memory.nbytes > self._window.limit:
            raise CapacityError("that is more than max_in_flight_bytes")
        super()._queue(message, deadline)


@breaks(Mutant, "PIPE-2")
class TestQueuesAlthoughItTimedOut(MemoryPipe):
    """``send_tensor`` raises TimeoutError, and the message is queued all the same."""

    def _queue(self, message: PipeMessage, deadline: Deadline) -> None:
        try:
            super()._queue(message, deadline)
        except TimeoutError:
            self._sent.append(message)
            raise


@breaks(Mutant, "PIPE-2")
class TestNeverSeesThatThereIsRoom(MemoryPipe):
    """A sender that has to wait is not woken when there is room again."""

    def _queue(self, message: PipeMessage, deadline: Deadline) -> None:
        with contextlib.suppress(TimeoutError):
            return super()._queue(message, Deadline.after(0))
        time.sleep(deadline.remaining() or 0)
        raise TimeoutError("there was no room")


@breaks(Mutant, "PIPE-3")
class TestHoldsTwiceTheLimit(MemoryPipe):
    """The limit is counted at both ends, each its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window.limit *= 2


@breaks(Mutant, "PIPE-3")
class TestNothingWeighsNothing(MemoryPipe):
    """Messages without content have no cost, so that any number of them is queued."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window.cost = lambda nbytes: nbytes  # type: ignore[method-assign]


# -- whose memory ----------------------------------------------------------------------------------


@breaks(Mutant, "PIPE-4")
class TestDoesNotCopy(MemoryPipe):
    """The transfer is done while the message is still the sender's own memory."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        self._eager = False
        transfer = super().send_tensor(tensor, **given)
        transfer.finish()
        return transfer


@breaks(Late, "PIPE-4")
class TestLetsGoOfTheSource(MemoryPipe):
    """The message is read when it is received, and the tensor is not kept alive until then."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        if tensor is None:
            return super().send_tensor(tensor, **given)
        self._source = weakref.ref(tensor)
        return super().send_tensor(tensor.clone(), **given)

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        message = super().recv_tensor(*args, **given)
        source = getattr(self._other, "_source", None)
        if message is not None and source is not None and source() is None:
            message.zero_()
        return message


# -- receiving into memory -------------------------------------------------------------------------


@breaks(Mutant, "PIPE-5")
class TestReshapes(MemoryPipe):
    """An ``out`` of another shape with as many elements is filled."""

    def recv_tensor(self, out: Any = None, **given: Any) -> Any:
        meta = coming(self)
        if out is not None and meta is not None and out.is_contiguous():
            super().recv_tensor(out.view(meta.shape) if out.nbytes == meta.nbytes else out, **given)
            return out
        return super().recv_tensor(out, **given)


@breaks(Mutant, "PIPE-5")
class TestFillsACopyOfOut(MemoryPipe):
    """An ``out`` that is not contiguous stays as it was: a contiguous copy is filled and returned."""

    def recv_tensor(self, out: Any = None, **given: Any) -> Any:
        return super().recv_tensor(None if out is None else out.contiguous(), **given)


@breaks(Mutant, "PIPE-5")
class TestReceivesBesideOut(MemoryPipe):
    """``receive_into`` is claimed, and every message is received into another tensor first."""

    def recv_tensor(self, out: Any = None, **given: Any) -> Any:
        if out is None or not out.is_contiguous():
            return super().recv_tensor(out, **given)
        beside = memory.empty_like_meta(memory.meta_of(out))
        memory.copy_into(out, memory.memory_of(super().recv_tensor(beside, **given)))
        return out


@breaks(Mutant, "PIPE-5")
class TestTakesNoneForOut(MemoryPipe):
    """``None`` is received although ``out`` was given."""

    def recv_tensor(self, out: Any = None, **given: Any) -> Any:
        if self._other._sent and coming(self) is None:
            out = None
        return super().recv_tensor(out, **given)


# -- time ------------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-4")
class TestReceiverHasNoDeadline(MemoryPipe):
    """``recv_tensor`` waits for ever."""

    def recv_tensor(self, out: Any = None, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        return super().recv_tensor(out, timeout=None)


@breaks(Mutant, "ALL-4")
class TestTakesNoneForTheDefault(MemoryPipe):
    """``timeout=None`` is taken for the default timeout."""

    def recv_tensor(self, out: Any = None, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        return super().recv_tensor(out, timeout=DEFAULT_TIMEOUT if timeout is None else timeout)


@breaks(Mutant, "ALL-4")
class TestIgnoresTheContext(MemoryPipe):
    """Without a timeout a receiver waits for ever."""

    def recv_tensor(self, out: Any = None, *, timeout: Any = None) -> Any:
        return super().recv_tensor(out, timeout=timeout)


@breaks(Mutant, "ALL-4")
class TestTakesNegativeTimeouts(MemoryPipe):
    """A timeout below 0 is 0."""

    def recv_tensor(self, out: Any = None, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        if isinstance(timeout, float | int):
            timeout = max(0, timeout)
        return super().recv_tensor(out, timeout=timeout)


@breaks(Mutant, "PIPE-6")
class TestLosesWhatComesTooLate(MemoryPipe):
    """The message that comes after a receive has timed out is lost with it."""

    _gave_up = False

    def recv_tensor(self, *args: Any, **given: Any) -> Any:
        try:
            return super().recv_tensor(*args, **given)
        except TimeoutError:
            self._gave_up = True
            raise

    def _queue(self, *args: Any) -> None:
        other: Any = self._other
        if other._gave_up:
            other._gave_up = False
        else:
            super()._queue(*args)


# -- threads ---------------------------------------------------------------------------------------


class NoExclusiveUse:
    """Any number of threads may enter."""

    def taken(self) -> Any:
        return contextlib.nullcontext()


@breaks(Mutant, "PIPE-7")
class TestLetsTwoSend(MemoryPipe):
    """A second sender is not refused."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sending: Any = NoExclusiveUse()


@breaks(Mutant, "PIPE-7")
class TestLetsTwoReceive(MemoryPipe):
    """A second receiver is not refused."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiving: Any = NoExclusiveUse()


@breaks(Mutant, "PIPE-7")
class TestHasOneTurnForBoth(MemoryPipe):
    """A send is refused while another thread receives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sending = self._receiving


# -- order on a device -----------------------------------------------------------------------------


@breaks(Mutant, "PIPE-8")
class TestWritesWhatAKernelStillReads(MemoryPipe):
    """A message is written into memory of a device at once, as a network card does it."""

    def _receive_tensor(self, out: Any, timeout: Timeout) -> Any:
        if out is None or out.is_cpu:
            return super()._receive_tensor(out, timeout)
        here = super()._receive_tensor(memory.empty_like_meta(memory.meta_of(out)), timeout)
        ctypes.memmove(out.data_ptr(), here.data_ptr(), here.nbytes)
        return out


@breaks(Mutant, "PIPE-8")
class TestSendsWhatNoKernelHasWritten(MemoryPipe):
    """A tensor is copied from a device on a stream of the pipe's own, which waits for no other."""

    def _send_tensor(self, *given: Any) -> Any:
        with on_stream(Stream()):
            return super()._send_tensor(*given)


# -- how it ends -----------------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestClosesOnce(MemoryPipe):
    """Closing a second time raises."""

    def close(self, timeout: Any = DEFAULT_TIMEOUT) -> None:
        if self.closed:
            raise self._lifecycle.error()
        super().close(timeout)


@breaks(Mutant, "ALL-1")
class TestWorksAfterClosing(MemoryPipe):
    """A closed pipe still sends."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        if self.closed:
            transfer = Transfer(0)
            transfer.finish()
            return transfer
        return super().send_tensor(tensor, **given)


@breaks(Late, "ALL-1")
class TestClosesRudely(MemoryPipe):
    """``close`` does not wait for what was sent."""

    def close(self, timeout: Any = DEFAULT_TIMEOUT) -> None:
        self.abort()


@breaks(Mutant, "ALL-1")
class TestIsNeverClosed(MemoryPipe):
    """``closed`` stays false."""

    closed: Any = False


@breaks(Mutant, "ALL-1")
class TestListenerWakesNobody(MemoryListener):
    """Closing a listener does not end an ``accept`` that waits there."""

    def close(self) -> None:
        self._closed = True
        super()._after_fork_in_child()


@breaks(Mutant, "ALL-2")
class TestDropsWhatHadArrived(MemoryPipe):
    """What had arrived when the peer ended cannot be received."""

    def _release(self) -> None:
        self._sent.clear()
        super()._release()


@breaks(Mutant, "ALL-2")
class TestSendsIntoTheVoid(MemoryPipe):
    """Sending to a peer that has ended succeeds."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        try:
            return super().send_tensor(tensor, **given)
        except PeerGoneError:
            transfer = Transfer(0)
            transfer.finish()
            return transfer


# -- transfers -------------------------------------------------------------------------------------


@breaks(Late, "ALL-5")
class TestSwallowsAFailure(MemoryPipe):
    """Transfers under way when a pipe ends never end: their failure is only logged."""

    def _release(self) -> None:
        for end in (self, self._other):
            end._sent = deque(message for message in end._sent if message.transfer.done())
        super()._release()


@breaks(Mutant, "ALL-5")
class TestNeverFinishes(MemoryPipe):
    """The transfer of a message without content never ends."""

    def send_tensor(self, tensor: Any, **given: Any) -> Any:
        transfer = super().send_tensor(tensor, **given)
        return transfer if transfer.nbytes else Transfer(0)


# -- endpoints -------------------------------------------------------------------------------------


@breaks(Mutant, "END-1")
class TestChokesOnGarbage(MemoryEndpoint):
    """A malformed contact raises KeyError."""

    def connect(self, contact: str, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        memory._listeners[contact]
        return super().connect(contact, timeout)


@breaks(Mutant, "END-1")
class TestIgnoresWhomItIsFor(MemoryEndpoint):
    """The newest listener is connected, whatever the contact is."""

    def connect(self, contact: str, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        if contact in memory._listeners:
            contact = next(reversed(memory._listeners))
        return super().connect(contact, timeout)


@breaks(Mutant, "END-2")
class TestForgetsTheFirstPair(MemoryListener):
    """The second pair of a listener ends the first one."""

    _last: Any = None

    def accept(self, *args: Any, **given: Any) -> Any:
        pipe = super().accept(*args, **given)
        if self._last is not None:
            self._last.abort()
        self._last = pipe
        return pipe


@breaks(Mutant, "ALL-7")
class TestKeepsAPartOfEveryPipe(MemoryPipe):
    """200 KB of each pipe are never freed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kept.append(b"x" * 200_000)


# -- the controls ----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The pipe "memory" as it is."""

    is_control = True


class TestHasNoFaultLate(Late):
    """The same with transfers that are under way until their message was received."""

    is_control = True
