"""A resource runs out while a queue is made, used or closed (law ALL-9)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvplug.transport import MessageQueue, NamedExhaustion, QueueEndpoint
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.exhaustion import Attempt, let_go, together
from kvplug_testing.contract.queue.suite import KIB, MIB, QueueSuite


class QueueAttempt(Attempt):
    """A writer and a reader in this process."""

    def __init__(self, suite: QueueSuite) -> None:
        self._suite = suite
        large = min(3 * MIB, suite.most_bytes)
        self._values: list[Any] = [{"step": 1}, bytes(4 * KIB), b"\1" * large]
        with contextlib.suppress(ImportError):
            import torch

            self._values.append(torch.full((large,), 2, dtype=torch.uint8))
        self._endpoint: QueueEndpoint | None = None
        self._ends: list[MessageQueue] = []
        self._num_sent = 0
        self._received: list[Any] = []

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return self._make_endpoint, self._create, self._attach, self._be_ready, self._pass, self._close

    def may_break(self, step: int) -> bool:
        return self.steps[step] in (self._be_ready, self._pass)

    def _make_endpoint(self) -> None:
        with NamedExhaustion("building a message queue"):  # as kvplug's own builder does
            self._endpoint = self._suite.endpoint(n_reader=1)

    def _create(self) -> None:
        assert self._endpoint is not None
        self._ends.append(self._endpoint.create())

    def _attach(self) -> None:
        assert self._endpoint is not None
        attach = functools.partial(self._endpoint.create_from_handle, self._ends[0].export_handle(), 0)
        together(lambda: self._ends.append(attach(timeout=self.timeout_s)), within=4 * self.timeout_s)

    def _be_ready(self) -> None:
        waiting = [functools.partial(end.wait_until_ready, self.timeout_s) for end in self._ends]
        together(*waiting, within=4 * self.timeout_s)

    def _pass(self) -> None:
        """One value after the other: what was sent or received is not sent or received again."""
        together(self._pass_all, within=4 * self.timeout_s)

    def _pass_all(self) -> None:
        writer, reader = self._ends
        while len(self._received) < len(self._values):
            if self._num_sent == len(self._received):
                writer.enqueue(self._values[self._num_sent], timeout=self.timeout_s)
                self._num_sent += 1
            self._received.append(reader.dequeue(timeout=self.timeout_s))

    def _close(self) -> None:
        closing = [functools.partial(end.close, self.timeout_s) for end in reversed(self._ends)]
        together(*closing, within=4 * self.timeout_s)

    def check(self) -> None:
        assert_same(self._values, self._received)

    def end(self) -> None:
        let_go(*(end.abort for end in self._ends))


class Exhaustion(QueueSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return QueueAttempt(self)
