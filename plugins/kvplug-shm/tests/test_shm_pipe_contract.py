"""The pipe "shm" is judged by the conformance kit."""

from __future__ import annotations

import socket
from typing import Any, ClassVar

import pytest

from kvplug.testing import PipeContract
from kvplug.transport import PipeContext, PipeEndpoint, local_domain
from kvplug_shm.pipe import pipe
from kvplug_shm.pipe.contact import Contact


class TestShmPipe(PipeContract):
    transport = "shm"

    def silent_contact(self) -> str:
        listening = socket.socket(socket.AF_UNIX)
        self.later(listening.close)
        listening.bind("")  # the kernel chooses an abstract name
        listening.listen()
        return str(Contact(local_domain(), f"unix:@{listening.getsockname()[1:].decode()}"))


class TestShmPipeInPython(PipeContract):
    """Without the compiled steps."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"native": False}


class TestShmPipeSingleCopy(PipeContract):
    """Every tensor of 4 KiB or more is offered, whichever pages it lies in."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"single_copy": True}

    @pytest.fixture(autouse=True)
    def _in_this_process_only_for_these_tests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pipe, "worth_offering", pipe.worth_offering)

    def make_endpoint(self, context: PipeContext) -> PipeEndpoint:
        pipe.worth_offering = lambda tensor: tensor.nbytes >= 4096
        return super().make_endpoint(context)


@pytest.mark.slow
class TestShmPipeThatNeverSpins(PipeContract):
    """Everybody who waits sleeps, and most messages are larger than a ring."""

    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"slots": 3, "slot_bytes": 12_000, "spin_us": 0}
