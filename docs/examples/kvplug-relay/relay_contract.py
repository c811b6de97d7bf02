"""Tests the queue "relay" against the laws of message queues, and the plugin against the laws of plugins."""

from __future__ import annotations

from kvplug_testing import MessageQueueContract, check_plugin


class TestRelay(MessageQueueContract):
    transport = "relay"


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("relay") == ()
