"""What the source says of a public name: signatures, the text of each field, docstrings as Markdown.

Signatures and defaults are shown as they are written, so annotations need no import of torch.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

WIDTH: Final = 100
"""A signature that is longer has a line for each parameter."""
HELP: Final = "kvplug.help"
"""Where ``option(help=...)`` puts the text of a field."""

Link = Callable[[str], str | None]
"""The address of a public name, ``Pipe`` or ``kvplug.transport.Pipe``; ``None``: it has none."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- the source --------------------------------------------------------------------------------------


@functools.cache
def tree_of(module: str) -> ast.Module:
    file = sys.modules[module].__file__
    return ast.parse(Path(str(file)).read_text(encoding="utf-8"))


def statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Of a module or a class, also those below an ``if``."""
    for each in body:
        if isinstance(each, ast.If):
            yield from statements([*each.body, *each.orelse])
        else:
            yield each


def node_of(thing: Any) -> ast.stmt:
    """The definition of a class or function, or of a method."""
    body: Iterable[ast.stmt] = tree_of(thing.__module__).body
    found: ast.stmt | None = None
    for name in thing.__qualname__.split("."):
        found = next(each for each in statements(body) if getattr(each, "name", "") == name)
        body = getattr(found, "body", ())
    assert found is not None
    return found


def texts_below(body: Iterable[ast.stmt], *, of_self: bool = False) -> dict[str, tuple[ast.stmt, str]]:
    """Each assignment of a module or a class: where it stands, and the text below it."""
    found: dict[str, tuple[ast.stmt, str]] = {}
    every = list(statements(body))
    for each, after in zip(every, [*every[1:], None], strict=True):
        targets = (
            each.targets
            if isinstance(each, ast.Assign)
            else [each.target]
            if isinstance(each, ast.AnnAssign)
            else []
        )
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = inspect.cleandoc(after.value.value) if isinstance(after.value.value, str) else ""
        for target in targets:
            if of_self and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found[target.attr] = (each, text) if text else found.get(target.attr, (each, ""))
            elif not of_self and isinstance(target, ast.Name):
                found[target.id] = (each, text)
    return found


def text_below(module: str, name: str) -> str:
    """What stands below the assignment of a name, in the module that has it or from which it is imported."""
    importlib.import_module(module)
    below = texts_below(tree_of(module).body)
    if name in below:
        return below[name][1]
    for node in statements(tree_of(module).body):
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return text_below(str(node.module), name)
    return ""


# -- fields ------------------------------------------------------------------------------------------


@attrs.frozen
class Field:
    """One field of a value, or one attribute of another class."""

    name: str
    type: str
    default: str
    """As it is written; empty where there is none."""
    text: str
    """Its meaning, as reStructuredText; empty where the source says nothing."""


def fields_of(cls: type) -> list[Field]:
    """The public fields of an attrs class, the members of an enum, or the annotated attributes of another."""
    below: dict[str, tuple[ast.stmt, str]] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.partition(".")[0].startswith("kvplug"):
            body = getattr(node_of(each), "body", ())
            for name, (node, text) in texts_below(body).items():
                below[name] = (node, text or (below[name][1] if name in below else ""))
    if attrs.has(cls):
        every = [each for each in attrs.fields(cls) if each.init or not each.name.startswith("_")]
        return [_attrs_field(each, *below.get(each.name, (None, ""))) for each in every]
    if issubclass(cls, enum.Enum):
        return [
            Field(name, "", repr(member.value), below[name][1]) for name, member in cls.__members__.items()
        ]
    declared = [
        Field(name, ast.unparse(node.annotation), _value(node), text)
        for name, (node, text) in below.items()
        if isinstance(node, ast.AnnAssign) and not name.startswith("_")
    ]
    known = {each.name for each in declared} | {"args"}
    return declared + [each for each in _set_by_constructor(cls) if each.name not in known]


def _set_by_constructor(cls: type) -> list[Field]:
    """What ``__init__`` sets for all to read: ``self.name = ...``, with the text below it."""
    found: dict[str, Field] = {}
    for each in reversed(cls.__mro__):
        init: Any = vars(each).get("__init__")
        if not inspect.isfunction(init) or not init.__module__.startswith("kvplug") or attrs.has(each):
            continue
        node = node_of(init)
        assert isinstance(node, ast.FunctionDef)
        types = {given.arg: given.annotation for given in [*node.args.args, *node.args.kwonlyargs]}
        for name, (at, text) in texts_below(node.body, of_self=True).items():
            if name.startswith("_") or isinstance(getattr(cls, name, None), property):
                continue
            type_ = at.annotation if isinstance(at, ast.AnnAssign) else None
            if type_ is None and isinstance(value := getattr(at, "value", None), ast.Name):
                type_ = types.get(value.id)
            found[name] = Field(name, "" if type_ is None else ast.unparse(type_), "", text)
    return list(found.values())


def _value(node: ast.AnnAssign) -> str:
    return "" if node.value is None else ast.unparse(node.value)


def _attrs_field(field: attrs.Attribute[Any], node: ast.stmt | None, text: str) -> Field:
    written = node.annotation if isinstance(node, ast.AnnAssign) else None
    type_ = ast.unparse(written) if written is not None else str(field.type)
    return Field(
        field.alias or field.name, type_, _default(field, node), field.metadata.get(HELP, "") or text
    )


def _default(field: attrs.Attribute[Any], node: ast.stmt | None) -> str:
    value: Any = field.default
    if value is attrs.NOTHING:
        return ""
    plain = (type(None), bool, int, float, str, bytes, tuple)
    if isinstance(value, plain) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        made = getattr(value.factory, "__name__", "")
        return "computed" if value.takes_self or not made.isidentifier() else f"{made}()"
    written = getattr(node, "value", None)
    if isinstance(written, ast.Call):
        written = next((each.value for each in written.keywords if each.arg == "default"), None)
    return repr(value) if written is None else ast.unparse(written)


# -- signatures --------------------------------------------------------------------------------------


def signature(node: Function, *, name: str = "") -> str:
    """As in a stub, without decorators, ``self`` or ``cls``."""
    given = node.args
    owned = [*given.posonlyargs, *given.args][:1]
    drop = bool(owned) and owned[0].arg in ("self", "cls")
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    parts = [_parameter(each, default) for each, default in zip(positional, [*defaults, *given.defaults])]
    if given.posonlyargs:
        parts.insert(len(given.posonlyargs), "/")
    parts = parts[1:] if drop else parts
    parts = parts[1:] if parts[:1] == ["/"] else parts
    if given.vararg:
        parts.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults)]
    if given.kwarg:
        parts.append(f"**{_parameter(given.kwarg, None)}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    head = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {name or node.name}"
    line = f"{head}({', '.join(parts)}){returns}: ..."
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {part},\n" for part in parts)
    return f"{head}(\n{lines}){returns}: ..."


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    if parameter.annotation is None:
        return parameter.arg if default is None else f"{parameter.arg}={ast.unparse(default)}"
    typed = f"{parameter.arg}: {ast.unparse(parameter.annotation)}"
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


# -- reStructuredText as Markdown --------------------------------------------------------------------

_ROLE = re.compile(r":(?:py:)?(?:meth|class|func|attr|data|mod|exc|obj):`([^`]+)`")
_CODE = re.compile(r"``(.+?)``", re.S)
_SECTION = re.compile(r"^(Raises|Args|Returns|Yields):$")
_KEPT = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")


def inline(text: str, link: Link) -> str:
    """One paragraph: code, links to public names, and nothing that Markdown takes for something else."""

    def linked(found: re.Match[str]) -> str:
        target = found[1].removeprefix("~")
        shown = target.rpartition(".")[2] if found[1].startswith("~") else target
        shown = f"`{shown}`"
        address = link(target)
        return f"[{shown}]({address})" if address else shown

    text = _CODE.sub(lambda found: f"`{' '.join(found[1].split())}`", _ROLE.sub(linked, text))
    pieces, at = [], 0
    for kept in _KEPT.finditer(text):
        pieces += [_escaped(text[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*pieces, _escaped(text[at:])])


def _escaped(text: str) -> str:
    text = text.replace("<", "&lt;")
    return re.sub(r"(?<!\*)\*(?=\w+\b(?!\*))", r"\\*", text)


def in_table(text: str, link: Link) -> str:
    """The same as one cell of a table."""
    return inline(" ".join(text.split()), link).replace("|", "\\|")


def first_sentence(text: str) -> str:
    """Of a docstring, for tables of names."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    # Not after an abbreviation, within a name, or where a literal goes on.
    return re.split(r"(?<=[^.][\w`)\"”]\.) (?=[A-Z`\"])", paragraph)[0].removesuffix("::")


