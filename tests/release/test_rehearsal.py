"""What the rehearsal of a release takes from the README is there."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("rehearse")


def test_the_readmes_lines_install_every_package(rehearse: Any) -> None:
    lines = rehearse.lines_of_the_readme()
    assert lines[0] == "python3 -m venv env"
    named = [word for line in lines[1:] for word in line.removeprefix("env/bin/pip install ").split()]
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    packages = {tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in projects}
    assert len(named) == len(set(named)) and set(named) == packages | {"numpy"}


@pytest.mark.parametrize(
    ("without", "status", "checks", "said"),
    [
        ("", "unavailable", 0, ""),
        ("", "broken", 0, "kvplug list: .*broken"),
        ("shm", "ok", 0, "kvplug list does not show shm"),
        ("", "ok", 1, "kvplug check .*: exit code 1"),
    ],
)
def test_a_plugin_that_is_broken_or_missing_is_a_fault(
    rehearse: Any, tmp_path: Path, without: str, status: str, checks: int, said: str
) -> None:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    tables = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in projects]
    names = {name for table in tables for name in table.get("entry-points", {}).get("kvplug", {})}
    rows = [{"plugin": name, "status": "ok"} for name in sorted(names - {without})]
    rows[-1]["status"] = status
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    program = tmp_path / "kvplug"
    program.write_text(f"#!/bin/sh\ncase $1 in list) cat rows.json ;; check) exit {checks} ;; esac\n")
    program.chmod(0o755)
    if not said:
        assert rehearse.check_plugins(tmp_path, {}, tmp_path) == sorted(names)
        return
    with pytest.raises(rehearse.ReleaseError, match=said):
        rehearse.check_plugins(tmp_path, {}, tmp_path)
