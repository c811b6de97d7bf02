"""Names without a user: what a door shows and nobody outside the core imports, and what no code but tests
uses.

``python tests/api/unused_names.py`` prints both lists. A test fails for what is not in :data:`ALLOWED`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOORS: Final = ("kvplug/__init__.pyi", "kvplug/engine/__init__.pyi", "kvplug/transport/__init__.pyi")
USERS: Final = (
    "README.md",
    "plugins/*/README.md",
    "plugins/*/kvplug_*/**/*.py",
    "docs/*/*.md",
    "docs/examples/*/kvplug_*/**/*.py",
    "kvplug/cli/templates/**/*.jinja",
)
"""Who a name of a door may be there for: plugins, the kit among them, pages, examples, and new plugins."""
SOURCES: Final = (
    "kvplug/**/*.py",
    "kvplug/**/*.pyi",
    "kvplug/**/*.jinja",
    "plugins/*/kvplug_*/**/*.py",
    "plugins/*/pyproject.toml",
    "pyproject.toml",
    "benchmarks/**/*.py",
    "docs/examples/*/kvplug_*/**/*.py",
    "docs/tools/*.py",
    ".ci/*.py",
    "tests/lab/kvplug_lab/**/*.py",
)
"""Where a use counts. Tests are no users, and neither are pages generated from the names."""
ALLOWED: Final = {
    "kvplug.cli.main.Program.list_commands": "click calls it",
    "kvplug.cli.main.Program.get_command": "click calls it",
    "kvplug.cli.main.Program.format_commands": "click calls it",
    "kvplug.config.config.Role._missing_": "enum calls it",
    "kvplug.transport.group.store.Store.num_entries": "tests count the entries that a group leaves behind",
    "kvplug.net.log.FIELDS": "docs/reference/logs.md states them; a test compares them",
    "kvplug.net.wire.validate.Limits.memory_bound": "docs/reference/wire.md states it; a test measures it",
}
"""Names that stay without such a user, with the reason."""


def _files(patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if "reference/api" not in path.as_posix():
                yield path


def without_user_outside() -> list[str]:
    """Names of doors that no plugin, page, example or template imports, or has as code."""
    words = {word for path in _files(USERS) for word in _had(path.read_text(encoding="utf-8"))}
    shown = [
        (stub.removesuffix("/__init__.pyi").replace("/", "."), name)
        for stub in DOORS
        for name in re.findall(r"(\w+) as \1,", (ROOT / stub).read_text(encoding="utf-8"))
    ]
    return [f"{door}.{name}" for door, name in shown if name not in words]


def _had(text: str) -> Iterator[str]:
    """Names in imports, attributes of doors, and code in a sentence of a page."""
    for names in re.findall(r"from kvplug[\w.]* import (\([^)]*\)|[^(\n]*)", text):
        yield from re.findall(r"\w+", names)
    yield from re.findall(r"\bkvplug(?:\.transport|\.engine)?\.(\w+)", text)
    yield from re.findall(r"`(\w+)(?=[`(.])", text)


def unused() -> list[str]:
    """Functions, classes, methods, fields and constants of the core that stand where they are defined
    only."""
    uses, definitions = _uses(), _definitions()
    found = []
    for path in _files(["kvplug/**/*.py"]):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            f"{module}.{name}"
            for name in _defined(tree)
            if uses[last := name.rpartition(".")[2]] <= max(1, definitions[last])
        ]
    return found


def _defined(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[str]:
    # Members of an enumeration are values: of the wire, of configs, of counters.
    is_enum = isinstance(tree, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in tree.bases)
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
                if not name.startswith("__"):
                    yield within + name
                if isinstance(node, ast.ClassDef):
                    yield from _defined(node, f"{within}{name}.")
            case ast.FunctionDef(name=name, decorator_list=[*decorators]):
                # What another decorator registers, such as a command, is called by what it is registered
                # with.
                if not name.startswith("__") and all(ast.unparse(each) in _PLAIN for each in decorators):
                    yield within + name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                if not name.startswith("__") and not is_enum:
                    yield within + name


_PLAIN: Final = (
    "property",
    "staticmethod",
    "classmethod",
    "abc.abstractmethod",
    "cached_property",
    "functools.cache",
)


@cache
def _definitions() -> Counter[str]:
    """How often each function and class is defined, in any code: also where a plugin implements a method."""
    return Counter(name for code in _code() for name in re.findall(r"^ *(?:def|class) (\w+)", code, re.M))


@cache
def _uses() -> Counter[str]:
    """How often each word stands in code, or in a string that is no docstring."""
    return Counter(word for code in _code() for word in re.findall(r"\w+", code))


@cache
def _code() -> tuple[str, ...]:
    """Every file without its docstrings and comments."""
    texts = (path.read_text(encoding="utf-8") for path in _files(SOURCES))
    return tuple(re.sub(r'^ *r?"""(?:.|\n)*?"""$|# .*$', "", text, flags=re.M) for text in texts)


def main() -> int:
    for name in (*without_user_outside(), *unused()):
        print(name, ALLOWED.get(name, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