def markdown(text: str, link: Link) -> str:
    """A text of :func:`doc_of`: paragraphs, lists, examples, and its sections as lists."""
    lines = text.splitlines()
    out: list[str] = []
    at = 0
    while at < len(lines):
        section = _SECTION.match(lines[at])
        if section:
            end = _block_end(lines, at + 1)
            out += ["", f"{section[1]}:", "", *_items(lines[at + 1 : end], link), ""]
        elif lines[at].startswith(">>>"):
            end = next((n for n in range(at, len(lines)) if not lines[n].strip()), len(lines))
            out += ["", "```pycon", *lines[at:end], "```", ""]
        elif lines[at].endswith("::"):
            end = _block_end(lines, at + 1)
            code = textwrap.dedent("\n".join(lines[at + 1 : end])).strip("\n").splitlines()
            out += [inline(lines[at][:-1], link), "", f"```{_language(code)}", *code, "```", ""]
        else:
            # A paragraph, or an item of a list with the lines that belong to it: code may span lines.
            end = at + 1
            while end < len(lines) and _continues(lines[end]):
                end += 1
            if not lines[at].strip():
                out.append("")
                end = at + 1
            else:
                out += inline("\n".join(lines[at:end]), link).splitlines()
        at = end
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _continues(line: str) -> bool:
    starts = ("- ", ">>>")
    return (
        bool(line.strip()) and not line.startswith(starts) and not _SECTION.match(line) and line[-2:] != "::"
    )


