"""What the rehearsal of a release takes from the README is there."""

from __future__ import annotations

import importlib
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
