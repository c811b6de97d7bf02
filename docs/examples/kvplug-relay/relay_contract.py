"""The queue "relay" by kvplug's laws of message queues, and the plugin by those of plugins."""

from __future__ import annotations

from kvplug_testing import MessageQueueContract, check_plugin


class TestRelay(MessageQueueContract):
    transport = "relay"


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("relay") == ()
