"""What is imported, and when: the rules that a list of contracts cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "zmq"}
LAZY = {"click", "rich", "xxhash", "prometheus_client", "hypothesis", "pytest"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.partition(".")[0]}
    return set()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below ``node`` but the bodies of functions and of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from executed_at_import(other)
            continue
        yield child
        yield from executed_at_import(child)


def test_a_module_of_the_core_imports_nothing_heavy_at_its_top() -> None:
    heavy = {}
    for path in sources("kvplug"):
        inside = path.relative_to(ROOT / "kvplug").parts[0]
        banned = HEAVY | (LAZY - {"click"} if inside == "cli" else LAZY)
        found = {top for node in executed_at_import(ast.parse(path.read_text())) for top in imported(node)}
        if found & banned:
            heavy[name(path)] = found & banned
    assert not heavy


def loaded_by(statements: str) -> set[str]:
    """Top-level packages in ``sys.modules`` of a fresh interpreter after running ``statements``."""
    code = f"{statements}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("door", ["kvplug", "kvplug.engine", "kvplug.transport"])
def test_every_name_of_a_door_comes_without_torch_zmq_or_numpy(door: str) -> None:
    loaded = loaded_by(f"import {door} as door\nfor name in door.__all__:\n    getattr(door, name)")
    assert not loaded & (HEAVY | {"click", "rich", "hypothesis", "pytest"})


def test_the_version_is_cheap() -> None:
    assert not loaded_by("import kvplug; kvplug.__version__") & {"attrs", "msgspec", "pluggy"}
