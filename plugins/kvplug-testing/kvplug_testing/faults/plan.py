"""Plans of faults: a seed and rules, as frozen values, and how they are read from an operator's config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug.config import option, option_fields, sources
from kvplug.config.messages import bad_value, unknown_key
from kvplug.config.options import convert_values
from kvplug.errors import ConfigError

BEFORE: Final = ("stop", "raise", "disconnect", "kill")
"""Actions on a call, before it uses the inner pipe."""
CONTENT: Final = ("delay", "slow", "drop", "duplicate", "swap", "flip")
"""Actions on a message; on a received one, after it has arrived."""
PARAMETERS: Final[Mapping[str, tuple[str, bool]]] = {
    "seconds": ("delay, stop", True),
    "bytes_per_s": ("slow", True),
    "bits": ("flip", False),
    "error": ("raise", True),
    "signal": ("kill", False),
}
"""For each parameter, its action and whether the action requires it; ``stop`` works without ``seconds``."""


@attrs.frozen(kw_only=True)
class Rule:
    """One fault, and the messages of each pipe and direction that it hits.

    Messages are counted from 1, separately in each pipe and direction, and only those of at least
    ``min_bytes``. A rule without conditions hits all messages; one with several conditions hits messages that
    meet all of them.

    Raises:
        ConfigError: fields that do not belong together, or one that is missing; every fault at once.
    """

    do: Literal[
        "delay", "stop", "slow", "drop", "duplicate", "swap", "flip", "raise", "disconnect", "kill"
    ] = option(help="The fault of a message that is hit.")
    direction: Literal["send", "recv"] = option(
        "send", help="Whether the rule applies to messages that this end sends, or that it receives."
    )
    message: int | None = option(None, help="Only the message with this number is hit.", at_least=1)
    every: int | None = option(
        None, help="Every n-th message is hit: 3 hits the third, the sixth and so on.", at_least=1
    )
    after: int | None = option(
        None,
        help="Only messages that begin after this many bytes in their direction are hit.",
        unit="bytes",
        at_least=0,
    )
    probability: float = option(
        1.0, help="The share of them that is hit; the seed selects which.", above=0, at_most=1
    )
    times: int | None = option(None, help="The most hits in one pipe.", at_least=1)
    min_bytes: int = option(
        0,
        help="Smaller messages are neither counted nor hit, so that signals pass and KV is hit.",
        unit="bytes",
        at_least=0,
    )
    pipe: int | None = option(
        None,
        help="Only the pipe (or end of a queue) of this number is hit; they are counted from 1.",
        at_least=1,
    )
    seconds: float | None = option(
        None,
        help="How long delay and stop hold a message; stop without it never ends.",
        unit="seconds",
        above=0,
    )
    bytes_per_s: int | None = option(None, help="The rate of slow, per second.", unit="bytes", at_least=1)
    bits: int | None = option(None, help="How many bits flip inverts; by default 1.", at_least=1)
    error: (
        Literal["PeerGoneError", "TimeoutError", "TransportError", "WireError", "UnsupportedError"] | None
    ) = option(None, help="The error of raise, raised once for each message that is hit.")
    signal: Literal["SIGKILL", "SIGSTOP"] | None = option(
        None, help="The signal that kill sends to its own process; by default SIGKILL."
    )

    def __attrs_post_init__(self) -> None:
        faults = rule_faults({name: getattr(self, name) for name in option_fields(Rule)})
        if faults:
            raise ConfigError(*faults)


def _tuple(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rules)


@attrs.frozen(kw_only=True)
class Plan:
    """Rules, and the seed of their random decisions. Without rules there are no faults."""

    seed: int = 0
    """Of all its random decisions: the same plan does the same again."""
    rules: tuple[Rule, ...] = attrs.field(default=(), converter=_tuple)
    """They act in this order."""


def rule_faults(values: Mapping[str, Any]) -> list[str]:
    """Errors in the combination of one rule's fields, each of which is valid alone."""
    faults = []
    do = values.get("do")
    for name, (actions, needed) in PARAMETERS.items():
        belongs = do in actions.split(", ")
        if belongs and needed and do != "stop" and values.get(name) is None:
            faults.append(f"{name}: must be given with {do}")
        if do is not None and not belongs and values.get(name) is not None:
            faults.append(f"{name}: has no meaning with {do}, only with {actions.replace(', ', ' or ')}")
    if values.get("message") is not None and values.get("every") is not None:
        faults.append("every: message is given too; say one of them")
    if values.get("direction") == "recv" and values.get("min_bytes") and do in BEFORE:
        faults.append(
            f"min_bytes: {do} comes before a message is received, when its size is unknown;"
            " leave it out, or say direction send at the other end"
        )
    return faults


def read_plan(given: str | os.PathLike[str] | Mapping[str, Any]) -> Plan:
    """The plan in a table, in TOML text (with a ``=`` in it), or in a file ``.toml`` or ``.json``.

    A path is as seen from the process's working directory.

    Raises:
        ConfigError: the plan is wrong; lists every error. Rules are counted from 1.
    """
    if isinstance(given, Mapping):
        return _plan(given)
    path = os.fspath(given)
    if isinstance(given, str) and ("=" in given or "\n" in given):
        return _plan(sources.toml_table(given, "plan"))
    return _plan(sources.file_value(path), path)


def _plan(table: Any, source: str = "") -> Plan:
    if not isinstance(table, Mapping):
        raise ConfigError(bad_value("plan", table, "a table with seed and rules"), source=source)
    faults: list[str] = [
        unknown_key(str(key), ("seed", "rules")) for key in table if key not in ("seed", "rules")
    ]
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        faults.append(bad_value("seed", seed, "a whole number"))
    given = table.get("rules", ())
    if not isinstance(given, Sequence) or isinstance(given, str):
        faults.append(bad_value("rules", given, "a list of tables, [[rules]] in TOML"))
        given = ()
    rules = []
    for number, each in enumerate(given, start=1):
        rule, wrong = _rule(each)
        faults += (f"rule {number}: {fault}" for fault in wrong)
        rules.append(rule)
    if faults:
        raise ConfigError(*faults, source=source)
    return Plan(seed=seed, rules=[rule for rule in rules if rule is not None])


def _rule(given: Any) -> tuple[Rule | None, list[str]]:
    if not isinstance(given, Mapping):
        return None, [bad_value("a rule", given, "a table with do, and what goes with it")]
    values, unfit = convert_values(Rule, given)
    faults: list[str] = [*unfit]
    if "do" not in given:
        faults.insert(0, f"do: must be given; {option_fields(Rule)['do'].metadata['kvplug.help']}")
    wrong = {fault.partition(":")[0] for fault in faults}
    faults += (fault for fault in rule_faults(values) if fault.partition(":")[0] not in wrong)
    return (None, faults) if faults else (Rule(**values), [])
