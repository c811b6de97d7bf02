"""The pipe "cpu" is judged by the conformance kit, over each kind of socket."""

from __future__ import annotations

import socket
from typing import Any, ClassVar

import pytest

from kvplug.transport import local_domain
from kvplug_cpu.contact import CpuContact
from kvplug_testing import PipeContract


class TestCpuPipe(PipeContract):
    transport = "cpu"
    options: ClassVar[dict[str, Any]] = {"socket": "unix"}
    one_host = "it is judged with the option socket=unix"

    def silent_contact(self) -> str:
        listening = socket.socket(socket.AF_UNIX)
        self.later(listening.close)
        listening.bind("")  # the kernel chooses an abstract name
        listening.listen()
        return str(CpuContact(local_domain(), (f"unix:@{listening.getsockname()[1:].decode()}",)))


@pytest.mark.variant
class TestCpuPipeOverTcp(PipeContract):
    transport = "cpu"
    options: ClassVar[dict[str, Any]] = {"socket": "tcp"}
    lies = 15
