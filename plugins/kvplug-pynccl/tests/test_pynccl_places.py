"""Where NCCL is looked for, and what is said of where it is not."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl import places as places_module
from kvplug_pynccl.nccl.errors import (
    NcclLibraryError,
)
from kvplug_pynccl.nccl.library import Library, load
from kvplug_pynccl.nccl.places import PACKAGE, SONAME, VARIABLE, Place, places

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")


@pytest.fixture(autouse=True)
def _nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither a package nor a library in this process, and a PyTorch whose folder is returned."""

    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(torch)])
    monkeypatch.setattr(places_module.importlib.metadata, "distribution", absent)
    monkeypatch.setattr(places_module.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(places_module, "_mapped", lambda: Place("this process", missing="none is there"))
    return torch


def test_what_is_given_is_the_only_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/of/the/variable")
    assert [each.path for each in places("/given")] == ["/given"]
    assert [each.path for each in places()] == ["/of/the/variable"]
    monkeypatch.setenv(VARIABLE, "")  # as if it were not set
    assert len([*places()]) > 1


def test_torchs_own_is_found_where_its_wheels_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = nowhere(monkeypatch, tmp_path)
    inside, beside = torch / "lib" / SONAME, torch.parent / "nvidia" / "nccl" / "lib" / SONAME
    for path in (inside, beside):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    found = [each.path for each in places() if each.path]
    assert found == [str(inside), str(beside), SONAME]


@pytest.mark.parametrize(
    "files", [None, [], ["nvidia/nccl/include/nccl.h"], ["nvidia/nccl/lib/libnccl.so.2"]]
)
def test_a_package_without_its_library_is_passed_over(
    files: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere(monkeypatch, tmp_path)
    paths = None if files is None else [importlib.metadata.PackagePath(file) for file in files]
    package = SimpleNamespace(version="2.32.3", files=paths, locate_file=lambda file: tmp_path / file)
    monkeypatch.setattr(places_module.importlib.metadata, "distribution", lambda name: package)
    first = next(places())
    assert first.what == f"the package {PACKAGE} 2.32.3" and not first.path
    assert first.missing == (
        f"{tmp_path / files[0]} is not there" if files and "lib/" in files[0] else f"it has no {SONAME}"
    )


def test_without_torch_and_without_proc_the_system_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mapped = places_module._mapped
    nowhere(monkeypatch, tmp_path)
    monkeypatch.setattr(places_module, "_mapped", mapped)
    monkeypatch.setattr(places_module, "Path", lambda name: tmp_path / "absent")
    monkeypatch.setattr(places_module.importlib.util, "find_spec", lambda name: None)
    _, loaded, torch, system = places()
    assert loaded.missing.startswith("it cannot be read: ") and torch.missing == "PyTorch is not installed"
    assert system.path == SONAME


def test_what_is_loaded_already_is_found(fake_path: str, nccl: Library) -> None:
    found = places_module._mapped()
    assert not found.missing and Path(found.path).name.startswith("libnccl")


@pytest.mark.full
@compiled
def test_one_that_cannot_be_loaded_is_passed_over_where_none_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = nowhere(monkeypatch, tmp_path)
    bad, good = torch / "lib", torch.parent / "nvidia" / "nccl" / "lib"
    for folder in (bad, good):
        folder.mkdir(parents=True)
    (bad / SONAME).write_bytes(b"no library")
    path = fake.NCCL.build(good)
    assert load().path == path


def test_where_there_is_none_the_error_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = nowhere(monkeypatch, tmp_path)
    monkeypatch.setattr(places_module, "SONAME", "libnccl-that-is-not-there.so.2")
    with pytest.raises(NcclLibraryError) as caught:
        load()
    text = str(caught.value)
    assert f"install {PACKAGE}" in text and VARIABLE in text
    assert f"the package {PACKAGE}: it is not installed" in text
    assert str(torch / "lib") in text and str(torch.parent / "nvidia") in text
    assert "the system's loader: libnccl-that-is-not-there.so.2 cannot be loaded" in text
