"""The transport "faulty": endpoints whose pipes are faulty ones."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from kvplug.errors import ConfigError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.context import PipeContext
from kvplug.transport.pipe import Pipe, PipeEndpoint, PipeListener
from kvplug_testing.faults.pipe import FaultyPipe
from kvplug_testing.faults.plan import Plan

_log = logging.getLogger(__name__)


class FaultyEndpoint(PipeEndpoint):
    """Any endpoint, and its pipes with faults. The contact is that of the endpoint beneath."""

    def __init__(
        self,
        beneath: PipeEndpoint,
        plan: Plan,
        *,
        numbers: Iterator[int] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Put ``plan`` around each pipe of ``beneath``. ``numbers``: theirs, from 1 unless given."""
        self._beneath = beneath
        self._plan = plan
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._timeout_s = timeout_s

    def listen(self) -> PipeListener:
        return _FaultyListener(self._beneath.listen(), self._wrapped)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return self._wrapped(self._beneath.connect(contact, timeout))

    def _wrapped(self, pipe: Pipe) -> Pipe:
        return FaultyPipe(pipe, self._plan, number=next(self._numbers), timeout_s=self._timeout_s)


class _FaultyListener(PipeListener):
    def __init__(self, beneath: PipeListener, wrapped: Callable[[Pipe], Pipe]) -> None:
        self._beneath = beneath
        self._wrapped = wrapped

    @property
    def contact(self) -> str:
        return self._beneath.contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return self._wrapped(self._beneath.accept(timeout))

    def close(self) -> None:
        self._beneath.close()


def faulty(context: PipeContext) -> PipeEndpoint:
    """The factory of the spec.

    Raises:
        ConfigError: the context has no transport beneath.
    """
    beneath, plan = planned(context, "transport")
    return FaultyEndpoint(beneath, plan, numbers=context.options.numbers, timeout_s=context.timeout_s)


def planned(context: Any, what: str) -> tuple[Any, Plan]:
    """The endpoint beneath, and what is to happen to its ends, of which the log warns.

    Raises:
        ConfigError: the context has nothing beneath.
    """
    if context.beneath is None:
        raise ConfigError(f'the {what} "faulty" has nothing beneath it: name it in a config, with over')
    plan: Plan = context.options.rules
    if plan.rules:
        _log.warning("faults are planned here: rules %d, seed %d", len(plan.rules), plan.seed)
    return context.beneath(), plan
