"""Options of the pipe and of the message queue "faulty". No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.config import option
from kvplug.errors import ConfigError
from kvplug_testing.faults.plan import Plan, read_plan
from kvplug_testing.faults.schedule import PlanRecord


def _is_plan(_: Any, __: Any, given: str | Mapping[str, Any]) -> None:
    try:
        read_plan(given)
    except ConfigError as e:
        where = f" [{e.source}]" if e.source else ""
        raise ConfigError(*(f"plan: {fault}{where}" for fault in e.faults)) from e


@attrs.frozen(kw_only=True, eq=False)
class FaultyOptions:
    """Options of the pipe "faulty", and of the message queue."""

    inner: str = option(
        "auto", help="The transport that moves the bytes, as it would be named without faults."
    )
    plan: str | Mapping[str, Any] = option(
        help="The plan of faults: a .toml or .json file, the plan itself as TOML text, or a table.",
        validator=_is_plan,
    )
    rules: Plan = attrs.field(
        init=False, repr=False, default=attrs.Factory(lambda self: read_plan(self.plan), takes_self=True)
    )
    """The plan, read once. Not an option."""
    record: PlanRecord = attrs.field(
        init=False, repr=False, default=attrs.Factory(lambda self: PlanRecord(self.rules), takes_self=True)
    )
    """That of all pipes that are made with these options. Not an option."""
