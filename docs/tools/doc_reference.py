"""Write the pages of docs/reference/api from the doors' names and docstrings.

Usage: python docs/tools/doc_reference.py. A test fails if they differ.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import operator
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import doc_strings as source

FOLDER: Final = Path(__file__).parents[1] / "reference" / "api"
HEAD: Final = "<!-- Written by docs/tools/doc_reference.py from the docstrings: edit those. -->"

HOOKS: Final = {
    "DuplexEndpoint": ("_join", "_addresses", "_listener", "_connect", "_dial"),
    "Pipe": ("_send_tensor", "_receive_tensor", "_send_blocks", "_receive_blocks", "_close", "_abort"),
    "Store": ("_lookup", "_put", "_get", "_remove", "_close", "_abort"),
    "MessageQueue": ("_taken", "_is_in_use", "_after_fork_in_child", "_deadline", "_wait"),
    "DuplexPipe": (
        *("_deadline", "_drain", "_release", "_join_threads"),
        *("_on_peer_gone", "_on_failure", "_release_in_child", "_peer_gone", "_fail"),
    ),
    "DeviceCommunicator": (
        *("_all_reduce", "_all_gather", "_reduce_scatter", "_broadcast", "_exchange", "_destroy"),
        *("_compare", "_give_up", "_synchronize", "_suspend", "_resume"),
    ),
}
"""Methods that only a subclass implements or calls, by their class."""


@attrs.frozen
class Section:
    """Names that belong together."""

    title: str
    homes: tuple[str, ...]
    """Modules whose names stand here, with those below them; or names."""
    text: str = ""


@attrs.frozen
class Page:
    """One page: names of one door."""

    file: str
    title: str
    door: str
    audience: str
    """For whom it is, in the table of the page about Python."""
    intro: str
    sections: tuple[Section, ...]


def _pages() -> tuple[Page, ...]:
    read = tomllib.loads(Path(__file__).with_name("doc_pages.toml").read_text(encoding="utf-8"))
    return tuple(
        Page(**page, sections=tuple(Section(**{**each, "homes": tuple(each["homes"])}) for each in sections))
        for page in read["page"]
        for sections in [page.pop("section")]
    )


PAGES: Final = _pages()


@attrs.frozen
class Name:
    """One public name."""

    door: str
    name: str
    home: str
    """The module that defines it, as the door's stub says."""

    @property
    def found(self) -> Any:
        found: Any = operator.attrgetter(self.name)(importlib.import_module(self.door))
        return found

    @property
    def is_error(self) -> bool:
        return inspect.isclass(self.found) and issubclass(self.found, BaseException)

    @property
    def text(self) -> str:
        """Its docstring, or what stands below it in the source."""
        found = inspect.unwrap(self.found)
        if inspect.isclass(found) or inspect.isfunction(found):
            return source.doc_of(found)
        return source.text_below(self.home, self.name)


def names_of(door: str) -> list[Name]:
    """In the order of the stub; a module without one in the order of its ``__all__``. Public classes
    that stand in a class follow it, or follow the base that has them, if that is a name too."""
    module = importlib.import_module(door)
    homes = module._door.homes() if hasattr(module, "_door") else dict.fromkeys(module.__all__, door)
    things = {name: getattr(module, name) for name in homes}
    described = {id(thing) for thing in things.values()}
    classes = {thing.__qualname__ for thing in things.values() if inspect.isclass(thing)}
    found = []
    for name, home in homes.items():
        found.append(Name(door, name, home))
        for inner, value in inner_classes(things[name]):
            around = value.__qualname__.rpartition(".")[0]
            is_of_base = around != things[name].__qualname__ and around in classes
            if id(value) not in described and not is_of_base:
                described.add(id(value))
                found.append(Name(door, f"{name}.{inner}", home))
    return found


def inner_classes(found: Any) -> list[tuple[str, type]]:
    """The public classes of kvplug that stand in a class, or in one of its bases."""
    if not inspect.isclass(found) or not found.__module__.startswith("kvplug"):
        return []
    places = {cls.__qualname__ for cls in found.__mro__}
    return [
        (name, value)
        for name, value in inspect.getmembers_static(found, inspect.isclass)
        if value.__qualname__.rpartition(".")[0] in places and not name.startswith("_")
    ]


def is_within(home: str, room: str) -> bool:
    return home == room or home.startswith(f"{room}.")


