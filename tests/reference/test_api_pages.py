"""The reference of Python: every public name of every door, what its fields mean, and what it raises."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import doc_reference
import doc_strings
from doc_reference import FOLDER, PAGES, Name

import kvplug
import kvplug.engine
import kvplug.errors
import kvplug.transport
from kvplug.errors import KvplugError

ROOT = Path(__file__).parents[2]
DOORS = (kvplug, kvplug.transport, kvplug.engine)
"""The kit's names are on the page about testing; tests/reference/test_testing_pages.py says so."""
ERRORS = {
    name: each
    for name, each in vars(kvplug.errors).items()
    if inspect.isclass(each) and issubclass(each, KvplugError)
}


@cache
def names() -> tuple[Name, ...]:
    return tuple(
        name for page in doc_reference.placed().values() for names in page.values() for name in names
    )


def test_every_public_name_is_on_a_page() -> None:
    public = {(door.__name__, name) for door in DOORS for name in door.__all__}
    assert public <= {(name.door, name.name) for name in names()}
    for name in names():
        described = "".join(page.read_text(encoding="utf-8") for page in pages_of(name))
        assert f"\n### {name.name}\n" in described or f"\n| `{name.name}` |" in described, name


def pages_of(name: Name) -> list[Path]:
    return [FOLDER / page.file for page in PAGES if page.door == name.door]


def test_the_pages_are_those_of_the_docstrings() -> None:
    written = doc_reference.written()
    stale = [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python docs/tools/doc_reference.py"
    assert {*FOLDER.glob("*.md")} == {*written}


def test_every_name_field_and_method_has_a_text() -> None:
    assert not doc_reference.lacking()


def test_every_page_is_listed_with_its_audience() -> None:
    listed = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    rows = [f"| [{page.title}](api/{page.file}) | `{page.door}` | {page.audience} |" for page in PAGES]
    assert not [row for row in rows if row not in listed], "docs/reference/python.md lacks:\n" + "\n".join(
        rows
    )


# -- errors ------------------------------------------------------------------------------------------


def functions() -> list[tuple[str, Any, str]]:
    """Public functions and methods: name, function, and what is said of them, also by interfaces."""
    found = []
    for name in names():
        thing = name.found
        if inspect.isfunction(inspect.unwrap(thing)):
            found.append((name.name, thing, name.text))
        elif inspect.isclass(thing) and not name.is_error:
            of_class = " ".join(doc_strings.doc_of(cls) for cls in thing.__mro__[:-1])
            of_fields = " ".join(field.text for field in doc_strings.fields_of(thing))
            for method, value in every_method(thing).items():
                said = [doc_strings.doc_of(vars(cls).get(method)) for cls in thing.__mro__[:-1]]
                made = method in ("__init__", "__attrs_post_init__")
                text = " ".join([of_class if made else "", *said, of_fields if made else ""])
                found.append((f"{name.name}.{method}", doc_strings.function_of(value), text))
    return found


def every_method(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("kvplug"):
            found |= doc_strings.methods_of(each)
    made = ("__init__", "__attrs_post_init__")
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") or (name in made and not generated(value))
    }


def generated(function: Any) -> bool:
    return bool(function.__code__.co_filename.startswith("<attrs"))


def test_what_a_public_function_raises_itself_is_said() -> None:
    """By its docstring or an interface's, for constructors by the class's: that error, or one that it is."""
    silent = []
    for name, function, text in functions():
        for raised in doc_strings.raises_of(doc_strings.node_of(inspect.unwrap(function))) & {*ERRORS}:
            as_what = [cls.__name__ for cls in ERRORS[raised].__mro__ if cls.__name__ in ERRORS]
            if not re.search(rf"\b({'|'.join(as_what)})\b", text):
                silent.append(f"{name}: {raised}")
    assert not silent
