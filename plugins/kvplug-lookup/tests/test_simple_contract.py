"""The lookup buffer "simple" is judged by the conformance kit, over two kinds of pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.transport import Pipe, PipeEndpoint, PipeListener, Timeout
from kvplug_testing import LookupBufferContract
from kvplug_testing.contract.lookup import ends
from kvplug_testing.contract.lookup.suite import LookupSuite


class TestSimple(LookupBufferContract):
    transport = "simple"


@pytest.mark.variant
class TestSimpleThatEvicts(LookupBufferContract):
    transport = "simple"
    options: ClassVar[dict[str, str]] = {"evict": "oldest"}
    evicts = True


@pytest.mark.variant
class TestSimpleOverSockets(LookupBufferContract):
    transport = "simple"
    pipes = "cpu"
    running_out_processes = "without a thread the pipe cpu breaks, and the store cannot say over it why"


@attrs.define
class NewestFirst(PipeListener):
    """Accepts the newest of the pipes that come at about the same time."""

    inner: PipeListener
    waiting: list[Pipe] = attrs.Factory(list)

    @property
    def contact(self) -> str:
        return self.inner.contact

    def accept(self, timeout: Timeout = None) -> Pipe:
        try:
            while True:
                self.waiting.append(self.inner.accept(0.2 if self.waiting else timeout))
        except TimeoutError:
            if not self.waiting:
                raise
        return self.waiting.pop()

    def close(self) -> None:
        self.inner.close()


class TestMeeting(LookupSuite):
    transport = "simple"

    def test_ends_meet_whatever_the_order_in_which_a_listener_accepts_their_pipes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make: Callable[..., Any] = ends.pipe_endpoint

        def make_newest_first(*args: Any, **context: Any) -> PipeEndpoint:
            endpoint = make(*args, **context)
            listen = endpoint.listen
            endpoint.listen = lambda: NewestFirst(listen())
            return endpoint  # type: ignore[no-any-return]

        monkeypatch.setattr(ends, "pipe_endpoint", make_newest_first)
        holding, reaching = ends.LookupEnds(self, {}).make([None, None])
        assert holding is not None
        assert reaching is not None
        holding.part(0, 5.0)
        reaching.part(0, 5.0)
