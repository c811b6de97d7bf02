"""The pipe "pynccl": two communicators of two ranks, one each way, and a channel that orders their use.

A sender offers a message and does nothing more. Only when the receiver is in ``recv_tensor``, with memory
ready, does it *clear* the message, and only then are receive and send enqueued. So no kernel waits on a GPU
for a peer that is late, and a receive that runs out of time before that has lost nothing. Neither direction
waits for the other on the device: each has a communicator and a stream of its own.

The pipe's worker makes all calls of NCCL, which takes the calls on a communicator one after the other, and
polls them. Callers never wait inside NCCL, so a deadline holds whatever NCCL does. A communicator is aborted
when the pipe ends, and when memory of the caller has to be taken back; that is the end of the pipe. So calls
with little time left receive into memory of the pipe's, and the next call resumes that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import KvplugError, TimeoutError, TransportError
from kvplug.transport import BackgroundThread, Deadline, OfferPipe, Watch, WireError
from kvplug_pynccl.device import Device
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import DataType, Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

_DIRECT_S: Final = 1.0
"""The least time that a call must have left to receive into the caller's memory."""
_ABORT_WAIT_S: Final = 2.0
"""How long the end of a pipe, or of a call, waits for NCCL to let go of the running operations."""
_FINAL_STEP_S: Final = 0.5
"""An operation whose message the peer has taken ends here, too, in much less."""
_STUCK_S = 10.0
"""How long the worker may take to end before its transfers fail without it."""
_HANG_UP_S: Final = 0.5
"""A peer that ended shows first in NCCL, or first in its connection: how long to wait for the latter."""
_CONNECTION_RESULTS: Final = (Result.REMOTE_ERROR, Result.SYSTEM_ERROR)


@attrs.frozen(kw_only=True)
class PyncclPipeSettings(OfferPipe.Settings):
    """What a pipe needs to know beside its connection."""

    device: Device
    nccl: Library


class _Reception:
    """A message that the worker receives into memory."""

    def __init__(self, message: OfferPipe.ComingMessage, memory: list[Tensor], pieces: int) -> None:
        self.message = message
        self.memory = memory
        self.pieces = pieces
        self.operation: Operation | None = None
        self.is_done = False
        self.is_cancelled = False


