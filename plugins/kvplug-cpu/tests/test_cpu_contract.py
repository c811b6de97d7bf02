"""The pipe "cpu" is judged by the conformance kit, over each kind of socket."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

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
