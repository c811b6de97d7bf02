"""One command sets the version of every package and writes the changelog, or says why it does not."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = runpy.run_path(str(ROOT / ".ci" / "release.py"))
NEXT = "7.8.9"


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files of this one that the command reads."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path / "checkout"
    names = [
        "pyproject.toml",
        "CHANGELOG.md",
        "README.md",
        "kvplug/__init__.py",
        "changelog.d/template.md.jinja",
    ]
    for path in [*map(ROOT.joinpath, names), *ROOT.glob("plugins/*/pyproject.toml")]:
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (root / "changelog.d" / "1.added.md").write_text("A door,\nin two lines.\n\nA window.\n")
    (root / "changelog.d" / "2.fixed.md").write_text("The roof.\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "as it is")
    return root


def run(root: Path, *arguments: str) -> int:
    return int(COMMAND["main"]([*arguments], root))


def texts(root: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}


def test_every_package_gets_the_version_and_requires_it_of_the_others(checkout: Path) -> None:
    for path, text in COMMAND["edits"](checkout, NEXT).items():
        path.write_text(text)
    projects = [
        tomllib.loads(path.read_text())["project"]
        for path in [checkout / "pyproject.toml", *checkout.glob("plugins/*/pyproject.toml")]
    ]
    names = {project["name"] for project in projects}
    assert len(names) == len(projects) > 15
    assert {project["version"] for project in projects} == {NEXT}
    assert f'__version__ = "{NEXT}"' in (checkout / "kvplug" / "__init__.py").read_text()
    for project in projects:
        sign = {"kvplug-bench": "==", "kvplug-testing": "~="}.get(project["name"], ">=")
        ours = [each for each in project["dependencies"] if re.match(r"[\w-]+", each)[0] in names]  # type: ignore[index]
        assert all(re.fullmatch(rf"[\w-]+(\[\w+\])?{sign}{re.escape(NEXT)}", each) for each in ours), ours
        assert bool(ours) == (project["name"] != "kvplug")


def committed(root: Path) -> None:
    git(root, "commit", "-q", "--all", "-m", "changed")


def with_a_change(root: Path) -> None:
    (root / "README.md").write_text("changed")


def without_entries(root: Path) -> None:
    for path in root.glob("changelog.d/*.*.md"):
        path.unlink()
    committed(root)


def released(root: Path) -> None:
    with (root / "CHANGELOG.md").open("a") as file:
        file.write("\n## 7.8.10 (2030-01-02)\n\n## 7.8.2 (2030-01-01)\n")
    committed(root)


@pytest.mark.parametrize(
    ("prepare", "version", "said"),
    [
        (with_a_change, NEXT, "the checkout has changes: .*README.md"),
        (without_entries, NEXT, "changelog.d has no entries"),
        (released, NEXT, "7.8.9 is not newer than 7.8.10"),
        (released, "7.8.10", "7.8.10 is not newer than 7.8.10"),
        (lambda root: None, "7.8", "'7.8' is no version"),
        (lambda root: None, "7.8.9rc1", "'7.8.9rc1' is no version"),
    ],
)
def test_what_is_no_release_is_refused_and_nothing_changes(
    checkout: Path, capsys: Any, prepare: Callable[[Path], None], version: str, said: str
) -> None:
    prepare(checkout)
    before = texts(checkout)
    assert run(checkout, version) == 1
    assert re.search(f"refused: {said}", capsys.readouterr().err)
    assert texts(checkout) == before


def test_a_release_is_what_its_tag_says(checkout: Path, capsys: Any) -> None:
    pytest.importorskip("towncrier", reason="it writes the changelog")
    assert run(checkout, "--tag", f"v{NEXT}") == 1
    assert run(checkout, NEXT) == 0
    assert f"git tag v{NEXT}" in capsys.readouterr().out
    assert run(checkout, "--tag", f"v{NEXT}") == 0
    assert run(checkout, "--tag", NEXT) == 1
    assert not list(checkout.glob("changelog.d/*.added.md"))
    changes = (checkout / "CHANGELOG.md").read_text().partition("## ")[2]
    assert re.match(
        r"7\.8\.9 \(\d{4}-\d\d-\d\d\)\n\n### Added\n\n- A door,\n  in two lines\.\n- A window\.\n", changes
    )
    assert "### Fixed\n\n- The roof.\n" in changes
    committed(checkout)
    assert run(checkout, NEXT) == 1  # it is released
