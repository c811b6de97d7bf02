"""A resource runs out while a pipe is made, used or closed (law ALL-9)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import NamedExhaustion, Pipe, PipeEndpoint, PipeListener
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.exhaustion import Attempt, let_go, together
from kvplug_testing.contract.pipe.content import numbered
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite

_SIZES: Final = (1000, 3 * MIB, 0)
"""Bytes of the messages in each direction: at once, larger than buffers of sockets, and empty."""
_STEP_S: Final = 0.1


class PipeAttempt(Attempt):
    """Both ends of a pipe in this process."""

    def __init__(self, suite: PipeSuite) -> None:
        self._suite = suite
        self._messages = [numbered(number, nbytes) for number, nbytes in enumerate(_SIZES)]
        self._endpoint: PipeEndpoint | None = None
        self._listener: PipeListener | None = None
        self._pipes: list[Pipe] = []
        self._num_sent = 0
        self._received: list[Any] = []

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        making = self._make_endpoint, self._listen, self._connect
        return *making, self._exchange, self._close, self._close_listener

    def may_break(self, step: int) -> bool:
        return self.steps[step] == self._exchange

    def _make_endpoint(self) -> None:
        with NamedExhaustion("building the endpoint of a pipe"):  # as kvplug's own builder does
            self._endpoint = self._suite.endpoint()

    def _listen(self) -> None:
        assert self._endpoint is not None
        self._listener = self._endpoint.listen()

    def _connect(self) -> None:
        made: list[Pipe] = []
        failed: list[BaseException] = []
        try:
            joining = partial(self._dial, made, failed), partial(self._accept, made, failed)
            together(*joining, within=4 * self.timeout_s)
        except BaseException:
            let_go(*(pipe.abort for pipe in made))
            raise
        self._pipes = made

    def _dial(self, made: list[Pipe], failed: list[BaseException]) -> None:
        assert self._endpoint is not None and self._listener is not None
        try:
            pipe = self._endpoint.connect(self._listener.contact, timeout=self.timeout_s)
            made.append(pipe)
            pipe.send_tensor(None, timeout=self.timeout_s)
        except BaseException as e:
            failed.append(e)
            raise

    def _accept(self, made: list[Pipe], failed: list[BaseException]) -> None:
        """The accepted pipe may be one whose other end has failed, in this try or in an earlier one."""
        assert self._listener is not None
        limit = time.monotonic() + self.timeout_s
        while True:
            is_last = bool(failed) or time.monotonic() > limit
            try:
                pipe = self._listener.accept(timeout=_STEP_S)
            except TimeoutError:
                if is_last:
                    raise
                continue
            try:
                pipe.recv_tensor(timeout=self.timeout_s)
            except PeerGoneError:
                pipe.abort()
            except BaseException:
                pipe.abort()
                raise
            else:
                made.append(pipe)
                return

    def _exchange(self) -> None:
        together(self._exchange_all, within=4 * self.timeout_s)

    def _exchange_all(self) -> None:
        """One message after the other: what was sent or received is not sent or received again."""
        while len(self._received) < 2 * len(_SIZES):
            way, number = divmod(len(self._received), len(_SIZES))
            if self._num_sent == len(self._received):
                self._pipes[way].send_tensor(self._messages[number], timeout=self.timeout_s)
                self._num_sent += 1
            self._received.append(self._pipes[1 - way].recv_tensor(timeout=self.timeout_s))

    def _close(self) -> None:
        closing = [partial(pipe.close, self.timeout_s) for pipe in self._pipes]
        together(*closing, within=4 * self.timeout_s)

    def _close_listener(self) -> None:
        assert self._listener is not None
        self._listener.close()

    def check(self) -> None:
        assert_same(self._messages * 2, self._received)

    def end(self) -> None:
        let_go(*(pipe.abort for pipe in self._pipes))
        if self._listener is not None:
            let_go(self._listener.close)


class Exhaustion(PipeSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return PipeAttempt(self)