def _block_end(lines: list[str], at: int) -> int:
    """The first line that is neither indented nor empty."""
    return next((n for n in range(at, len(lines)) if lines[n][:1].strip()), len(lines))


def _language(code: list[str]) -> str:
    try:
        ast.parse("\n".join(code))
    except SyntaxError:
        return "text"
    return "python"


def items(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The rows of a section: names, and what is said of them. One of both may be empty."""
    written = textwrap.dedent("\n".join(lines)).splitlines()
    rows: list[str] = []
    for line in written:
        if line[:1].strip() and not (rows and rows[-1].endswith(",")):
            rows.append(line)
        elif line.strip():
            rows[-1] += f" {line.strip()}"
    found = []
    for row in rows:
        named = re.match(r"((?:[\w.]*\w|``\w+``|\*+\w+)(?:, [\w.]*\w)*)(?:: (.+)|\.)?$", row, re.S)
        known = named and (named[2] or " " not in named[1] or ", " in named[1])
        found.append((named[1], named[2] or "") if named and known else ("", row))
    return found


def _items(lines: list[str], link: Link) -> list[str]:
    out = []
    for names, text in items(lines):
        code = ", ".join(f"`{name.strip('`')}`" for name in names.split(", ")) if names else ""
        said = inline(text, link)
        out.append(f"- {code}: {said}" if code and said else f"- {code or said}")
    return out


def doc_of(thing: Any) -> str:
    """Its own docstring: empty where attrs has written one, or where it is inherited."""
    text = thing.__doc__ or ""
    return "" if text.startswith("Method generated by attrs") else inspect.cleandoc(text)


def function_of(value: Any) -> Any:
    """The function of a method, a property, or a class or static method."""
    for part in ("fget", "func", "__func__"):
        if not inspect.isfunction(value):
            value = getattr(value, part, value)
    return value


def methods_of(cls: type) -> Mapping[str, Any]:
    """What a class defines itself: functions, also of properties and of class and static methods."""
    found = {}
    for name, value in vars(cls).items():
        function = function_of(value)
        if inspect.isfunction(function) and function.__module__ == cls.__module__:
            found[name] = value
    return found


def raises_of(node: ast.stmt) -> set[str]:
    """The names of what the body of a function raises itself, outside functions within it."""
    found = set()
    left: list[ast.AST] = list(getattr(node, "body", ()))
    while left:
        each = left.pop()
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(each, ast.Raise) and each.exc is not None:
            thrown = each.exc.func if isinstance(each.exc, ast.Call) else each.exc
            found.add(ast.unparse(thrown).rpartition(".")[2])
        left += ast.iter_child_nodes(each)
    return found
