"""``kvplug new``: what it refuses, what it writes, and what it says without copier."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug.cli.new import KINDS, TEMPLATES
from kvplug.transport.hookspecs import PLUGIN_API

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def copier() -> None:
    pytest.importorskip("copier", reason='kvplug new needs copier (pip install "kvplug[scaffold]")')


def new(site: Any, *arguments: str) -> Any:
    return site.kvplug("new", *arguments)


@pytest.mark.parametrize("name", ["Blue", "1a", "a_b", "", "a" * 41, "../a", "a.b"])
def test_what_is_no_name_is_refused_and_the_rule_is_told(site: Any, name: str) -> None:
    done = new(site, "transport", name)
    assert done.returncode == 2
    assert "use up to 40 lower-case letters, digits and hyphens, a letter first" in done.stderr


@pytest.mark.parametrize("name", ["a-", "a--b"])
def test_what_is_no_name_of_a_distribution_is_refused(site: Any, name: str) -> None:
    done = new(site, "transport", name)
    assert done.returncode == 2
    assert "a hyphen stands between letters or digits" in done.stderr


def test_a_name_that_configs_give_a_meaning_is_refused(site: Any) -> None:
    assert "'auto' has a meaning" in new(site, "transport", "auto").stderr


def test_a_kind_without_a_template_is_refused_and_those_with_one_are_told(site: Any) -> None:
    done = new(site, "transport", "blue", "--kind", "queue")
    assert done.returncode == 2
    assert "no template of a transport of kind 'queue'; there is: pipe" in done.stderr


def test_help_says_which_kinds_there_are(site: Any) -> None:
    said = " ".join(new(site, "transport", "--help").stdout.split())
    assert "Only pipes can be generated so far" in said
    assert [kind.value for kind in KINDS] == ["pipe"]


def test_without_copier_it_says_what_to_install(site: Any) -> None:
    (site.folder / "site").mkdir()
    (site.folder / "site" / "copier.py").write_text("raise ImportError('no')")
    done = new(site, "transport", "blue")
    assert done.returncode == 1
    assert 'kvplug new needs copier: pip install "kvplug[scaffold]"' in done.stderr
    assert not (site.folder / "kvplug-blue").exists()


def test_a_name_that_is_taken_is_refused(site: Any) -> None:
    done = new(site, "transport", "memory")
    assert done.returncode == 1
    assert "the pipe 'memory' is offered by kvplug-testing " in done.stderr
    assert not (site.folder / "kvplug-memory").exists()


def test_a_folder_that_holds_something_is_left_alone(site: Any) -> None:
    mine = site.folder / "kvplug-blue" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = new(site, "transport", "blue")
    assert done.returncode == 1
    assert "kvplug-blue exists; --folder names another one, --force writes over it" in done.stderr
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


@pytest.mark.usefixtures("copier")
def test_force_writes_over_what_it_would_have_written_and_nothing_else(site: Any) -> None:
    folder = site.folder / "kvplug-blue"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    (folder / "README.md").write_text("old")
    assert new(site, "transport", "blue", "--force").returncode == 0
    assert (folder / "mine.txt").read_text() == "mine"
    assert "# kvplug-blue" in (folder / "README.md").read_text()


@pytest.mark.usefixtures("copier")
def test_it_writes_a_package_and_says_what_to_do_with_it(site: Any) -> None:
    done = new(site, "transport", "blue-whale", "--folder", "sea/whale")
    assert done.returncode == 0, done.stderr
    assert "cd sea/whale" in done.stdout
    folder = site.folder / "sea" / "whale"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {
        *(".gitignore", "README.md", "pyproject.toml", "tox.ini", "tests/test_blue_whale.py"),
        *(f"kvplug_blue_whale/{name}" for name in ("__init__.py", "light.py", "pipe.py", "plugin.py")),
        "kvplug_blue_whale/py.typed",
    }
    found = tomllib.loads((folder / "pyproject.toml").read_text())
    assert found["project"]["name"] == "kvplug-blue-whale"
    assert found["project"]["entry-points"]["kvplug"] == {"blue-whale": "kvplug_blue_whale.plugin"}
    assert found["tool"]["kvplug"]["waivers"] == {}
    assert f"KVPLUG_API = {PLUGIN_API}" in (folder / "kvplug_blue_whale" / "plugin.py").read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and "{{" in path.read_text()]


@pytest.mark.usefixtures("copier")
def test_a_connector_has_its_two_sides_and_no_transport(site: Any) -> None:
    done = new(site, "connector", "shelf")
    assert done.returncode == 0, done.stderr
    assert "Make scheduler.py and worker.py in kvplug_shelf yours" in done.stdout
    folder = site.folder / "kvplug-shelf" / "kvplug_shelf"
    assert {path.name for path in folder.iterdir()} == {
        *("__init__.py", "folder.py", "options.py", "plugin.py", "py.typed", "scheduler.py", "worker.py")
    }
    every = [path.read_text() for path in (site.folder / "kvplug-shelf").rglob("*") if path.is_file()]
    assert not [text for text in every if "{{" in text]


@pytest.mark.usefixtures("copier")
def test_a_store_is_one_module_that_needs_no_torch(site: Any) -> None:
    done = new(site, "store", "shelf")
    assert done.returncode == 0, done.stderr
    assert "kvplug-shelf offers the store 'shelf'. Next:" in done.stdout
    assert "Make store.py in kvplug_shelf yours" in done.stdout
    folder = site.folder / "kvplug-shelf" / "kvplug_shelf"
    assert {path.name for path in folder.iterdir()} == {
        *("__init__.py", "options.py", "plugin.py", "py.typed", "store.py")
    }
    every = [path.read_text() for path in (site.folder / "kvplug-shelf").rglob("*") if path.is_file()]
    assert not [text for text in every if "{{" in text or "{%" in text]
    found = tomllib.loads((site.folder / "kvplug-shelf" / "pyproject.toml").read_text())["project"]
    assert [each.partition(">")[0] for each in found["dependencies"]] == ["attrs", "kvplug"]
    assert found["optional-dependencies"] == {"test": ["kvplug-testing"]}


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(
    ("what", "name", "modules"),
    [("transport", "sample", ["pipe.py", "light.py"]), ("store", "sqlite", ["store.py", "options.py"])],
)
def test_what_is_generated_is_the_example_of_the_docs(
    site: Any, what: str, name: str, modules: list[str]
) -> None:
    assert new(site, what, name, "--force").returncode == 0
    for module in modules:
        path = Path(f"kvplug-{name}", f"kvplug_{name}", module)
        generated = (site.folder / path).read_text()
        assert generated == (EXAMPLES / path).read_text(), "run .ci/templates.py"


def test_every_file_of_a_template_is_filled_in() -> None:
    files = [path for path in TEMPLATES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files
    assert not [path for path in files if path.suffix != ".jinja"]
