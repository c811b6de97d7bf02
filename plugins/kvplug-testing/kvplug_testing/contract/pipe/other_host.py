"""The ends are on two hosts, which share no memory, socket names or processes (capability ``cross_host``).

See :mod:`kvplug_testing.hosts`. The general laws judge deaths and silence between hosts.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

from kvplug import KvplugError
from kvplug_testing import waits
from kvplug_testing.contract.base import at_host, law
from kvplug_testing.contract.ends import CHILD_S, RUN_END
from kvplug_testing.contract.pipe.ends import PipeGeneral
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent


class OtherHost(PipeGeneral):
    """One end listens on host 0 or 1, the other one connects from the other host."""

    @law("PIPE-1", "END-1", needs="another_host")
    @pytest.mark.parametrize("listening", [0, 1])
    def test_messages_arrive_whole_and_in_order_from_another_host(self, listening: int) -> None:
        ends = self.between_hosts((listening, 1 - listening))
        for number in range(10):
            self.exchange(ends, number)

    @law("ALL-4", "END-2", needs="another_host")
    def test_connecting_to_a_host_that_does_not_answer_ends_in_time_and_succeeds_when_it_does(self) -> None:
        listening = self.start_at(0, RUN_END, self.suite_ref(), 0, {"at_host": 0}, timeout_s=CHILD_S)
        contact = listening.recv()
        with self.hosts().apart():
            took_s, error = self._dial(contact, 1.0)
            assert error.startswith(("TimeoutError", "PeerGoneError")), f"no host answered: {error!r}"
            assert took_s < 5.0, f"connect had 1 s, and took {took_s:.1f}"
        _, error = self._dial(contact, waits.patience_s)
        assert not error, f"the host answers again; connect gave {error!r}"

    def _dial(self, contact: str, timeout: float) -> Any:
        return self.start_at(
            1, f"{__name__}:dial", self.suite_ref(), contact, timeout, timeout_s=CHILD_S
        ).result(2 * waits.patience_s)


def dial(parent: Parent, suite_ref: dict[str, Any], contact: str, timeout: float) -> list[Any]:
    """On host 1: connect; returns the seconds that it took, and the error."""
    suite = suite_from_ref(suite_ref)
    end = suite.make_endpoint(attrs.evolve(suite.context(), **at_host(1)))
    end.listen().close()  # a library that is loaded at first use is not part of the time
    began = time.monotonic()
    try:
        with end.connect(contact, timeout=timeout):
            error = ""
    except KvplugError as e:
        error = f"{type(e).__name__}: {e}"
    return [time.monotonic() - began, error]
