"""The transport "faulty": endpoints whose pipes inject faults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvplug.errors import ConfigError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.context import PipeContext
from kvplug.transport.pipe import Pipe, PipeEndpoint, PipeListener
from kvplug_testing.faults.pipe import FaultyPipe
from kvplug_testing.faults.plan import Plan
from kvplug_testing.faults.schedule import PlanRecord

_log = logging.getLogger(__name__)


class FaultyEndpoint(PipeEndpoint):
    """An endpoint around another one; its pipes inject faults. The contact is the inner endpoint's."""

    def __init__(
        self,
        inner: PipeEndpoint,
        plan: Plan,
        *,
        record: PlanRecord | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Apply ``plan`` to each pipe of ``inner``. ``record``: that of several endpoints with this plan."""
        self._inner = inner
        self._plan = plan
        self._record = PlanRecord(plan) if record is None else record
        self._timeout_s = timeout_s

    def listen(self) -> PipeListener:
        return _FaultyListener(self._inner.listen(), self._wrapped)

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return self._wrapped(self._inner.connect(contact, timeout))

    def _wrapped(self, pipe: Pipe) -> Pipe:
        number = next(self._record.numbers)
        return FaultyPipe(pipe, self._plan, number=number, timeout_s=self._timeout_s, record=self._record)


class _FaultyListener(PipeListener):
    def __init__(self, inner: PipeListener, wrapped: Callable[[Pipe], Pipe]) -> None:
        self._inner = inner
        self._wrapped = wrapped

    @property
    def contact(self) -> str:
        return self._inner.contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return self._wrapped(self._inner.accept(timeout))

    def close(self) -> None:
        self._inner.close()


def faulty(context: PipeContext) -> PipeEndpoint:
    """The factory of the spec.

    Raises:
        ConfigError: the context has no inner transport.
    """
    inner, plan = planned(context, "transport")
    return FaultyEndpoint(inner, plan, record=context.options.record, timeout_s=context.timeout_s)


def planned(context: Any, what: str) -> tuple[Any, Plan]:
    """The inner endpoint and the plan for its ends; the log warns of a plan with rules.

    Raises:
        ConfigError: the context has no inner transport.
    """
    if context.make_inner is None:
        raise ConfigError(f'the {what} "faulty" wraps nothing: name it in a config, with inner')
    plan: Plan = context.options.rules
    if plan.rules:
        _log.warning("faults are planned here: rules %d, seed %d", len(plan.rules), plan.seed)
    return context.make_inner(), plan
