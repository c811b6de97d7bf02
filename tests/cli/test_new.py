"""``kvplug new``: what it refuses, what it writes, and what it says without copier."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug.transport.hookspecs import PLUGIN_API

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def copier() -> None:
    pytest.importorskip("copier", reason='kvplug new needs copier (pip install "kvplug[scaffold]")')


def new(site: Any, *arguments: str) -> Any:
    return site.kvplug("new", *arguments)


RULE = "use up to 40 lower-case letters, digits and hyphens, starting with a letter"


@pytest.mark.parametrize(
    ("what", "name", "code", "said"),
    [
        *(("transport", name, 2, RULE) for name in ("Blue", "1a", "a_b", "", "a" * 41, "../a", "a.b")),
        *(("transport", name, 2, "a hyphen must be between letters or digits") for name in ("a-", "a--b")),
        ("transport", "auto", 2, "'auto', which has a special meaning"),
        ("qeue", "blue", 2, "'qeue' is not one of 'transport', 'queue', "),
        ("transport", "memory", 1, "offers the pipe 'memory', and kvplug refuses"),
        ("command", "list", 1, "Error: kvplug list is one of kvplug's own commands\n"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(
    site: Any, what: str, name: str, code: int, said: str
) -> None:
    done = new(site, what, name)
    assert done.returncode == code
    assert said in done.stderr
    assert not [path for path in site.folder.iterdir() if path.name.startswith("kvplug-")]


def test_without_copier_it_says_what_to_install(site: Any) -> None:
    (site.folder / "site").mkdir()
    (site.folder / "site" / "copier.py").write_text("raise ImportError('no')")
    done = new(site, "transport", "blue")
    assert done.returncode == 1
    assert 'kvplug new needs copier: pip install "kvplug[scaffold]"' in done.stderr
    assert not (site.folder / "kvplug-blue").exists()


def test_a_folder_that_holds_something_is_left_alone(site: Any) -> None:
    mine = site.folder / "kvplug-blue" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = new(site, "transport", "blue")
    assert done.returncode == 1
    assert "kvplug-blue exists; --folder names another one, --force overwrites it" in done.stderr
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


@pytest.mark.usefixtures("copier")
def test_it_writes_a_package_and_says_what_to_do_with_it(site: Any) -> None:
    done = new(site, "transport", "blue-whale", "--folder", "sea/whale")
    assert done.returncode == 0, done.stderr
    assert "cd sea/whale" in done.stdout
    folder = site.folder / "sea" / "whale"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {
        *(".gitignore", "README.md", "pyproject.toml", "tox.ini", "tests/test_blue_whale.py"),
        *(f"kvplug_blue_whale/{name}" for name in ("__init__.py", "options.py", "pipe.py", "plugin.py")),
        *("kvplug_blue_whale/probe.py", "kvplug_blue_whale/py.typed"),
    }
    found = tomllib.loads((folder / "pyproject.toml").read_text())
    assert found["project"]["name"] == "kvplug-blue-whale"
    assert found["project"]["entry-points"]["kvplug"] == {"blue-whale": "kvplug_blue_whale.plugin"}
    assert f"KVPLUG_API = {PLUGIN_API}" in (folder / "kvplug_blue_whale" / "plugin.py").read_text()
    every = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in every if "{{" in text or "sample" in text]  # nothing of the docs' example


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(
    ("what", "name", "same"),
    [
        ("transport", "sample", ["pipe.py", "options.py", "probe.py"]),
        ("store", "sqlite", ["store.py", "options.py"]),
        ("queue", "relay", None),
        ("sink", "jsonl", None),
    ],
)
def test_what_is_generated_is_the_example_of_the_docs(
    site: Any, what: str, name: str, same: list[str] | None
) -> None:
    """``None``: each module, and the test, which the example has under another name: no pytest finds it."""
    assert new(site, what, name, "--force").returncode == 0
    made, example = site.folder / f"kvplug-{name}", EXAMPLES / f"kvplug-{name}"
    modules = same or [path.name for path in (made / f"kvplug_{name}").glob("*.py")]
    pairs = [(made / f"kvplug_{name}" / module, example / f"kvplug_{name}" / module) for module in modules]
    if same is None:
        pairs.append((made / "tests" / f"test_{name}.py", example / f"{name}_contract.py"))
    for generated, written in pairs:
        assert generated.read_text() == written.read_text(), "run .ci/templates.py"


@pytest.mark.usefixtures("copier")
def test_a_generated_connector_is_the_connector_simple(site: Any) -> None:
    assert new(site, "connector", "simple", "--force").returncode == 0
    made, lookup = site.folder / "kvplug-simple", EXAMPLES.parents[1] / "plugins" / "kvplug-lookup"
    parts = lookup / "kvplug_lookup" / "simple"
    pairs = [(made / "kvplug_simple" / each.name, each) for each in parts.glob("*.py") if each.stat().st_size]
    pairs.append((made / "tests" / "test_simple.py", lookup / "tests" / "test_simple_connector_contract.py"))
    for generated, written in pairs:
        expected = written.read_text().replace("kvplug_lookup.simple", "kvplug_simple")
        expected = expected.replace('check_plugin("lookup")', 'check_plugin("simple")')
        assert generated.read_text() == expected, "run .ci/templates.py"
