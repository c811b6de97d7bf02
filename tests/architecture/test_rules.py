"""Rules that the sources keep and that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
KIT = "plugins/kvplug-testing/kvplug_testing"


@cache
def python_in(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(ROOT).parts)]


def sources(*folders: str) -> list[Path]:
    """What is installed of these folders, without their tests."""
    return [path for folder in folders for path in python_in(folder) if "tests" not in path.parts]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=function) | ast.Attribute(attr=function):
            return function
    return ""


Faults = Iterator[tuple[ast.AST, str]]


@attrs.frozen(kw_only=True)
class Rule:
    instead: str
    """Why it is a rule, and what to write."""
    files: Callable[[], list[Path]]
    may: str
    """A pattern that every fault has. Most files do not, and to parse them would take most of the time."""
    faults: Callable[[ast.Module], Faults]
    exceptions: Mapping[str, str] = attrs.field(factory=dict)
    """Files and folders that may do it, and why."""

    def broken_by(self, source: str) -> list[str]:
        if not re.search(self.may, source):
            return []
        found = self.faults(ast.parse(source))
        return [f"line {getattr(node, 'lineno', 0)}: {what}" for node, what in found]

    def broken_in(self, path: Path) -> list[str]:
        return [f"{name(path)}, {fault}" for fault in self.broken_by(path.read_text(encoding="utf-8"))]

    def is_excepted(self, path: Path) -> bool:
        return any(path.is_relative_to(ROOT / where) for where in self.exceptions)


# -- no received bytes become code ---------------------------------------------------------------------

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    *("allow_pickle", "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object"),
    *("gather_object", "scatter_object_list", "send_object_list", "recv_object_list"),
}
"""Of numpy, pyzmq and torch.distributed: each unpickles."""


def runs_code(tree: ast.Module) -> Faults:
    for node in ast.walk(tree):
        imported: list[str] = []
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                imported = [module or "", *(f"{module}.{alias.name}" for alias in names)]
            case ast.Call(func=ast.Name(id=function)) if function in CALLS:
                yield node, f"calls {function}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="builtins"), attr=function)) if (
                function in CALLS
            ):
                yield node, f"calls builtins.{function}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as attr):
                yield node, f"torch.{attr} pickles"
            case ast.Attribute(attr=attr) if attr in METHODS:
                yield node, f"{attr} pickles"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield node, "allow_pickle"
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(found)), *_]
            ):
                imported = [found]
        for each in imported:
            if MODULES & set(each.split(".")):
                yield node, f"imports {each}"


NO_CODE = Rule(
    instead="received bytes must not become code; kvplug.net.wire encodes values",
    files=lambda: (
        [path for folder in ("kvplug", "plugins", "benchmarks") for path in python_in(folder)]
        + python_in("docs/examples")
    ),
    may=r"pickle|marshal|shelve|dill|joblib|pyobj|_object|torch\.(load|save)|builtins\."
    r"|(?<![.\w])(eval|exec|compile|__import__)\(",
    faults=runs_code,
)

# -- texts of peers ------------------------------------------------------------------------------------

LOGS = {"debug", "info", "warning", "error", "exception", "log"}
ENDS = {"fail", "_fail", "_fail_pipe", "_lost", "_peer_gone", "_evict", "evict", "lose_peer"}
"""Methods that keep a reason for a later error."""


def becomes_a_message(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether this expression ends in a message, and not by way of ``peer_text``."""
    while (around := parents.get(node)) is not None:
        match around:
            case ast.Call() if called(around) == "peer_text":
                return False
            case ast.Call() if node is not around.func:
                return called(around).endswith("Error") or called(around) in LOGS | ENDS
            case ast.FormattedValue() | ast.Raise():
                return True
            case ast.Call() | ast.Attribute() | ast.Subscript() | ast.JoinedStr() | ast.Tuple() | ast.IfExp():
                node = around
            case _:
                return False
    return False


