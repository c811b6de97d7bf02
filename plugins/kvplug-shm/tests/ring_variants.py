"""Each variant of a ring's functions with one step missing, or two steps swapped.

A step is a statement that stores, calls, decides or looks. What a shared word is found to be may also be
taken as 0, or as 1, without looking. Left out is only what is no program: a name that is used before it is
bound.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

_FUNCTIONS = {
    "protocol": ["announce", "park"],
    "ends": [
        *(f"WritingEnd.{name}" for name in ("room", "blocked_on", "publish", "end", "evict")),
        *(f"ReadingEnd.{name}" for name in ("available", "blocked_on", "evicted", "release", "end")),
        *(f"ReadingEnd.{name}" for name in ("evict_writer", "writer_over")),
    ],
}


class Variant(NamedTuple):
    protocol: ModuleType
    ends: ModuleType


def variants(protocol: ModuleType, ends: ModuleType) -> dict[str, Callable[[], Variant]]:
    """By name, what makes each: names are needed to collect the tests, modules only to run them."""
    found: dict[str, Callable[[], Variant]] = {}
    for module in (protocol, ends):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for function in _FUNCTIONS[module.__name__.rpartition(".")[2]]:
            names = Counter[str]()
            for number, (change, _) in enumerate(_changes(_function(tree, function))):
                names[change] += 1
                name = f"{function}: {change}" + (f", number {names[change]}" if names[change] > 1 else "")
                found[name] = partial(_variant, protocol, ends, module, function, number)
    return found


def _variant(
    protocol: ModuleType, ends: ModuleType, module: ModuleType, function: str, number: int
) -> Variant:
    """The change of this number in ``function`` of ``module``, which is one of the two."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    list(_changes(_function(tree, function)))[number][1]()
    made = _module(ast.fix_missing_locations(tree))
    if module is ends:
        return Variant(protocol, made)
    theirs = _module(ast.parse(Path(str(ends.__file__)).read_text()))
    theirs.protocol = made  # type: ignore[attr-defined]
    return Variant(made, theirs)


def _module(tree: ast.Module) -> ModuleType:
    with TemporaryDirectory() as folder:
        path = Path(folder, "variant.py")
        path.write_text(ast.unparse(tree))
        spec = spec_from_file_location("variant", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _function(tree: ast.AST, path: str) -> ast.FunctionDef:
    for name in path.split("."):
        tree = next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)
    assert isinstance(tree, ast.FunctionDef)
    return tree


Change = tuple[str, Callable[[], None]]


def _changes(function: ast.FunctionDef) -> Iterator[Change]:
    for steps in _blocks(function):
        for at, step in enumerate(steps):
            if _may_be_missing(step):
                yield f"without `{_told(step)}`", partial(_put, [(steps, at)], [ast.Pass()])
    for (steps, at), (others, beside) in _neighbours(function):
        one, other = steps[at], others[beside]
        if (
            _is_step(one)
            and _is_step(other)
            and not _bound(one) & _named(other)
            and not _bound(other) & _named(one)
        ):
            places = [(steps, at), (others, beside)]
            yield f"`{_told(other)}` before `{_told(one)}`", partial(_put, places, [other, one])
    for node in ast.walk(function):
        for load in ast.iter_child_nodes(node):
            if _is_load(load):
                for answer in (0, 1):
                    taken = partial(_replace, node, load, ast.Constant(answer))
                    yield f"`{ast.unparse(load)}` taken as {answer}", taken


Place = tuple[list[ast.stmt], int]


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    fields = [getattr(node, name, None) for node in ast.walk(function) for name in ("body", "finalbody")]
    return [field for field in fields if isinstance(field, list) and field]


def _neighbours(function: ast.FunctionDef) -> Iterator[tuple[Place, Place]]:
    for steps in _blocks(function):
        for at, beside in pairwise(range(len(steps))):
            if not _is_text(steps[at]):
                yield (steps, at), (steps, beside)
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            yield (node.body, len(node.body) - 1), (node.finalbody, 0)


def _put(places: list[Place], steps: list[ast.stmt]) -> None:
    for (block, at), step in zip(places, steps, strict=True):
        block[at] = step


def _replace(node: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(node):
        if value is old:
            setattr(node, name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new


def _is_step(step: ast.stmt) -> bool:
    return not _bound(step) or any(_is_load(node) for node in ast.walk(step))


def _is_text(step: ast.stmt) -> bool:
    return isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)


def _may_be_missing(step: ast.stmt) -> bool:
    """It binds no name, and is not the answer of its function."""
    if isinstance(step, ast.Return):
        return step.value is None
    return not _bound(step) and not _is_text(step) and not isinstance(step, ast.Try | ast.Raise)


def _is_load(node: ast.AST) -> bool:
    """Of a word, or of what one thread of a process left for another."""
    if not isinstance(getattr(node, "ctx", None), ast.Load):
        return False
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value).endswith("words")
    return isinstance(node, ast.Attribute) and node.attr == "writer_evicted"


def _names_of(step: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {
        node.id for node in ast.walk(step) if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _bound(step: ast.stmt) -> set[str]:
    return _names_of(step, ast.Store) if isinstance(step, ast.Assign | ast.AnnAssign) else set()


def _named(step: ast.stmt) -> set[str]:
    return _names_of(step, ast.Store) | _names_of(step, ast.Load)


def _told(step: ast.stmt) -> str:
    return ast.unparse(step).splitlines()[0]
