"""The pipe "nixl" is judged by the conformance kit, over the lanes that UCX finds, and over TCP."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvplug_testing import PipeContract

pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed")


class TestNixlPipe(PipeContract):
    """UCX knows nothing of the simulated device, but its memory has addresses and is the CPU's."""

    transport = "nixl"
    devices = ["cpu", "simulated"]  # noqa: RUF012
    options: ClassVar[dict[str, Any]] = {"expected_gb_per_s": 0.0}
    lies = 15
    waivers: ClassVar[dict[str, str]] = {
        "test_a_forked_child_holds_none_of_the_descriptors": (
            "UCX's own descriptors cannot be closed after a fork; kvplug's are"
        ),
        "test_a_forked_child_connects_anew_and_the_pipe_it_inherited_stays_its_parents": (
            "UCX's threads are missing in a forked child; the error says to start it with 'spawn'"
        ),
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _with_ucx(cls) -> None:
        """What UCX keeps of the first agent of a process is no leak of a pipe."""
        from kvplug_nixl.agent import Agent

        Agent(error_handling="none", only_loopback=True).close()

    @pytest.fixture(autouse=True)
    def _with_the_simulated_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvplug_nixl.pipe import pipe

        monkeypatch.setattr(pipe, "DEVICES", (*pipe.DEVICES, "simulated"))


@pytest.mark.variant
class TestNixlPipeOverTcp(TestNixlPipe):
    """UCX needs the peer's process for each read."""

    options: ClassVar[dict[str, Any]] = {"expected_gb_per_s": 0.0, "tls": "tcp,self"}
