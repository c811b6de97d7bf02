"""The pipe "sample" is judged by kvplug's conformance kit."""

from __future__ import annotations

from kvplug_testing import PipeContract


class TestSamplePipe(PipeContract):
    transport = "sample"
