"""An operator sees kvplug's lines in vLLM's log, unless the loggers were set up otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvplug import Registry
from kvplug.engine import CommandSpec, SinkSpec
from kvplug.transport import hookimpl
from kvplug_vllm.logs import join_vllm

pytestmark = pytest.mark.smoke

NAMES = ("vllm", "kvplug", "kvplug_vllm", "some_plugin", "some_module")


class Plugin:
    @hookimpl
    def kvplug_sinks(self) -> list[SinkSpec]:
        return [SinkSpec(name="some", factory="some_plugin.sinks:Sink")]

    @hookimpl
    def kvplug_commands(self) -> list[CommandSpec]:
        return [CommandSpec(name="some", target="some_module:command")]


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register(Plugin(), name="some")
    return registry


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What vLLM's handler prints."""
    shown: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(f"{record.name}: {record.getMessage()}")

    before = {name: vars(logging.getLogger(name)).copy() for name in NAMES}
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    logging.getLogger("vllm").handlers = [Handler()]
    logging.getLogger("vllm").setLevel(logging.INFO)
    yield shown
    for name, state in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = state["handlers"], state["propagate"]
        logger.setLevel(state["level"])


def test_the_core_and_every_plugin_log_where_vllm_does(registry: Registry, lines: Any) -> None:
    join_vllm(registry)
    join_vllm(registry)  # the second side of one process
    names = ("kvplug.assembly.peers", "kvplug_vllm.worker", "some_plugin.deep.down", "some_module")
    for name in names:
        logging.getLogger(name).info("hello")
        logging.getLogger(name).debug("too much")
    assert lines == [f"{name}: hello" for name in names]


def test_a_logger_that_was_set_up_is_left_alone(registry: Registry, lines: Any) -> None:
    logging.getLogger("some_plugin").setLevel(logging.ERROR)
    logging.getLogger("kvplug").handlers = [logging.NullHandler()]
    join_vllm(registry)
    logging.getLogger("some_plugin").warning("hello")
    logging.getLogger("kvplug").warning("hello")
    assert lines == []


def test_where_vllm_leaves_logging_alone_so_does_kvplug(registry: Registry, lines: Any) -> None:
    logging.getLogger("vllm").handlers = []
    join_vllm(registry)
    assert logging.getLogger("kvplug").propagate
    assert logging.getLogger("kvplug").handlers == []