def shows_texts_of_peers(tree: ast.Module) -> Faults:
    """A text of a peer is recognised by how it is read: a pattern has it (``case {"failed": str(why)}``), or
    it is decoded from bytes with replacements. Passed on, to a dial for example, it is not a message."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        match node:
            case ast.match_case():
                texts = {each for part in ast.walk(node.pattern) for each in captured(part)}
                for part in (each for statement in node.body for each in ast.walk(statement)):
                    if isinstance(part, ast.Name) and part.id in texts and becomes_a_message(part, parents):
                        yield part, part.id
            case ast.Call(func=ast.Attribute(attr="decode"), args=[_, ast.Constant(value="replace")]):
                around = parents[node]
                if not (isinstance(around, ast.Call) and called(around) == "peer_text"):
                    yield node, "bytes are decoded with replacements"


def captured(pattern: ast.AST) -> Iterator[str]:
    match pattern:
        case ast.MatchClass(cls=ast.Name(id="str"), patterns=[ast.MatchAs(name=str(text))]):
            yield text


OF_PEERS = ("cpu", "shm", "pynccl", "cuda-ipc", "host", "fs", "lookup")
PEER_TEXT = Rule(
    instead="use peer_text",
    files=lambda: sources("kvplug", *(f"plugins/kvplug-{each}" for each in OF_PEERS)),
    may=r"\bcase\b|\.decode\(",
    faults=shows_texts_of_peers,
    exceptions={
        "plugins/kvplug-pynccl/kvplug_pynccl/nccl/library.py": "NCCL's own texts",
        "plugins/kvplug-cuda-ipc/kvplug_cuda_ipc/cudart/library.py": "CUDA's own texts",
    },
)


# -- threads and locks -----------------------------------------------------------------------------------


def packages() -> list[Path]:
    return sources("kvplug", *map(name, ROOT.glob("plugins/*/kvplug_*")), "docs/examples")


def starts_threads(tree: ast.Module) -> Faults:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in (
            *("Thread", "Timer", "start_new_thread", "start_joinable_thread"),
        ):
            yield node, "another thread than a BackgroundThread"


def enters_conditions(tree: ast.Module) -> Faults:
    conditions = {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("threading.Condition(")
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    for node in ast.walk(tree):
        for item in node.items if isinstance(node, ast.With) else ():
            if isinstance(item.context_expr, ast.Attribute) and item.context_expr.attr in conditions:
                yield node, item.context_expr.attr


THREADS = Rule(
    instead="Python stops such a thread anywhere when the program leaves, and within C++ it aborts the"
    " process; make a kvplug.transport.BackgroundThread",
    files=packages,
    may=r"Thread\(|Timer\(|start_\w+_thread",
    faults=starts_threads,
    exceptions={
        "plugins/kvplug-mooncake/kvplug_mooncake/client.py": "a program's, which leaves by os._exit",
        f"{KIT}/contract": "a test's, in a process that pytest or a test ends",
        "plugins/kvplug-bench/kvplug_bench/processes.py": "waits for a parent, in a process that is ended",
        f"{KIT}/peers.py": "waits for a parent, in a child that has no other end",
        f"{KIT}/waits.py": "a test's, which reports what does not end",
    },
)
LOCKS = Rule(
    instead="the __enter__ of a Condition is Python code, and Ctrl-C inside of it leaves the lock taken; make"
    " the lock first, and take that",
    files=lambda: [path for path in packages() if not path.is_relative_to(ROOT / KIT)],
    may=r"threading\.Condition\(",
    faults=enters_conditions,
)


RULES = {"no code in data": NO_CODE, "texts of peers": PEER_TEXT, "threads": THREADS, "locks": LOCKS}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_sources_keep_a_rule(rule: Rule) -> None:
    files = rule.files()
    assert len(files) > 10
    found = [fault for path in files if not rule.is_excepted(path) for fault in rule.broken_in(path)]
    assert not found, f"{rule.instead}:\n" + "\n".join(found)
