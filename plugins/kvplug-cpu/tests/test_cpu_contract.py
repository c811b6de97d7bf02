"""The pipe "cpu" is judged by the conformance kit, over each kind of socket."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest

from kvplug.net.trust.credentials import Secret
from kvplug.transport import Credentials, PipeEndpoint
from kvplug_testing import PipeContract


class TestCpuPipe(PipeContract):
    transport = "cpu"
    options: ClassVar[dict[str, Any]] = {"socket": "unix"}
    one_host = "it is judged with the option socket=unix"


@pytest.mark.variant
class TestCpuPipeOverTcp(PipeContract):
    transport = "cpu"
    options: ClassVar[dict[str, Any]] = {"socket": "tcp"}
    lies = 15

    def make_endpoint(self, context: PipeEndpoint.Context) -> PipeEndpoint:
        """TCP needs a host, and a secret."""
        if context.host.startswith("unix:"):
            secret = context.credentials.secret or Secret("the secret of both ends")
            context = attrs.evolve(context, host="127.0.0.1", credentials=Credentials(secret))
        return super().make_endpoint(context)