def placed(pages: Sequence[Page] = PAGES) -> dict[str, dict[str, list[Name]]]:
    """The names of each page by section.

    Raises:
        LookupError: a name has no section, or several; says which.
    """
    found: dict[str, dict[str, list[Name]]] = {
        page.file: {section.title: [] for section in page.sections} for page in pages
    }
    for door in dict.fromkeys(page.door for page in pages):
        for name in names_of(door):
            fits = [
                (page, section)
                for page in pages
                for section in page.sections
                if page.door == door and any(_takes(room, name) for room in section.homes)
            ]
            exact = [(page, section) for page, section in fits if name.name in section.homes] or fits
            if len(exact) != 1:
                where = ", ".join(f"{page.file} ({section.title})" for page, section in exact) or "no page"
                raise LookupError(
                    f"{door}.{name.name}, from {name.home}, is on {where}: give its module, or its name, one"
                    " section in docs/tools/doc_pages.toml"
                )
            page, section = exact[0]
            found[page.file][section.title].append(name)
    return found


def _takes(room: str, name: Name) -> bool:
    return room == name.name or is_within(name.home, room)


# -- links -------------------------------------------------------------------------------------------


@attrs.frozen
class Links:
    """Where each public name is described."""

    places: dict[str, tuple[str, str]]
    """File and anchor by name; errors are rows of a table."""

    @classmethod
    def to(cls, every: dict[str, dict[str, list[Name]]]) -> Links:
        places: dict[str, tuple[str, str]] = {}
        for file, sections in every.items():
            ordered: list[str | Name] = []
            for title, names in sections.items():
                ordered += [title, *(name for name in names if not name.is_error)]
            anchors = _anchors(ordered)
            for title, names in sections.items():
                for name in names:
                    places.setdefault(name.name, (file, anchors.get(name.name) or anchors[title]))
        return cls(places)

    def seen_from(self, file: str) -> source.Link:
        def link(target: str) -> str | None:
            inner = ".".join(target.split(".")[-2:])
            for part in (inner, *reversed(target.split("."))):
                if part in self.places:
                    there, anchor = self.places[part]
                    return f"#{anchor}" if there == file else f"{there}#{anchor}"
            return None

        return link


def _anchors(ordered: Iterable[str | Name]) -> dict[str, str]:
    """By title of a section, and by name. A section comes before the names that it has."""
    seen: dict[str, int] = {}
    found = {}
    for heading in ordered:
        text = heading.name if isinstance(heading, Name) else heading
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found[text] = f"{slug}-{count}" if count else slug
    return found


# -- pages -------------------------------------------------------------------------------------------


def page_text(page: Page, sections: dict[str, list[Name]], links: Links) -> str:
    link = links.seen_from(page.file)
    imported = f"Import these names with `from {page.door} import ...`."
    out = [HEAD, "", f"# {page.title}", "", _filled(f"{page.intro} {imported}"), ""]
    for section in page.sections:
        out += _index(section, sections[section.title], link)
    for section in page.sections:
        names = sections[section.title]
        out += [f"## {section.title}", ""]
        out += [_filled(section.text), ""] if section.text else []
        errors = [name for name in names if name.is_error]
        out += _errors(errors, link) if errors else []
        for name in names:
            out += [] if name.is_error else _described(name, link)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _index(section: Section, names: list[Name], link: source.Link) -> list[str]:
    """A row for each name, with the first sentence of what is said of it."""
    rows = [
        f"| [`{name.name}`]({link(name.name)}) | {source.in_table(source.first_sentence(name.text), link)} |"
        for name in names
        if not name.is_error
    ]
    return ["| " + section.title + " | |", "| --- | --- |", *rows, ""] if rows else []


def _errors(errors: list[Name], link: source.Link) -> list[str]:
    out = ["| error | is also | meaning |", "| --- | --- | --- |"]
    for error in errors:
        also = [f"`{base.__name__}`" for base in error.found.__mro__[1:] if base not in _NOT_TOLD]
        text = source.in_table(error.text, link)
        for field in source.fields_of(error.found):
            text += f" `{field.name}`: {source.in_table(field.text, link)}"
        out.append(f"| `{error.name}` | {', '.join(also)} | {text} |".replace("|  |", "| |"))
    return [*out, ""]


_NOT_TOLD = (Exception, BaseException, object)


def _described(name: Name, link: source.Link) -> list[str]:
    found = name.found
    out = [f"### {name.name}", ""]
    if inspect.isfunction(inspect.unwrap(found)):
        return [*out, *_code(source.signature(_function(found))), source.markdown(name.text, link), ""]
    if inspect.isclass(found):
        return [*out, *_class(name, link)]
    return [*out, source.markdown(name.text, link), ""]


