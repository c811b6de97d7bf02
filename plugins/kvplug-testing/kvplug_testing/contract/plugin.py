"""Judges a plugin as a whole: :func:`check_plugin` for a test, :class:`PluginContract` for a scorecard."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import attrs
import pytest

from kvplug.kit import DEVICE_TYPES, did_you_mean, discover, may_be_device_type
from kvplug_testing import waits
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.inspection import USED, Inspection, inspect_plugin
from kvplug_testing.laws import LAWS
from kvplug_testing.plugin_inspector import HEAVY


@attrs.frozen
class Breach:
    """One violation of a law by a plugin."""

    law: str
    about: str
    """The topic of the test of :class:`PluginContract` that fails because of it."""
    observed: str

    def __str__(self) -> str:
        return f"law {LAWS[self.law]}: {self.observed}"


def check_plugin(name: str) -> tuple[str, ...]:
    """Check the installed plugin whose entry point is called ``name`` against the laws PLUGIN-1 to PLUGIN-4.

    Separate processes inspect it as ``kvplug list`` and a config do, so modules that the calling process has
    imported make no difference. No device is needed.

    Returns:
        What could not be checked here, and why: a sentence for each factory whose heavy library is not
        installed. Empty if everything was checked.

    Raises:
        AssertionError: the plugin breaks a law. The message lists all breaches, each with its law, the
            observation, followed by the text of these laws.
    """
    found = inspect_plugin(name, waits.patience_s)
    breaches = tuple(breaches_of(found))
    if breaches:
        lines = "".join(f"\n  - {breach}" for breach in breaches)
        laws = "\n".join(LAWS[id_].quoted for id_ in dict.fromkeys(breach.law for breach in breaches))
        raise AssertionError(f"the plugin {name!r} breaks {_counted(len(breaches))}:{lines}\n\n{laws}")
    return tuple(unjudged(found))


def _counted(number: int) -> str:
    return "a law" if number == 1 else f"laws in {number} places"


# -- breaches --------------------------------------------------------------------------------------


def breaches_of(found: Inspection) -> Iterator[Breach]:
    """All breaches of an inspected plugin."""
    yield from _being_found(found)
    yield from _light_to_load(found)
    yield from _claims(found)
    yield from _documented(found)


def unjudged(found: Inspection) -> Iterator[str]:
    """A sentence for each step that was skipped because a heavy library is not installed."""
    for step in found.of(*USED):
        if step.missing in HEAVY:
            yield f"{step} was not loaded: {step.missing} is not installed here"


def _being_found(found: Inspection) -> Iterator[Breach]:
    if not found.distribution:
        there = ", ".join(found.installed) or "none"
        yield Breach(
            "PLUGIN-1",
            "found",
            f"no entry point named {found.name!r} is installed in the group kvplug; there are: {there}",
        )
        if found.cut_short:
            yield Breach("PLUGIN-1", "found", found.cut_short)
        return
    if len(found.entry_points) > 1:
        yield Breach("PLUGIN-1", "found", f"several entry points lead to it: {'; '.join(found.entry_points)}")
    if found.api_fault:
        yield Breach("PLUGIN-1", "api", found.api_fault)
    for step in found.of("entry point"):
        broken = step.answer.get("broken", "") or step.error
        if broken and not found.api_fault:
            yield Breach("PLUGIN-1", "loads", f"it does not load, with all others blocked: {broken}")
        for other in step.answer.get("others", ()):
            yield Breach("PLUGIN-1", "loads", f"{step} loads {other}, which is another plugin")
    if found.cut_short and not found.offers:
        yield Breach("PLUGIN-1", "loads", found.cut_short)


def _light_to_load(found: Inspection) -> Iterator[Breach]:
    for step in found.of("entry point", "options", "probe"):
        if step.heavy:
            yield Breach("PLUGIN-2", "weight", f"{step} loads {', '.join(step.heavy)}")
        if step.devices:
            yield Breach("PLUGIN-2", "devices", f"{step} opens {', '.join(step.devices)}")


def _claims(found: Inspection) -> Iterator[Breach]:
    for step in found.of("options"):
        if step.error:
            yield Breach("PLUGIN-3", "options", f"{step} cannot be read: {step.error}")
    for step in found.of("probe"):
        if step.error:
            yield Breach("PLUGIN-3", "probe", f"{step} gives no answer: {step.error}")
        elif not step.answer["viable"] and not step.answer["reason"]:
            yield Breach("PLUGIN-3", "probe", f"{step} says that it cannot work here, and not why")
    for offer in found.offers:
        if "devices" in offer:
            yield from _capabilities(found, offer)
    for step in found.of(*USED):
        if step.error and step.missing not in HEAVY:
            yield Breach("PLUGIN-3", "factories", f"{step} is not what the spec says: {step.error}")
    if found.cut_short and found.offers:
        yield Breach("PLUGIN-3", "whole", found.cut_short)


def _capabilities(found: Inspection, offer: Mapping[str, Any]) -> Iterator[Breach]:
    if not offer["devices"]:
        yield Breach("PLUGIN-3", "capabilities", f"the {offer['of']} moves tensors of no device")
    for unknown in sorted({*offer["devices"]} - {*DEVICE_TYPES}):
        if may_be_device_type(unknown):
            continue
        yield Breach(
            "PLUGIN-3",
            "capabilities",
            f"the {offer['of']} moves tensors of {unknown!r}, which is no type of device"
            f"{did_you_mean(unknown, DEVICE_TYPES)}; there are: {', '.join(DEVICE_TYPES)}",
        )
    if not offer["cost_stated"]:
        yield Breach(
            "PLUGIN-3",
            "capabilities",
            f"the {offer['of']} states no cost, so that auto cannot compare it: Capabilities(cost=Cost(...))",
        )
    if offer["cross_host"]:
        return
    answers = [step.answer for step in found.of("probe") if step.of == offer["of"] and not step.error]
    if not offer["probe"] or any(answer["viable"] and not answer["domain"] for answer in answers):
        how = "its probe names no domain" if offer["probe"] else "it has no probe that names one"
        yield Breach(
            "PLUGIN-3",
            "probe",
            f"the {offer['of']} works within one domain (cross_host=False), and {how}:"
            " two hosts would be taken for one",
        )


def _documented(found: Inspection) -> Iterator[Breach]:
    for offer in found.offers:
        if not str(offer["summary"]).strip():
            yield Breach("PLUGIN-4", "summaries", f"the {offer['of']} has no summary")
    for step in found.of("options"):
        for option in step.answer.get("unexplained", ()):
            yield Breach("PLUGIN-4", "help", f"the option {option!r} of the {step.of} has no help")
    if not found.offers:
        return
    if not found.readme.strip():
        yield Breach(
            "PLUGIN-4", "readme", f"the distribution {found.distribution} has no readme in its metadata"
        )
        return
    unnamed = [str(offer["of"]) for offer in found.offers if not _named(str(offer["name"]), found.readme)]
    if unnamed:
        yield Breach(
            "PLUGIN-4", "readme", f"the readme of {found.distribution} does not name the {', '.join(unnamed)}"
        )


def _named(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


# -- the suite -------------------------------------------------------------------------------------


class PluginContract(Contract):
    """Checks a plugin against the laws PLUGIN, in a run that keeps a scorecard.

    ``pytest --kvplug-transport NAME`` also runs it for the plugin that offers NAME. In a plugin's own test
    file :func:`check_plugin` is enough.
    """

    plugin: ClassVar[str] = ""
    """The name of its entry point."""

    @classmethod
    def subject(cls) -> str:
        return f"plugin {cls.plugin}"

    @classmethod
    def distribution(cls) -> str:
        found = [each for each in discover() if each.name == cls.plugin]  # does not import the plugin
        return ", ".join(f"{each.distribution} {each.version}" for each in found)

    @property
    def is_loaded(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return "" if self._found.offers else f"nothing that the plugin {self.plugin} offers could be loaded"

    @property
    def _found(self) -> Inspection:
        return _inspected(self.plugin)

    def _none(self, *about: str) -> None:
        observed = [breach.observed for breach in breaches_of(self._found) if breach.about in about]
        if observed:
            pytest.fail("; ".join(observed), pytrace=False)

    @law("PLUGIN-1")
    def test_it_is_found_through_one_entry_point(self) -> None:
        self._none("found")

    @law("PLUGIN-1")
    def test_it_states_its_api_as_a_literal_that_fits(self) -> None:
        self._none("api")

    @law("PLUGIN-1")
    def test_it_loads_while_all_others_are_blocked(self) -> None:
        self._none("loads")

    @law("PLUGIN-2", needs="is_loaded")
    def test_looking_at_it_loads_nothing_heavy(self) -> None:
        self._none("weight")

    @law("PLUGIN-2", needs="is_loaded")
    def test_looking_at_it_opens_no_device(self) -> None:
        self._none("devices")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_options_can_be_read(self) -> None:
        self._none("options")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_probes_answer(self) -> None:
        self._none("probe", "whole")

    @law("PLUGIN-3", needs="is_loaded")
    def test_capabilities_and_costs_are_stated(self) -> None:
        self._none("capabilities")

    @law("PLUGIN-3", needs="is_loaded")
    def test_its_factories_and_commands_are_there(self) -> None:
        self._none("factories")
        if reasons := "; ".join(unjudged(self._found)):
            pytest.skip(reasons)

    @law("PLUGIN-4", needs="is_loaded")
    def test_everything_has_a_summary(self) -> None:
        self._none("summaries")

    @law("PLUGIN-4", needs="is_loaded")
    def test_every_option_has_a_help(self) -> None:
        self._none("help")

    @law("PLUGIN-4", needs="is_loaded")
    def test_its_readme_names_what_it_offers(self) -> None:
        self._none("readme")


@cache
def _inspected(name: str) -> Inspection:
    """The inspection, run once for all tests of a suite."""
    return inspect_plugin(name, waits.patience_s)
