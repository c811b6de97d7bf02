"""The ends of a pipe, and a listener, for the general laws."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.transport import NamedExhaustion, Pipe, PipeListener, Transfer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of
from kvplug_testing.contract.general import General
from kvplug_testing.contract.pipe.content import numbered, tensor_of
from kvplug_testing.contract.pipe.suite import LIMIT, MIB, PipeSuite, drain, fill
from kvplug_testing.waits import until

CLOG_BYTES: Final = MIB // 4
_SIZES: Final = (MIB, 1, 1000, 0, 3 * MIB)
"""Bytes of the messages of an exchange, one after the other: at once, and larger than any buffer."""
_SMALL: Final = 30
"""Small messages for each large one, while a program leaves."""
_SMALL_BYTES: Final = 1000


class PipeEnd(End):
    """A pipe. It sends a message and receives the same one back, or does so the other way around."""

    def __init__(self, role: str, pipe: Pipe, *, clogs: bool, both_ways: bool) -> None:
        import torch

        self.role = role
        self._both_ways = both_ways
        self.thing = pipe
        self._clogs = clogs
        self._out = torch.empty(CLOG_BYTES, dtype=torch.uint8)  # what has arrived of a clogged pipe fits
        self.one_thread = [*self.unclogged()[:1], *(["send_tensor"] if clogs else [])]
        self._num_clogging = 0
        self._transfers: list[Transfer] = []

    def calls(self) -> Calls:
        send = self.thing.send_tensor
        sending = {
            "send_tensor(None)": partial(send, None),
            "send_tensor": partial(send, tensor_of("int8", (3,))),
        }
        return sending | self._receiving()

    def _receiving(self) -> dict[str, Callable[..., Any]]:
        receive = self.thing.recv_tensor
        return {"recv_tensor": receive, "recv_tensor(out)": partial(receive, self._out)}

    def blocking(self) -> Calls:
        return {**self._receiving(), **({"send_tensor": self._send_more} if self._clogs else {})}

    def unclogged(self) -> Sequence[str]:
        return [*self._receiving()]

    def _send_more(self, **timeout: float | None) -> None:
        message = numbered(self._num_clogging, LIMIT)
        self._transfers.append(self.thing.send_tensor(message, **timeout))

    def exchange(self, content: Any, timeout: float | None) -> Any:
        if self.role == "connecting":
            transfer = self.once("send", lambda: self.thing.send_tensor(content, timeout=timeout))
        message = self.once("receive", lambda: self.thing.recv_tensor(timeout=timeout))
        if self.role == "accepting":
            transfer = self.once("send", lambda: self.thing.send_tensor(message, timeout=timeout))
        transfer.wait(waits.patience_s if timeout is None else timeout)
        return message

    def busy(self, leaves: bool) -> None:
        """Small messages keep the program's threads in calls, and large ones the pipe's. Without both
        directions only the end that leaves sends.
        """
        import torch

        out = torch.empty(_SMALL_BYTES, dtype=torch.uint8) if leaves else None
        messages = [numbered(1, _SMALL_BYTES)]
        if leaves:
            messages = [_strided(2)] * _SMALL + [_strided(4 * MIB // 512)]
        receiving = threading.Thread(target=self._receive_all, args=(out,), daemon=True)
        if self._both_ways or not leaves:
            receiving.start()
        if self._both_ways or leaves:
            for message in itertools.cycle(messages):
                self.thing.send_tensor(message, timeout=None)
        receiving.join()
        raise ClosedError("the pipe has ended")

    def _receive_all(self, out: Any) -> None:
        with contextlib.suppress(KvplugError):
            while True:
                self.thing.recv_tensor(out, timeout=None)

    def clog(self) -> int:
        if self._clogs:
            self._transfers = fill(self.thing, CLOG_BYTES)
            self._num_clogging = len(self._transfers)
        return self._num_clogging

    def drain(self, count: int) -> None:
        drain(self.thing, range(count))

    def is_gone(self) -> None:
        super().is_gone()
        for number, transfer in enumerate(self._transfers):
            until(transfer.done, what=f"the end of transfer {number} of {len(self._transfers)}")
            assert transfer.error() is None or isinstance(transfer.error(), PeerGoneError), transfer

    def closed(self) -> bool:
        assert isinstance(self.thing.peer, str) and self.thing.peer.strip(), "`peer` is empty"
        return bool(self.thing.closed)


class ListenerEnd(End):
    """A listener to which nothing connects."""

    role = "listening"
    gone = None

    def __init__(self, listener: PipeListener) -> None:
        self._listener = listener
        self._is_closed = False

    def calls(self) -> Calls:
        return {"accept": self._listener.accept}

    blocking = timed = calls

    def close(self, timeout: float | None) -> None:
        self.abort()

    def abort(self) -> None:
        self._listener.close()
        self._is_closed = True

    def closed(self) -> bool | None:
        return self._is_closed or None


class PipeEnds(Ends):
    """A pair of pipes, and a listener beside it."""

    roles: ClassVar[Sequence[str]] = ("accepting", "connecting")

    has_heartbeat = True
    num_exchanges = len(_SIZES)
    suite: PipeSuite

    def prepare(self) -> None:
        with NamedExhaustion("building the endpoint of a pipe"):  # as kvplug's own builder does
            self._endpoint = self.suite.endpoint(LIMIT, **fields_of(self.context))

    def offer(self) -> str:
        self._listener = self._endpoint.listen()
        self.suite.later(self._listener.close)
        return self._listener.contact

    def accept(self) -> End:
        """A pipe whose other end has failed, in an earlier try, may come first."""
        while True:
            pipe = self._end(0, self._listener.accept(timeout=self.timeout_s))
            try:
                pipe.thing.recv_tensor(timeout=self.timeout_s)
                return pipe
            except PeerGoneError:
                pipe.abort()

    def connect(self, role: int, contact: str) -> End:
        end = self._end(role, self._endpoint.connect(contact, timeout=self.timeout_s))
        end.thing.send_tensor(None, timeout=self.timeout_s)
        return end

    def _end(self, role: int, pipe: Pipe) -> PipeEnd:
        self.suite.later(pipe.abort)
        return PipeEnd(
            self.roles[role], pipe, clogs=bool(self.suite.limit_option), both_ways=not self.suite.both_ways
        )

    def besides(self) -> list[End]:
        return [ListenerEnd(self._listener)]

    def content(self, role: int, number: int) -> Any:
        return numbered(number, _SIZES[number % len(_SIZES)])


def _strided(rows: int) -> Any:
    import torch

    return torch.arange(rows * 256, dtype=torch.int16).view(rows, 256).t()


class PipeGeneral(PipeSuite, General):
    """The general laws for pipes."""

    @property
    def _is_bounded(self) -> bool:
        return self.devices == ["cpu"]

    def ends(self, **context: Any) -> PipeEnds:
        return PipeEnds(self, context)

    @law("PIPE-7")
    def test_a_second_thread_in_a_call_is_refused_and_the_first_goes_on(self) -> None:
        super().test_a_second_thread_in_a_call_is_refused_and_the_first_goes_on()