def _function(function: Any) -> source.Function:
    node = source.node_of(inspect.unwrap(function))
    assert isinstance(node, source.Function)
    return node


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _class(name: Name, link: source.Link) -> list[str]:
    cls = name.found
    kind = _kind(cls)
    bases = [base.__name__ for base in cls.__bases__ if link(base.__name__)]
    told = [f"[`{base}`]({link(base)})" for base in bases]
    out = [f"{kind}{', a ' if told else ''}{', '.join(told)}.", ""] if kind or told else []
    init = constructor_of(cls)
    if init is not None:
        made = textwrap.indent(source.signature(_function(init)), "    ")
        out += _code(f"class {cls.__name__}:\n{made}")
    out += [source.markdown(name.text, link), ""]
    out += [] if init is None else [source.markdown(source.doc_of(init), link), ""]
    fields = source.fields_of(cls)
    if fields:
        out += _fields(fields, enum_=issubclass(cls, enum.Enum), link=link)
    for method, value in members_of(name):
        out += _method(method, value, link)
    return out


def constructor_of(cls: type) -> Any:
    """Its ``__init__``, where the source has one that users call: not that of a value or an interface."""
    init: Any = cls.__init__  # type: ignore[misc]
    ours = inspect.isfunction(init) and init.__module__.startswith("kvplug")
    return None if attrs.has(cls) or issubclass(cls, (enum.Enum, tuple)) or not ours else init


def _kind(cls: type) -> str:
    if issubclass(cls, enum.Enum):
        return "An enum"
    if issubclass(cls, tuple):
        return "A named tuple"
    if attrs.has(cls):
        keywords = all(field.kw_only for field in attrs.fields(cls) if field.init)
        frozen = cls.__setattr__ is not object.__setattr__
        how = "keyword arguments" if keywords else "its fields, in their order"
        return f"{'A frozen value' if frozen else 'A value'}, made with {how}"
    return "An abstract class" if inspect.isabstract(cls) else "A class"


def _fields(fields: list[source.Field], *, enum_: bool, link: source.Link) -> list[str]:
    if enum_:
        out = ["| member | value | meaning |", "| --- | --- | --- |"]
        rows = [
            f"| `{each.name}` | `{each.default}` | {source.in_table(each.text, link)} |" for each in fields
        ]
        return [*out, *rows, ""]
    out = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for each in fields:
        type_, default = (
            f"`{text}`".replace("|", "\\|") if text else "" for text in (each.type, each.default)
        )
        out.append(f"| `{each.name}` | {type_} | {default} | {source.in_table(each.text, link)} |")
    return [*(row.replace("|  |", "| |").replace("|  |", "| |") for row in out), ""]


def members_of(name: Name) -> list[tuple[str, Any]]:
    """Its public methods and properties with a text, and the hooks of its subclasses; those of bases that
    are not public themselves, too.
    """
    found: dict[str, Any] = {}
    public = _public()
    for cls in reversed(name.found.__mro__):
        own = cls is name.found
        if own or (cls.__module__.startswith("kvplug") and id(cls) not in public):
            found |= source.methods_of(cls)
    hooks = HOOKS.get(name.name, ())
    inherited = [cls for cls in name.found.__mro__[1:] if id(cls) in public]
    return [
        (method, value)
        for method, value in found.items()
        if (not method.startswith("_") or method in hooks)
        and (_text(value) or not any(hasattr(cls, method) for cls in inherited))
    ]


@functools.cache
def _public() -> frozenset[int]:
    """The ids of all that has a place of its own in the reference."""
    return frozenset(id(each.found) for page in PAGES for each in names_of(page.door))


def _text(value: Any) -> str:
    return source.doc_of(value)


def lacking() -> list[str]:
    """What a public name does not say of itself: the name, a field, a method."""
    found = []
    for names in [names for page in placed().values() for names in page.values()]:
        for name in names:
            called = f"{name.door}.{name.name}"
            found += [] if name.text else [called]
            if inspect.isclass(name.found):
                found += [
                    f"{called}.{field.name}" for field in source.fields_of(name.found) if not field.text
                ]
                found += [f"{called}.{method}" for method, value in members_of(name) if not _text(value)]
    return found


def _method(method: str, value: Any, link: source.Link) -> list[str]:
    node = _function(source.function_of(value))
    lines = source.signature(node)
    if not inspect.isfunction(value):
        word = {classmethod: "classmethod", staticmethod: "staticmethod"}.get(type(value), "property")
        lines = f"@{word}\n{lines}"
    return [*_code(lines), source.markdown(_text(value), link), ""]


def written() -> dict[Path, str]:
    """Every page, as it must be.

    Raises:
        LookupError: as ``placed``.
    """
    every = placed()
    links = Links.to(every)
    return {FOLDER / page.file: page_text(page, every[page.file], links) for page in PAGES}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the names of this tree, whatever is installed
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
