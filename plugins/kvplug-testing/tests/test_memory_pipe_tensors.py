"""The pipe "memory" keeps every law that one process can show; and what it alone promises."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvplug_testing import PipeContract  # noqa: E402
from kvplug_testing.contract.pipe.suite import PipeSuite  # noqa: E402


@pytest.mark.full
class TestMemoryPipe(PipeContract):
    transport = "memory"
    across_processes = False
    beyond_limit_bytes = 0


@pytest.mark.variant
class TestLateMemoryPipe(TestMemoryPipe):
    """Transfers are under way until their messages are received, as a device's are."""

    options = {"eager": False}  # noqa: RUF012


class TestWhatOnlyMemoryPromises(PipeSuite):
    transport = "memory"
    options = {"eager": False}  # noqa: RUF012

    def test_a_late_transfer_is_done_when_its_message_is_received_and_not_before(self) -> None:
        one, other = self.pair()
        source = torch.zeros(5)
        transfers = [one.send_tensor(source), one.send_tensor(None)]
        source.fill_(7)  # too early, and so it is found
        assert not any(transfer.done() for transfer in transfers)
        assert other.recv_tensor().tolist() == [7.0] * 5
        assert [transfer.done() for transfer in transfers] == [True, False]
