"""NCCL is loaded and asked, and what cannot be used is named."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pynccl_ranks as ranks
from kvplug import UnsupportedError
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import HEADER, Config, Properties, Result, UniqueId, Version
from kvplug_pynccl.nccl.errors import (
    NcclError,
    NcclLibraryError,
)
from kvplug_pynccl.nccl.library import Library, load
from kvplug_pynccl.nccl.places import PACKAGE, SONAME, VARIABLE
from kvplug_pynccl.nccl.prototypes import MIN_VERSION, OPTIONAL, PROTOTYPES
from kvplug_testing import peers


def packaged() -> str:
    """The version of NVIDIA's package that is installed here, or nothing."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


real = pytest.mark.skipif(not packaged(), reason=f"{PACKAGE} is not installed")
compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")


@pytest.fixture(autouse=True)
def _nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


# -- the real one, without a GPU -------------------------------------------------------------------------


def listening() -> list[str]:
    """The TCP addresses, in the kernel's hexadecimal, on which this process listens."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the one that lists the folder
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1])
    return found


def ask_the_real_one(parent: peers.Parent, when: str) -> dict[str, Any]:
    if when == "before it is loaded":
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    nccl = load()
    if when == "before the first id":
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    got: dict[str, Any] = {"version": str(nccl.version), "path": nccl.path, "before": listening()}
    got["texts"] = [nccl.get_error_string(result) for result in (*Result, 99)]
    one = bytes(nccl.get_unique_id())
    os.environ["NCCL_SOCKET_IFNAME"] = "nothing-has-this-name"  # it was read, and is not read again
    other = bytes(nccl.get_unique_id())
    got["ids"] = [len(one), len(other), one != other]
    got["listening"] = listening()
    got["has"] = [name for name in PROTOTYPES if nccl.has(name)]
    got["torch"] = "torch" in sys.modules
    try:
        nccl.comm_init_rank(1, UniqueId.of(one), 0)
    except NcclError as e:
        got["start"] = [type(e).__name__, str(e)]
    try:
        nccl.comm_init_rank_config(1, UniqueId.of(one), 5, nccl.config(blocking=0))
    except NcclError as e:
        got["start non-blocking"] = [type(e).__name__, str(e)]
    try:
        nccl.comm_count(0)
    except NcclError as e:
        got["no communicator"] = [type(e).__name__, str(e)]
    got["empty group"] = [int(nccl.group_start()), int(nccl.group_end())]
    return got


@real
@pytest.mark.parametrize("when", ["before it starts", "before it is loaded", "before the first id"])
def test_the_real_library_answers_and_listens_where_it_is_told_to(when: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", VARIABLE: "", "NCCL_DEBUG": "WARN"}
    if when == "before it starts":
        environment["NCCL_SOCKET_IFNAME"] = "lo"
    with peers.start(ask_the_real_one, when, env=environment, timeout_s=120.0) as child:
        got = child.result(120.0)
    assert got["version"] == packaged() and SONAME in got["path"]
    assert got["ids"] == [128, 128, True]
    assert got["before"] == []
    assert len(got["listening"]) == 2  # one for each id
    loopback = re.compile(r"0100007F:[0-9A-F]{4}|00000000000000000000000001000000:[0-9A-F]{4}")
    assert all(loopback.fullmatch(address) for address in got["listening"])
    assert got["texts"][Result.SUCCESS] == "no error"
    assert "remote process" in got["texts"][Result.REMOTE_ERROR]
    assert "unknown" in got["texts"][-1]
    version = Version(*(int(part) for part in got["version"].split(".")[:3]))
    absent = {name for name, since in OPTIONAL.items() if version < since}
    assert {*got["has"]} == {*PROTOTYPES} - absent
    assert got["torch"] is False
    for what in ("start", "start non-blocking"):
        kind, text = got[what]
        assert kind in ("NcclCudaError", "NcclInvalidArgumentError") and "NCCL says: " in text
    assert got["no communicator"][0] == "NcclInvalidArgumentError"
    assert got["empty group"] == [0, 0]


# -- what cannot be used ---------------------------------------------------------------------------------


def not_there(folder: Path) -> str:
    return str(folder / "libnccl.so.2")


def a_folder(folder: Path) -> str:
    return str(folder)


def a_text(folder: Path) -> str:
    path = folder / "libnccl.so.2"
    path.write_text("not a library")
    return str(path)


def half_of_one(folder: Path) -> str:
    return beginning(4000, folder)


def its_first_bytes(folder: Path) -> str:
    return beginning(100, folder)


@functools.cache
def built() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Path(fake.NCCL.build(Path(folder))).read_bytes()


def beginning(nbytes: int, folder: Path) -> str:
    path = folder / "libnccl.so.2"
    path.write_bytes(built()[:nbytes])
    return str(path)


def another_library(folder: Path) -> str:
    return made_of("int something(void) { return 1; }", folder)


def only_a_version(folder: Path) -> str:
    return made_of("int ncclGetVersion(int *version) { *version = 22005; return 0; }", folder)


def no_version(folder: Path) -> str:
    return made_of("int ncclGetVersion(int *version) { *version = 0; return 3; }", folder)


def made_of(code: str, folder: Path) -> str:
    source, path = folder / "made.c", folder / "libnccl.so.2"
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=60)
    return str(path)


@compiled
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (not_there, "cannot be loaded"),
        (a_folder, "cannot be loaded"),
        (a_text, "cannot be loaded.*(invalid ELF header|file too short)"),
        (half_of_one, "is incomplete: [0-9]+ bytes are missing at its end"),
        (its_first_bytes, "is incomplete|cannot be loaded"),
        (another_library, "is not NCCL: it lacks ncclGetErrorString, .*, \\.\\.\\."),
        (no_version, "does not tell its version: ncclGetVersion gave 3"),
        (only_a_version, "is NCCL 2.20.5, and lacks ncclGetErrorString, .*, \\.\\.\\."),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.parametrize("how", ["given", "variable"])
def test_what_was_named_and_is_no_nccl_is_refused(
    make: Callable[[Path], str], says: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    if how == "variable":
        monkeypatch.setenv(VARIABLE, path)
    with pytest.raises(NcclLibraryError, match=says) as caught:
        load(path if how == "given" else "")
    assert path in str(caught.value)
    assert (VARIABLE in str(caught.value)) is (how == "variable")


def test_one_that_is_too_old_is_refused(fake_path: str, controls: fake.Controls) -> None:
    controls.set(version=21903)
    with pytest.raises(NcclLibraryError, match=r"is NCCL 2\.19\.3, and 2\.20\.0 is the oldest"):
        load(fake_path)
    controls.set(version=MIN_VERSION.code)
    assert load(fake_path).version == MIN_VERSION


@compiled
def test_what_an_older_one_does_not_have_is_told_when_it_is_called(tmp_path: Path) -> None:
    path = fake.OLD_NCCL.build(tmp_path)
    controls = fake.Controls(path)
    controls.set(version=22005)
    nccl = load(path)
    assert [name for name in PROTOTYPES if not nccl.has(name)] == [
        name for name in PROTOTYPES if name in OPTIONAL
    ]
    for call in (
        lambda: nccl.comm_suspend(0),
        lambda: nccl.comm_resume(0),
        lambda: nccl.comm_window_register(0, 0, 0),
        lambda: nccl.comm_window_deregister(0, 0),
        lambda: nccl.comm_query_properties(0),
    ):
        with pytest.raises(UnsupportedError, match=r"came with NCCL 2\.2\d\.\d, and .* is NCCL 2\.20\.5"):
            call()
    me = ranks.Rank(path, bytes(nccl.get_unique_id()), 1, 0)
    assert me.settled() == Result.SUCCESS
    assert nccl.config().version == 22005  # of the two the older
    me.end()


# -- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [(2708, "2.7.8"), (2804, "2.8.4"), (20906, "2.9.6"), (22005, "2.20.5"), (23203, "2.32.3")],
)
def test_a_version_is_read_from_its_code_and_written_again(code: int, text: str) -> None:
    assert str(Version.of(code)) == text
    assert Version.of(code).code == code


def test_a_config_takes_what_the_structure_has() -> None:
    config = Config(blocking=0, commName=b"kv", minCTAs=2)
    assert (config.blocking, config.commName, config.minCTAs) == (0, b"kv", 2)
    with pytest.raises(TypeError, match=r"ncclConfig_t has no bloking; it has blocking, "):
        Config(bloking=0)
    with pytest.raises(TypeError, match="has no magic"):
        Config(magic=1)


def test_properties_are_asked_for_in_a_version_that_the_library_knows() -> None:
    assert Properties(version=Version(2, 29, 7)).version == 22907
    assert Properties(version=Version(9, 0, 0)).version == HEADER.code


def test_a_unique_id_has_128_bytes(nccl: Library) -> None:
    data = bytes(nccl.get_unique_id())
    assert bytes(UniqueId.of(data)) == data
    with pytest.raises(ValueError, match="has 128 bytes, these are 127"):
        UniqueId.of(data[1:])
