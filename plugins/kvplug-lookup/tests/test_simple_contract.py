"""The lookup buffer "simple" is judged by the conformance kit, over two kinds of pipe."""

from __future__ import annotations

from kvplug.testing import LookupBufferContract


class TestSimple(LookupBufferContract):
    transport = "simple"


class TestSimpleOverSockets(LookupBufferContract):
    transport = "simple"
    pipes = "cpu"