class PyncclPipe(OfferPipe):
    """Two communicators, each with a stream."""

    NAME = "pynccl"

    def __init__(
        self,
        join: OfferPipe.Join,
        outgoing: MonitoredCommunicator,
        incoming: MonitoredCommunicator,
        peer_rank: int,
        settings: PyncclPipeSettings,
    ) -> None:
        """Take over everything, unless this raises.

        Raises:
            TransportError, ResourceExhaustedError: there are no more streams, or threads.
        """
        super().__init__(join, settings)
        self._settings = settings
        self._nccl = settings.nccl
        self._outgoing = outgoing
        self._incoming_comm = incoming
        self._peer_rank = peer_rank
        self._cleared: deque[OfferPipe.Offer] = deque()
        """Offers that the peer is ready for; the first one is being sent."""
        self._reception: _Reception | None = None
        """For the worker."""
        self._is_supervised = False
        with contextlib.ExitStack() as undo:
            self._send_stream = settings.device.new_stream()
            undo.callback(self._send_stream.close)
            # The worker notices the peer's end itself, unless a call of NCCL does not return.
            self._watch = Watch(
                pidfd=join.channel.peer.open_pidfd(),
                sock=join.channel.socket(),
                on_gone=self._supervise,
            )
            undo.callback(self._watch.close)
            self._start()
            undo.pop_all()

    # -- sending -----------------------------------------------------------------------------------------

    def _next_offer(self, message: OfferPipe.SentMessage) -> OfferPipe.Offer:
        content = message.content
        return OfferPipe.Offer(message, content.nbytes, content.ready, len(content.tensors))

    def _on_value(self, kind: str, content: list[Any]) -> None:
        match kind, content:
            case "clear", [int(pieces)] if 0 < pieces <= self.MAX_RUNS:
                self._on_clear(pieces)
            case _:
                super()._on_value(kind, content)

    def _on_clear(self, pieces: int) -> None:
        with self._lock:
            offer = next(iter(list(self._announced)[self._num_taken :]), None)
            if offer is None or not offer.nbytes or offer.work is not None or offer.nbytes % pieces:
                raise WireError("it is ready for a message that it was not offered")
            tensors = offer.message.content.tensors
            offer.work = self._operation(
                self._nccl.send, list(tensors), pieces, self._outgoing, self._send_stream
            )
            self._cleared.append(offer)

    def _is_unused(self, offer: OfferPipe.Offer) -> bool:
        if offer.nbytes and offer.work is None:
            raise WireError("it has taken a message that was not sent")
        return offer not in self._cleared

    def _operation(
        self,
        function: Callable[..., object],
        tensors: list[Tensor],
        pieces: int,
        comm: MonitoredCommunicator,
        stream: OfferPipe.Stream,
    ) -> Operation:
        """Return an operation with a call of NCCL for each piece, of bytes: nothing is computed, and NCCL
        lacks some dtypes."""
        spans = self.spans_of(tensors)
        nbytes = sum(length for _, length in spans) // pieces

        def call(address: int) -> Callable[[int], object]:
            return lambda handle: function(
                address, nbytes, DataType.UINT8, self._peer_rank, handle, stream.handle
            )

        cuts = [next(self.cut(spans, number * nbytes, nbytes)) for number in range(pieces)]
        calls = [call(address) for _, address, _ in cuts]
        return Operation(comm, self._settings.device, stream, calls, tensors)

    # -- the worker --------------------------------------------------------------------------------------

    def _step(self) -> bool:
        try:
            is_busy = super()._step()
            self._step_sends()
            self._step_reception()
        except NcclError as e:
            self._await_hang_up(e)
            raise
        return is_busy or bool(self._cleared or self._num_taken or self._reception)

    def _step_sends(self) -> None:
        while self._cleared and self._cleared[0].work.step():
            with self._lock:
                self._cleared.popleft()
            self._settle()

    def _step_reception(self) -> None:
        reception = self._reception
        if reception is None:
            return
        if reception.operation is None:
            with self._lock:
                if reception.is_cancelled:
                    return
                reception.operation = self._operation(
                    self._nccl.recv,
                    reception.memory,
                    reception.pieces,
                    self._incoming_comm,
                    self._stream,
                )
            self._tell("clear", reception.pieces)
        if reception.operation.step():
            with self._lock:
                if not reception.is_cancelled:
                    reception.is_done = True
                    reception.message.got = reception.message.nbytes
                    self._reception = reception.message.state = None
                    self._take()

    def _look(self) -> None:
        try:
            if not self._cleared and self._reception is None:
                for comm in (self._outgoing, self._incoming_comm):
                    comm.is_settled()
        except NcclError as e:
            self._await_hang_up(e)
            raise

    def _await_hang_up(self, error: NcclError) -> None:
        """Raise PeerGoneError if the peer has ended, which may show first in NCCL. Handle the values
        that it sent before."""
        if error.result in _CONNECTION_RESULTS:
            deadline = Deadline.after(_HANG_UP_S)
            while not deadline.expired and not self._window.ended:
                if self._await_event(0.01):
                    self._read()

    # -- receiving ---------------------------------------------------------------------------------------

    def _read_place(self, meta: Any, nbytes: int, place: Any) -> int:
        match place:
            case 0 if not nbytes:
                return 0
            case int(pieces) if (
                meta is not None
                and nbytes == meta.nbytes > 0
                and (pieces == 1 or (meta.shape and pieces == meta.shape[0] <= self.MAX_RUNS))
            ):
                return pieces
        raise WireError(f"it offers {nbytes} bytes of a message in pieces that it cannot have")

    def _moves_in_place(self, deadline: Deadline) -> bool:
        left = deadline.remaining()
        return left is None or left >= _DIRECT_S

    def _move(
        self,
        message: OfferPipe.ComingMessage,
        memory: list[Tensor],
        deadline: Deadline,
        *,
        in_place: bool,
    ) -> bool:
        reception = message.state
        if reception is None:
            reception = message.state = _Reception(message, memory, max(message.place, len(memory)))
        try:
            with self._lock:
                if not reception.is_done:
                    self._reception = reception
                    self._wake()
                while not reception.is_done and not deadline.expired:
                    self._coming.check()
                    self._coming.wait(deadline)
                if not reception.is_done and in_place:
                    raise TimeoutError(
                        f"a tensor of {message.nbytes} bytes has not wholly arrived from {self._peer} in time"
                    )
        except BaseException as e:
            if in_place and not reception.is_done and self._take_back(message, reception, e):
                return False
            if not reception.is_done:
                raise
        return bool(reception.is_done)

    def _take_back(
        self, message: OfferPipe.ComingMessage, reception: _Reception, error: BaseException
    ) -> bool:
        """Take the caller's memory back for the caller, unless the message has arrived meanwhile. Return
        whether the message stays, because it had not been cleared."""
        with self._lock:
            if reception.is_done:
                return False
            reception.is_cancelled = True
            self._reception = message.state = None
            if reception.operation is None:
                return isinstance(error, TimeoutError)
        if isinstance(error, TimeoutError):
            self._fail("a receive into the caller's memory ran out of time in the middle of a message")
        if not self._incoming_comm.abort(reception.memory).wait(_ABORT_WAIT_S):
            raise TransportError(
                "NCCL does not end the transfer that was aborted: the memory that was given as out= may still"
                " be written to"
            ) from error
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{error}; the pipe is broken") from error
        return False

    # -- how it ends -------------------------------------------------------------------------------------

    def _on_peer_gone(self) -> None:
        if threading.current_thread() is self._worker:
            # The operation of a message that the peer has taken ends without the peer, soon.
            deadline = Deadline.after(_FINAL_STEP_S)
            with contextlib.suppress(KvplugError):
                while self._num_taken and not deadline.expired:
                    self._step_sends()
                    time.sleep(0.001)
        super()._on_peer_gone()

    def _revoke(self) -> bool:
        """NCCL may be reading the memory of messages, so transfers fail when it has let go of that, in the
        worker."""
        self._supervise("its thread does not end")
        return False

    def _supervise(self, reason: str) -> None:
        """Make every call and transfer end even if a call of NCCL, or of the GPU's driver, does not return to
        the worker. Never waits."""
        if not self._is_supervised and self._worker.ident is not None:
            self._is_supervised = True
            supervisor = BackgroundThread(
                self._await_worker, args=(reason,), name="kvplug-pynccl-end", stop=lambda: None
            )
            with contextlib.suppress(RuntimeError):  # there are no more threads just now
                supervisor.start()

    def _await_worker(self, reason: str) -> None:
        self._worker.join(_STUCK_S)
        if self._worker.is_alive():
            self._logger.error("%r: a call of NCCL does not return; what it holds is not given back", self)
            self._hung.append(list(self._announced))
            self._peer_gone(reason)
            self._fail_transfers()

    def _free(self) -> None:
        self._watch.close()
        in_use = (list(self._announced), self._reception)
        until = Deadline.after(_ABORT_WAIT_S)
        for over in [comm.abort(in_use) for comm in (self._outgoing, self._incoming_comm)]:
            if not over.wait(until.remaining()):
                self._logger.error(
                    "%r: NCCL does not end what is running; what it holds is not given back", self
                )
        self._send_stream.close()
        self._fail_transfers()
