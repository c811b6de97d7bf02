"""``kvplug new``: what it refuses, what it writes, and what it says without copier."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug.cli.new import COMMANDS, TEMPLATES
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.spec import Kind

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
    done = new(site, "qeue", "blue")
    assert done.returncode == 2
    assert "there is no template of a 'qeue'; did you mean 'queue'?; there are: transport, " in done.stderr


def test_help_says_in_a_line_each_which_kinds_there_are(site: Any) -> None:
    lines = new(site, "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line) <= 80 and line.endswith(".") for line in lines)
    assert {template.kind for template in COMMANDS.values()} == {*Kind} - {Kind.DIRECTORY}


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


def test_a_command_of_the_programs_own_is_refused(site: Any) -> None:
    done = new(site, "command", "list")
    assert (done.returncode, done.stderr) == (1, "Error: kvplug list is a command of kvplug's own\n")


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
    every = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in every if "{{" in text or "sample" in text]  # nothing of the docs' example


MADE = {
    "queue": (["attrs"], ["end.py", "message.py", "probe.py", "queue.py", "reader.py", "writer.py"]),
    "lookup": (
        ["attrs", "torch"],
        ["endpoint.py", "entry.py", "message.py", "reach.py", "store.py", "table.py"],
    ),
    "communicator": (["attrs", "torch", "kvplug-cpu"], ["communicator.py", "options.py"]),
    "store": (["attrs"], ["options.py", "store.py"]),
    "connector": (["attrs", "torch"], ["folder.py", "options.py", "scheduler.py", "worker.py"]),
    "sink": (["attrs"], ["options.py", "sink.py"]),
    "command": (["attrs", "click"], ["command.py"]),
}
"""What each needs besides kvplug, and its modules besides those that all have."""


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize("what", MADE)
def test_each_kind_has_its_modules_and_its_needs(site: Any, what: str) -> None:
    needs, modules = MADE[what]
    done = new(site, what, "shelf")
    assert done.returncode == 0, done.stderr
    words = COMMANDS[what].kind.replace("_", " ")
    assert f"kvplug-shelf offers the {words} 'shelf'. Next:" in done.stdout
    assert f"Make {COMMANDS[what].modules} in kvplug_shelf yours" in done.stdout
    folder = site.folder / "kvplug-shelf"
    found = {path.name for path in (folder / "kvplug_shelf").iterdir()}
    assert found == {"__init__.py", "plugin.py", "py.typed", *modules}
    every = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in every if "{{" in text or "{%" in text]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert [each.partition(">")[0] for each in project["dependencies"]] == [*needs, "kvplug"]
    cpu = ["kvplug-cpu"] if what == "lookup" else []
    numpy = ["numpy"] if "torch" in needs else []
    assert project["optional-dependencies"] == {"test": ["kvplug-testing", *cpu, *numpy]}
    wheels = next(line for line in (folder / "tox.ini").read_text().splitlines() if "pip wheel" in line)
    ours = [each for each in (*needs, *cpu) if each.startswith("kvplug")]
    assert [Path(each).name for each in wheels.split()[6:]] == ["kvplug", "kvplug-testing", *ours]


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(
    ("what", "name", "same"),
    [
        ("transport", "sample", ["pipe.py", "light.py"]),
        ("store", "sqlite", ["store.py", "options.py"]),
        ("connector", "shelf", None),
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


def test_every_file_of_a_template_is_filled_in() -> None:
    files = [path for path in TEMPLATES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files
    assert not [path for path in files if path.suffix != ".jinja"]
