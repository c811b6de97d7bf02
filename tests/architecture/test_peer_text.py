"""Text that comes from a peer passes ``peer_text`` before it becomes a part of a message or a log.

A text of a peer is recognised by how it is read: it is captured by a pattern (``case {"failed": str(why)}``),
or decoded from bytes with replacements. Text that is passed on, to a dial for example, is no message.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ("cpu", "shm", "pynccl", "cuda-ipc", "host", "fs", "lookup")
NO_PEERS = {
    "plugins/kvplug-pynccl/kvplug_pynccl/nccl/library.py": "NCCL's own texts",
    "plugins/kvplug-cuda-ipc/kvplug_cuda_ipc/cudart/library.py": "CUDA's own texts",
    "kvplug/net/trust/identity.py": "cut to bytes after peer_text",
}
SAFE = "peer_text"
LOGS = {"debug", "info", "warning", "error", "exception", "log"}
ENDS = {"fail", "_fail", "_fail_pipe", "_lost", "_peer_gone", "_evict", "evict", "lose_peer"}
"""Methods that keep a reason for a later error."""


def parents_of(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def becomes_a_message(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this expression ends in a message, and not by way of ``peer_text``."""
    while (around := parents.get(node)) is not None:
        match around:
            case ast.Call() if called(around) == SAFE:
                return False
            case ast.Call() if node is not around.func:
                name = called(around)
                return name.endswith("Error") or name in LOGS | ENDS
            case ast.FormattedValue() | ast.Raise():
                return True
            case ast.Call() | ast.Attribute() | ast.Subscript() | ast.JoinedStr() | ast.Tuple() | ast.IfExp():
                node = around
            case _:
                return False
    return False


def captured(case: ast.match_case) -> set[str]:
    """The names that the patterns of a case give to texts."""
    found = set()
    for node in ast.walk(case.pattern):
        match node:
            case ast.MatchClass(cls=ast.Name(id="str"), patterns=[ast.MatchAs(name=str(name))]):
                found.add(name)
    return found


def is_decoded(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="decode"), args=[_, ast.Constant(value="replace")]):
            return True
    return False


def faults(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    parents = parents_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.match_case):
            names = captured(node)
            for part in (each for statement in node.body for each in ast.walk(statement)):
                if isinstance(part, ast.Name) and part.id in names and becomes_a_message(part, parents):
                    yield f"line {part.lineno}: {part.id}"
        elif is_decoded(node):
            around = parents[node]
            if not (isinstance(around, ast.Call) and called(around) == SAFE):
                yield f"line {getattr(node, 'lineno', 0)}: bytes are decoded with replacements"


def modules() -> list[Path]:
    trees = [ROOT / "kvplug", *(ROOT / f"plugins/kvplug-{name}" for name in PLUGINS)]
    found = (path for tree in trees for path in sorted(tree.rglob("*.py")))
    return [path for path in found if "tests" not in path.parts and ".jinja" not in path.name]


def test_no_text_of_a_peer_goes_into_a_message_as_it_came() -> None:
    found = {str(path.relative_to(ROOT)): path for path in modules()}
    assert len(found) > 100 and not NO_PEERS.keys() - found.keys()
    bad = [
        f"{name}, {fault}: use peer_text"
        for name, path in found.items()
        if name not in NO_PEERS
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "\n".join(bad)


CASE = "match value:\n    case {'failed': str(why)}:\n        "


@pytest.mark.parametrize(
    "source",
    [
        CASE + "raise TransportError(why)",
        CASE + "raise TransportError(f'it failed: {why}')",
        CASE + "raise TransportError(f'it failed: {why[:100]}')",
        CASE + "error = PeerGoneError, f'rank 1: {why.strip()}'",
        CASE + "self._inbox.fail(ConfigError, why)",
        CASE + "logger.warning('it failed: %s', why)",
        "text = reason.decode('utf-8', 'replace')",
    ],
)
def test_the_check_sees_each_way(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    [
        CASE + "raise TransportError(peer_text(why))",
        CASE + "raise TransportError(f'it failed: {peer_text(why[:9])}')",
        CASE + "return endpoint.connect(why, deadline)",
        CASE + "return {'contact': why}",
        "text = peer_text(reason.decode('utf-8', 'replace'))",
    ],
)
def test_the_check_lets_texts_pass_that_are_no_message(source: str) -> None:
    assert not list(faults(source))
