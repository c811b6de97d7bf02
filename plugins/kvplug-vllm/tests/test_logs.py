"""An operator sees kvplug's lines in vLLM's log, unless the loggers were set up otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvplug import Registry
from kvplug.engine import CommandSpec, SinkSpec
from kvplug.transport import hookimpl
from kvplug_vllm.logs import join_vllm

pytestmark = pytest.mark.smoke

NAMES = ("vllm", "kvplug", "kvplug_vllm", "some_plugin", "some_module")


@pytest.fixture
def registry() -> Registry:
    sink, command = (
        SinkSpec(name="some", factory="some_plugin.sinks:Sink"),
        CommandSpec(name="some", target="some_module:run"),
    )
    plugin = SimpleNamespace(
        kvplug_sinks=hookimpl(lambda: [sink], specname="kvplug_sinks"),
        kvplug_commands=hookimpl(lambda: [command], specname="kvplug_commands"),
    )
    registry = Registry()
    registry.register(plugin, name="some")
    return registry


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What vLLM's handler prints, at INFO."""
    shown: list[str] = []
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    loggers[0].handlers = [handler]
    loggers[0].setLevel(logging.INFO)
    yield shown
    for logger, (logger.handlers, logger.propagate, level) in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_the_core_and_every_plugin_log_where_vllm_does(registry, lines):
    join_vllm(registry)
    join_vllm(registry)  # the second side of one process
    names = ("kvplug.assembly.peers", "kvplug_vllm.worker", "some_plugin.deep.down", "some_module")
    for name in names:
        logging.getLogger(name).info("hello")
        logging.getLogger(name).debug("too much")
    assert lines == [f"{name}: hello" for name in names]
