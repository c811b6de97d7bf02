"""Pages that are followed step by step: what they show is whole, and what they name is there."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path

import doc_blocks
import pytest

import kvplug
import kvplug.engine
import kvplug.transport
from kvplug.metrics.prometheus import COUNTERS
from kvplug.net.log import LogEvent

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
TUTORIALS = {
    "write-a-transport.md": EXAMPLES / "kvplug-sample",
    "write-a-store.md": EXAMPLES / "kvplug-sqlite",
}
"""Each with the package that it builds."""
GENERATED = {
    "write-a-connector.md": ROOT / "plugins/kvplug-lookup/kvplug_lookup/simple",
    "../how-to/write-a-sink.md": EXAMPLES / "kvplug-jsonl",
}
"""Each with the modules that it shows, of a package that ``kvplug new`` writes."""
PAGES = [*(page for page in sorted(DOCS.rglob("*.md")) if EXAMPLES not in page.parents), ROOT / "README.md"]

TEST = re.compile(r"\btest_[a-z0-9_]+\b(?!\.py)")
DEFINED = re.compile(r"^\s*def (test_[a-z0-9_]+)\(", re.M)
NOT_YET = "not on the package index yet"


def tutorial(name: str) -> str:
    return (DOCS / "tutorials" / name).read_text(encoding="utf-8")


def shown(name: str) -> list[tuple[str, str]]:
    """The blocks of a tutorial that are parts of its example: file, text."""
    example = (TUTORIALS | GENERATED)[name]
    blocks = doc_blocks.blocks_of(DOCS / "tutorials" / name)
    ours = [block for block in blocks if example in block.file.parents]
    return [(str(block.file.relative_to(example)), block.text) for block in ours]


@pytest.mark.parametrize("name", TUTORIALS | GENERATED)
def test_what_a_tutorial_shows_in_its_order_is_its_example(name: str) -> None:
    written: defaultdict[str, str] = defaultdict(str)
    example = (TUTORIALS | GENERATED)[name]
    for file, text in shown(name):
        written[file] += text
    modules = {str(path.relative_to(example)) for path in example.rglob("*.py") if path.stat().st_size}
    assert written.keys() >= modules
    for file, text in written.items():
        assert text == (example / file).read_text(encoding="utf-8"), file


def kit_and_sample() -> set[str]:
    sources = [
        *(ROOT / "plugins/kvplug-testing/kvplug_testing/contract").rglob("*.py"),
        *EXAMPLES.rglob("test_*.py"),
    ]
    return {name for source in sources for name in DEFINED.findall(source.read_text(encoding="utf-8"))}


def test_every_test_that_a_page_names_is_there() -> None:
    """Whole, or after ``-k`` as a part of a name, or defined on the page itself."""
    known, missing = kit_and_sample(), {}
    assert known
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        chosen = {name for given in re.findall(r"-k (\"[^\"]*\"|\S+)", text) for name in TEST.findall(given)}
        parts = {name for name in chosen if any(name in each for each in known)}
        missing[page] = set(TEST.findall(text)) - known - parts - set(DEFINED.findall(text))
    assert not {page: names for page, names in missing.items() if names}


def test_python_on_a_page_parses_and_names_what_is_at_the_doors() -> None:
    missing = []
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            ast.parse(textwrap.dedent(block), str(page))  # a block may be a part of a class
            for door in (kvplug, kvplug.engine, kvplug.transport):
                names = re.findall(rf"(?<![\"\w]){re.escape(door.__name__)}\.([A-Za-z_]+)", block)
                rooms = Path(door.__file__).parent
                there = {name for name in names if name in door.__all__ or (rooms / name).exists()}
                missing += [f"{door.__name__}.{name} on {page.name}" for name in names if name not in there]
    assert not missing


def test_what_a_page_installs_can_be_had() -> None:
    """Packages and extras exist. While the index has no kvplug, a guide that installs from it says so."""
    folders = [ROOT, *ROOT.glob("plugins/kvplug-*"), *EXAMPLES.glob("kvplug-*")]
    files = [folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").exists()]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    extras = {project["name"]: {*project.get("optional-dependencies", ())} for project in projects}
    extras["."] = extras["kvplug"] | {"test"}  # the checkout, or a package that `kvplug new` generates
    is_released = NOT_YET not in (ROOT / "README.md").read_text(encoding="utf-8")
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        is_silent = not is_released and page.parent.name in ("how-to", "tutorials") and NOT_YET not in text
        for line in re.findall(r"pip (?:install|wheel)\b([^`\n]*)", text.replace("\\\n", " ")):
            for given in shlex.split(line, comments=True):
                if found := re.fullmatch(r"(.*/)?(kvplug[a-z0-9-]*|\.)(?:\[(.+)\])?", given):
                    folder, name, wanted = found.groups()
                    from_index = folder is None and name != "."
                    missing = set(wanted.split(",") if wanted else ()) - extras.get(name, set())
                    if name not in extras or missing or (is_silent and from_index):
                        wrong.append(f"{page.relative_to(ROOT)}: pip install {given}")
    assert not wrong


def test_every_metric_and_log_event_that_a_page_names_exists() -> None:
    wrong = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        metrics = set(re.findall(r"\bkvplug_[a-z_]+_total\b", text)) - COUNTERS.keys()
        events = set(re.findall(r'"event": "(\w+)"', text)) - {event.name.lower() for event in LogEvent}
        wrong[page.name] = metrics | events
    assert not {page: names for page, names in wrong.items() if names}
