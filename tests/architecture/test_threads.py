"""Threads and locks: every thread ends when the program leaves, and Ctrl-C leaves no lock taken."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "kvplug", *ROOT.glob("plugins/*/kvplug_*"), *ROOT.glob("docs/examples/*/kvplug_*")]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
OTHERS = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}
REASONS = {
    "plugins/kvplug-bench/kvplug_bench/processes.py": "waits for a parent, in a process that is ended",
    "plugins/kvplug-mooncake/kvplug_mooncake/client.py": "a program's, which leaves by os._exit",
    "plugins/kvplug-testing/kvplug_testing/contract": "a test's, in a process that pytest or a test ends",
    "plugins/kvplug-testing/kvplug_testing/peers.py": "waits for a parent, in a child that has no other end",
    "plugins/kvplug-testing/kvplug_testing/waits.py": "a test's, which reports what does not end",
    "plugins/kvplug-transformers/kvplug_transformers/demo": "a program's: reads lines, and calls no library",
}
"""Files and folders whose other threads Python may stop wherever they are."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def threads(path: Path) -> Iterator[int]:
    """The lines that make another thread than a BackgroundThread."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in OTHERS:
                yield node.lineno


def test_a_thread_is_a_background_thread_or_has_a_reason_not_to_be() -> None:
    wrong = [
        f"{name(path)}, line {line}"
        for path in MODULES
        if not any(path.is_relative_to(ROOT / where) for where in REASONS)
        for line in threads(path)
    ]
    assert not wrong, (
        f"{'; '.join(wrong)}: Python stops such a thread anywhere when the program leaves, and within C++ it"
        " aborts the process; make a kvplug.transport.BackgroundThread"
    )


@pytest.mark.parametrize("where", REASONS)
def test_a_reason_is_needed(where: str) -> None:
    assert any(list(threads(path)) for path in MODULES if path.is_relative_to(ROOT / where))


KIT = ROOT / "plugins" / "kvplug-testing"


def conditions(tree: ast.AST) -> set[str]:
    """The attributes that are conditions."""
    return {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("threading.Condition(")
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }


def test_a_lock_is_taken_and_not_its_condition() -> None:
    wrong = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = set() if path.is_relative_to(KIT) else conditions(tree)
        wrong += [
            f"{name(path)}, line {node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.context_expr, ast.Attribute) and item.context_expr.attr in names
        ]
    assert not wrong, (
        f"{'; '.join(wrong)}: the __enter__ of a Condition is Python code, and Ctrl-C inside of it leaves the"
        " lock taken; make the lock first, and take that"
    )
