"""The results of inspecting one installed plugin in a fresh process: what each step loaded and opened.

:func:`inspect_plugin` runs :mod:`kvplug_testing.plugin_inspector` twice: once to load what ``kvplug list``
loads, and once to load what is used. It only reports; :mod:`kvplug_testing.contract.plugin` judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug_testing import plugin_inspector
from kvplug_testing.peers import end_of

USED: Final = ("factory", "worker_factory", "client", "command")
"""Steps that happen when a name is used; ``kvplug list`` causes the others."""


@attrs.frozen(kw_only=True)
class InspectionStep:
    """One step of the inspection."""

    what: str
    """``entry point``, ``options``, ``probe``, ``factory``, ``worker_factory``, ``client`` or
    ``command``."""
    of: str = ""
    """Kind and name of the spec: ``"pipe cpu"``. Empty for the entry point."""
    target: str = ""
    error: str = ""
    """The error that it raised; empty if it succeeded."""
    missing: str = ""
    """The top-level package whose absence caused the error."""
    heavy: tuple[str, ...] = ()
    """The packages of :data:`kvplug_testing.plugin_inspector.HEAVY` that this step loaded."""
    devices: tuple[str, ...] = ()
    """Paths in ``/dev`` that this step opened."""
    answer: Mapping[str, Any] = attrs.field(factory=dict)

    def __str__(self) -> str:
        whose = f" of the {self.of}" if self.of else ""
        return f"the {self.what.replace('_', ' ')}{whose} ({self.target})"


@attrs.frozen(kw_only=True)
class Inspection:
    """All results of the inspection."""

    name: str
    installed: tuple[str, ...] = ()
    """Names of all installed plugins."""
    entry_points: tuple[str, ...] = ()
    """``"distribution: name = module"`` for each entry point with this name or with the same module."""
    distribution: str = ""
    api_fault: str = ""
    """Why its declared API cannot be read, or is not compatible."""
    readme: str = ""
    offers: tuple[Mapping[str, Any], ...] = ()
    """For each spec: ``of`` ("pipe cpu"), ``name``, ``summary``, and for a transport ``devices``,
    ``cross_host``, ``probe`` and ``cost_stated``.
    """
    steps: tuple[InspectionStep, ...] = ()
    cut_short: str = ""
    """The step during which the process died or timed out, and how it ended."""

    def of(self, *what: str) -> tuple[InspectionStep, ...]:
        return tuple(step for step in self.steps if step.what in what)


def inspect_plugin(name: str, timeout_s: float) -> Inspection:
    """Inspect the plugin whose entry point is called ``name``, in two separate processes.

    ``timeout_s`` is the time limit of each process, in seconds.
    """
    looked = _run("look", name, timeout_s)
    if looked.cut_short or not looked.offers:
        return looked
    used = _run("use", name, timeout_s)
    steps = (*looked.steps, *used.of(*USED))
    return attrs.evolve(looked, steps=steps, cut_short=used.cut_short)


def _run(mode: str, name: str, timeout_s: float) -> Inspection:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVPLUG_")}
    with tempfile.TemporaryDirectory(prefix="kvplug-") as folder:
        told = Path(folder, "told")
        told.touch()
        command = [sys.executable, "-P", "-m", plugin_inspector.__name__, mode, name, str(told)]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, timeout=timeout_s, check=False)
            said = done.stderr.decode("utf-8", "replace").strip()
            ended = f"the process ended: {end_of(done.returncode)}{': ' if said else ''}{said[-2000:]}"
        except subprocess.TimeoutExpired:
            ended = f"it had not come to an end after {timeout_s:g} s"
        return _read(name, told.read_text(encoding="utf-8"), ended)


def _read(name: str, told: str, ended: str) -> Inspection:
    facts: dict[str, Any] = {}
    steps: list[InspectionStep] = []
    began: InspectionStep | None = None
    whole = False
    for each in map(json.loads, told.splitlines()):
        if "begins" in each:
            began = InspectionStep(**each["begins"])
        elif "step" in each:
            steps.append(InspectionStep(**_tuples(each["step"])))
            began = None
        elif "end" in each:
            whole = True
        else:
            facts |= _tuples(each)
    during = f"{began}: " if began is not None else ""
    return Inspection(name=name, steps=tuple(steps), cut_short="" if whole else f"{during}{ended}", **facts)


def _tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples, as the classes above require."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
