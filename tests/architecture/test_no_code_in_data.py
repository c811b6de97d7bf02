"""Nothing in the tree can turn received bytes into code: no unpickling, no eval, no exec."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("kvplug", "plugins", "benchmarks", "docs/examples")
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "allow_pickle",
    "send_pyobj",
    "recv_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
"""Of numpy, pyzmq and torch.distributed: each unpickles."""
TORCH = {"load", "save"}


def faults(source: str) -> Iterator[str]:
    """What in a module's source could run what it is given, with the line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                found = [module or "", *(f"{module}.{alias.name}" for alias in names)]
            case ast.Call(func=ast.Name(id=called)) if called in CALLS:
                yield f"line {line}: calls {called}"
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="builtins"), attr=called)) if called in CALLS:
                yield f"line {line}: calls builtins.{called}"
                continue
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in TORCH:
                yield f"line {line}: torch.{attr} pickles"
                continue
            case ast.Attribute(attr=attr) if attr in METHODS:
                yield f"line {line}: {attr} pickles"
                continue
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield f"line {node.value.lineno}: allow_pickle"
                continue
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                found = [name]
            case _:
                continue
        for name in found:
            if MODULES & set(name.split(".")):
                yield f"line {line}: imports {name}"


def modules() -> list[Path]:
    found = (path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py")))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def test_no_module_unpickles_or_evaluates() -> None:
    found = modules()
    assert len(found) > 10
    bad = [
        f"{path.relative_to(ROOT)}, {fault}"
        for path in found
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import a, marshal as m",
        "from pickle import loads as parse",
        "import shelve",
        "def f():\n    import cloudpickle.cloudpickle",
        "from torch.utils import dill",
        "import importlib\nimportlib.import_module('dill')",
        "eval('1')",
        "builtins.exec(x)",
        "__import__(name)",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "torch.distributed.broadcast_object_list(x)",
    ],
)
def test_the_check_sees_each_way(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile('x')", "ast.literal_eval('1')", "cursor.execute('x')", "import json"],
)
def test_the_check_lets_harmless_namesakes_pass(source: str) -> None:
    assert not list(faults(source))
