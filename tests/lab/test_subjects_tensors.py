"""The suite over a subject of mutants that no plugin offers: a queue of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import MessageQueueContract
from kvplug_testing.sources import module_at

SUBJECTS = Path(__file__).parent / "subjects"
queue = module_at(str(SUBJECTS / "relay.py"))

pytestmark = pytest.mark.variant


class TestRelay(MessageQueueContract):
    def make_endpoint(self, context: Any) -> Any:
        return queue.RelayEndpoint(context)
