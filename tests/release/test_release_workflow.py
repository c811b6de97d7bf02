"""The workflow that publishes: every package, after the tests, with no more rights than it needs."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATH = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the workflow")
    loaded: dict[Any, Any] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    return loaded


def test_every_package_is_published_the_core_first(workflow: Any) -> None:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    names = [tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in projects]
    strategy = workflow["jobs"]["publish"]["strategy"]
    published = strategy["matrix"]["package"]
    assert sorted(published) == sorted(names)
    assert published[0] == "kvplug" and strategy["max-parallel"] == 1


def test_tags_are_those_of_versions(workflow: Any) -> None:
    (pattern,) = workflow[True]["push"]["tags"]  # YAML takes the word "on" for a truth value
    assert list(workflow[True]) == ["push"] and list(workflow[True]["push"]) == ["tags"]
    tag = re.compile(pattern.replace(".", r"\."))
    version = runpy.run_path(str(ROOT / ".ci" / "release.py"))["VERSION"]
    for text in ("0.1.0", "0.10.25", "12.0.0", "1.2", "1.2.3rc1", "1.2.3.4", "a.b.c", ""):
        assert bool(tag.fullmatch(f"v{text}")) == bool(version.fullmatch(text)), text
    assert any("--tag" in step.get("run", "") for step in workflow["jobs"]["test"]["steps"])


def test_nothing_is_published_before_the_tests_and_the_rehearsal_passed(workflow: Any) -> None:
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == ["build"] and jobs["build"]["needs"] == ["test"]
    commands = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert "make test " in commands["test"] and "make test-all" in commands["test"]
    assert "tox run -e release" in commands["build"]
    assert not any(
        "if" in each or "continue-on-error" in each for job in jobs.values() for each in [job, *job["steps"]]
    )
    machines = [each["machine"] for each in jobs["build"]["strategy"]["matrix"]["include"]]
    assert machines == ["x86_64", "aarch64"]


def test_only_the_job_that_publishes_can_and_it_can_do_nothing_else(workflow: Any) -> None:
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert all(job["permissions"] == {"contents": "read"} for name, job in jobs.items() if name != "publish")
    assert jobs["publish"]["environment"] == "pypi-${{ matrix.package }}"
    assert "secrets." not in PATH.read_text(encoding="utf-8")
    (upload,) = [each for each in jobs["publish"]["steps"] if "pypi-publish" in each.get("uses", "")]
    assert upload["with"]["attestations"] is True
    # What runs with that right is no file of the repository.
    assert not any("checkout" in each.get("uses", "") for each in jobs["publish"]["steps"])


@pytest.mark.parametrize("path", [*PATH.parent.glob("*.yml")], ids=lambda path: path.stem)
def test_actions_are_named_by_the_hash_of_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name, _ in used)
    assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", comment) for _, comment in used)
