"""The lookup buffer "simple" is judged by the conformance kit, over two kinds of pipe."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvplug_testing import LookupBufferContract


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
