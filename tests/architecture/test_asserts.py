"""No ``assert`` compares the elements of a tensor: pytest's explanation of one that fails needs hundreds of
bytes of memory for each element, gigabytes for a large message. ``kvplug_testing.comparison`` compares them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("tests", "plugins", "docs/examples")
KIT = ROOT / "plugins" / "kvplug-testing" / "kvplug_testing"


def faults(source: str, is_kit: bool = False) -> Iterator[str]:
    """The lines of asserts that compare tensors. In the kit, whose subjects decide what is compared, that
    is so even where the explanation only shows a part of each tensor.
    """
    if not is_kit and ".all()" not in source and ".any()" not in source:
        return  # most files: to parse them takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for call in ast.walk(node.test):
                match call:
                    case ast.Call(func=ast.Attribute(value=value, attr="all" | "any")) if any(
                        isinstance(each, ast.Compare) for each in ast.walk(value)
                    ):
                        yield f"line {call.lineno}: {ast.unparse(call)}"
                    case ast.Call(func=ast.Attribute(attr="equal" | "eq")) if is_kit:
                        yield f"line {call.lineno}: {ast.unparse(call)}"


def sources() -> list[Path]:
    return sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))


def test_no_assert_compares_the_elements_of_a_tensor() -> None:
    found = [
        f"{path.relative_to(ROOT)}, {fault}"
        for path in sources()
        for fault in faults(path.read_text(), KIT in path.parents)
    ]
    assert not found, "use kvplug_testing.comparison.assert_same:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_kit", "count"),
    [
        ("assert bool((got == 1).all()), 'it was written to'", False, 1),
        ("assert out is None or not (out[1:] != 0).any()", False, 1),
        ("assert all(each == 1 for each in got)", False, 0),
        ("assert torch.equal(got, sent)", False, 0),
        ("assert torch.equal(got, sent)", True, 1),
        ("same = (got == sent).all()\nassert same", True, 0),
    ],
)
def test_such_asserts_are_found(source: str, is_kit: bool, count: int) -> None:
    assert len(list(faults(source, is_kit))) == count
