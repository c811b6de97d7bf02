"""Of messages without content a pipe may hold few, and the operating system as many as it likes."""

from __future__ import annotations

import fcntl
import lzma
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug.errors import TimeoutError
from kvplug_testing import PipeContract
from kvplug_testing.contract.pipe.suite import fill

pytestmark = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="its pipes have no size")


class Sender:
    """The sending end of a pipe whose empty messages are one byte in the kernel each."""

    def __init__(self, keep: Callable[[Any], None]) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 1 << 20)  # a million of them
        os.set_blocking(self.writer, False)
        self._keep = keep

    def send_tensor(self, message: Any, timeout: float) -> None:
        self._keep(message)
        try:
            os.write(self.writer, b"0")
        except BlockingIOError as e:
            raise TimeoutError("the kernel has no room") from e


class OfTheKernel(PipeContract):
    sender: Any

    def limited_pair(self, limit: int = 0) -> Any:
        return self.sender, None


@pytest.fixture
def suite() -> Iterator[Callable[[Any], Any]]:
    made = []

    def make(keep: Any) -> Any:
        suite = OfTheKernel()
        suite.sender = Sender(keep)
        made.append(suite.sender)
        return suite

    yield make
    for sender in made:
        os.close(sender.reader)
        os.close(sender.writer)


def test_what_clogs_a_pipe_cannot_be_compressed() -> None:
    accepted: list[bytes] = []

    class Taking:
        def send_tensor(self, message: Any, timeout: float) -> None:
            if len(accepted) == 10:
                raise TimeoutError("there is no room")
            accepted.append(bytes(message.numpy()))

    fill(Taking(), 50_000)  # type: ignore[arg-type]
    content = b"".join(accepted)
    assert len(lzma.compress(content)) >= len(content) == 500_000


@pytest.mark.full
def test_what_the_kernel_holds_is_not_counted_against_the_pipe(suite: Any) -> None:
    suite(lambda _: None).test_messages_without_content_do_not_pile_up_without_bound()


@pytest.mark.full
def test_what_the_pipe_holds_beside_the_kernel_is(suite: Any) -> None:
    held: list[Any] = []
    piling = suite(lambda message: held.append([message]))
    with pytest.raises(AssertionError, match="memory grew by"):
        piling.test_messages_without_content_do_not_pile_up_without_bound()
