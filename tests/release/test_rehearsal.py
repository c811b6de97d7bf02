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


def test_the_readmes_programs_are_two_ends_of_a_pipe(rehearse: Any) -> None:
    one, other = rehearse.programs_of_the_readme()
    assert "listen_pipe" in one and "print(server.contact)" in one and "connect_pipe" in other
    assert one.count('transport="auto"') == other.count('transport="auto"') == 1


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


def test_an_index_has_what_was_built_and_says_what_was_taken(rehearse: Any, tmp_path: Path) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    dist = tmp_path / "dist"
    dist.mkdir()
    for project in rehearse.PROJECTS:
        stem = rehearse.stem_of(project)
        for name in (f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"):
            (dist / name).write_text(name)
    with rehearse.index_of(dist, tmp_path / "index") as (address, taken):
        with urlopen(f"{address}kvplug-shm/", timeout=30) as page:  # noqa: S310 - it is on this host
            links = page.read().decode()
        assert links.count("<a ") == 2 and "sha256=" in links
        stem = rehearse.stem_of(ROOT / "plugins" / "kvplug-shm")
        with urlopen(f"{address}kvplug-shm/{stem}.tar.gz", timeout=30) as file:  # noqa: S310
            assert file.read().decode() == f"{stem}.tar.gz"
        assert f"{stem}.tar.gz" in taken and f"{stem}-py3-none-any.whl" not in taken
        with pytest.raises(HTTPError):
            urlopen(f"{address}kvplug-sample/", timeout=30)  # noqa: S310
    (dist / f"{stem}.tar.gz").unlink()
    with (
        pytest.raises(rehearse.ReleaseError, match="kvplug-shm: 1 files"),
        rehearse.index_of(dist, tmp_path / "2"),
    ):
        pass
