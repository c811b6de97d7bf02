"""The plugin as a whole."""

from __future__ import annotations

import pytest

from kvplug_cpu import plugin
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("cpu") == ()


def test_only_the_pipe_claims_that_its_connections_are_proven() -> None:
    pipe, communicator = plugin.kvplug_transports()
    assert pipe.capabilities.authenticated and not communicator.capabilities.authenticated
    assert pipe.run_probe().viable and communicator.run_probe().viable
