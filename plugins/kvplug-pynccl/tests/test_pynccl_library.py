"""NCCL is looked for, loaded and asked, and what cannot be used is named."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pynccl_ranks as ranks
from kvplug import UnsupportedError
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl import places as places_module
from kvplug_pynccl.nccl.abi import Config, UniqueId, Version
from kvplug_pynccl.nccl.errors import NcclError, NcclLibraryError
from kvplug_pynccl.nccl.library import Library, load
from kvplug_pynccl.nccl.places import PACKAGE, SONAME, VARIABLE, Place, places
from kvplug_pynccl.nccl.prototypes import MIN_VERSION, OPTIONAL, PROTOTYPES
from kvplug_testing import peers
from kvplug_testing.resources import Resources


def packaged() -> str:
    """The version of NVIDIA's package that is installed here, or nothing."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def _nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


# -- the real one, without a GPU -------------------------------------------------------------------------


def listening() -> list[str]:
    """The TCP addresses, in the kernel's hexadecimal, on which this process listens."""
    own = {each.partition(" -> ")[2] for each in Resources.of().descriptors}
    tables = (Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    return [each[1] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in own]


def ask_the_real_one(parent: peers.Parent, when: str) -> dict[str, Any]:
    if when == "before it is loaded":
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    nccl = load()
    if when == "before the first id":
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    got: dict[str, Any] = {"version": str(nccl.version), "path": nccl.path, "before": listening()}
    one = nccl.get_unique_id()
    os.environ["NCCL_SOCKET_IFNAME"] = "nothing-has-this-name"  # it was read, and is not read again
    got["ids differ"] = bytes(one) != bytes(nccl.get_unique_id())
    got["listening"] = listening()
    got["has"] = [name for name in PROTOTYPES if nccl.has(name)]
    got["torch"] = "torch" in sys.modules
    try:
        nccl.comm_init_rank(1, one, 0)
    except NcclError as e:
        got["error"] = str(e)
    return got


@pytest.mark.skipif(not packaged(), reason=f"{PACKAGE} is not installed")
@pytest.mark.parametrize("when", ["before it is loaded", "before the first id"])
def test_the_real_library_answers_and_listens_where_it_is_told_to(when: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", VARIABLE: "", "NCCL_DEBUG": "WARN"}
    with peers.start(ask_the_real_one, when, env=environment, timeout_s=120.0) as child:
        got = child.result(120.0)
    assert got["version"] == packaged() and SONAME in got["path"]
    assert got["ids differ"] and got["before"] == []
    assert len(got["listening"]) == 2  # one for each id
    loopback = re.compile(r"0100007F:[0-9A-F]{4}|00000000000000000000000001000000:[0-9A-F]{4}")
    assert all(loopback.fullmatch(address) for address in got["listening"])
    version = Version(*(int(part) for part in got["version"].split(".")[:3]))
    assert {*got["has"]} == {*PROTOTYPES} - {name for name, since in OPTIONAL.items() if version < since}
    assert got["torch"] is False
    assert "NCCL says: " in got["error"]


# -- what cannot be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be loaded"),
        (b"not a library", "cannot be loaded.*(invalid ELF header|file too short)"),
        (4000, "is incomplete: [0-9]+ bytes are missing at its end"),
        ("int something(void) { return 1; }", "is not NCCL: it lacks ncclGetLastError, .*, \\.\\.\\."),
        (
            "int ncclGetVersion(int *version) { *version = 22005; return 0; }",
            "is NCCL 2.20.5, and lacks ncclGetLastError, .*, \\.\\.\\.",
        ),
    ],
    ids=["not there", "a text", "the first 4000 bytes", "another", "too little"],
)
def test_what_was_named_and_is_no_nccl_is_refused(
    content: Any, says: str, fake_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``content``: bytes, how many bytes of the fake, or code."""
    path = tmp_path / SONAME
    if isinstance(content, str):
        (tmp_path / "made.c").write_text(content)
        command = ["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "made.c")]
        subprocess.run(command, check=True, timeout=60)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else Path(fake_path).read_bytes()[:content])
    with pytest.raises(NcclLibraryError, match=says) as given:
        load(str(path))
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(NcclLibraryError, match=says) as named:
        load()
    assert str(path) in str(given.value) and str(path) in str(named.value)
    assert VARIABLE in str(named.value) and VARIABLE not in str(given.value)


def test_one_that_is_too_old_is_refused(fake_path: str, controls: fake.Controls) -> None:
    controls.set(version=21903)
    with pytest.raises(NcclLibraryError, match=r"is NCCL 2\.19\.3, and 2\.20\.0 is the oldest"):
        load(fake_path)
    controls.set(version=MIN_VERSION.code)
    assert load(fake_path).version == MIN_VERSION


def test_what_an_older_one_does_not_have_is_told_when_it_is_called(old_path: str) -> None:
    controls = fake.Controls(old_path)
    controls.set(version=22005)
    nccl = load(old_path)
    controls.reset()
    assert {name for name in PROTOTYPES if not nccl.has(name)} == {*OPTIONAL}
    with pytest.raises(UnsupportedError, match=r"came with NCCL 2\.2\d\.\d, and .* is NCCL 2\.20\.5"):
        nccl.comm_suspend(0)
    (me,) = ranks.near(nccl)
    assert nccl.config().version == 22005  # of the two the older
    me.end()


# -- values ----------------------------------------------------------------------------------------------


def test_structures_have_the_fields_and_sizes_that_the_library_knows(nccl: Library) -> None:
    with pytest.raises(TypeError, match=r"ncclConfig_t has no bloking; it has blocking, "):
        Config(bloking=0)
    data = bytes(nccl.get_unique_id())
    assert bytes(UniqueId.of(data)) == data
    with pytest.raises(ValueError, match="has 128 bytes, these are 127"):
        UniqueId.of(data[1:])


# -- places ----------------------------------------------------------------------------------------------


@pytest.fixture
def torch_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a PyTorch, where there is neither a package nor a library in this process."""

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


def test_torchs_own_is_found_where_its_wheels_have_it_and_one_that_cannot_be_loaded_is_passed_over(
    torch_folder: Path, fake_path: str
) -> None:
    inside, beside = torch_folder / "lib", torch_folder.parent / "nvidia" / "nccl" / "lib"
    for folder in (inside, beside):
        folder.mkdir(parents=True)
    (inside / SONAME).write_bytes(b"no library")
    shutil.copy(fake_path, beside / SONAME)
    found = [each.path for each in places() if each.path]
    assert found == [str(inside / SONAME), str(beside / SONAME), SONAME]
    assert load().path == str(beside / SONAME)


NOWHERE = "libnccl-that-is-not-there.so.2"


def test_where_there_is_none_the_error_says_where_it_was_looked_for(
    torch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "SONAME", NOWHERE)
    with pytest.raises(NcclLibraryError) as caught:
        load()
    text = str(caught.value)
    assert f"install {PACKAGE}" in text and VARIABLE in text
    assert f"the package {PACKAGE}: it is not installed" in text
    assert str(torch_folder / "lib") in text and str(torch_folder.parent / "nvidia") in text
    assert f"the system's loader: {NOWHERE} cannot be loaded" in text
