"""What is imported, and when, in an interpreter that has imported nothing before."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

STEPS = {
    "the package": "import kvplug; kvplug.__version__",
    "an error": "from kvplug import ConfigError",
    "the doors": """
for door in ("kvplug", "kvplug.engine", "kvplug.transport"):
    for name in importlib.import_module(door).__all__:
        getattr(sys.modules[door], name)
""",
    "the core": "import_all('kvplug', but='kvplug.cli')",
    "the program": "import_all('kvplug.cli')",
}
CODE = """
import importlib, json, pkgutil, sys

def import_all(package, but="-"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.startswith(but) and "._" not in module.name:
            importlib.import_module(module.name)

found = {}
"""
STEP = """
before = set(sys.modules)
%s
found[%r] = sorted(set(sys.modules) - before)
"""
HEAVY = {"numpy", "torch", "zmq", "rich", "xxhash", "prometheus_client", "hypothesis", "pytest"}


@cache
def loaded() -> dict[str, list[str]]:
    """The modules that each step loads, one after the other in one interpreter."""
    code = "".join([CODE, *(STEP % (step, name) for name, step in STEPS.items()), "print(json.dumps(found))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_importing_kvplug_loads_nothing_but_itself_and_an_error_only_the_errors() -> None:
    # where coverage is measured, __future__ was loaded before
    assert {*loaded()["the package"]} - {"__future__"} == {"kvplug", "kvplug.door"}
    assert [each for each in loaded()["an error"] if each.startswith("kvplug")] == ["kvplug.errors"]


def test_every_module_of_the_core_is_imported_without_what_is_heavy_and_only_the_program_with_click() -> None:
    assert "kvplug.assembly.doctor.peer" in loaded()["the core"]
    assert "kvplug.cli.main" in loaded()["the program"]
    for step, modules in loaded().items():
        packages = {module.partition(".")[0] for module in modules}
        assert not packages & (HEAVY if step == "the program" else {*HEAVY, "click"}), step
