"""NCCL is found, loaded and asked; what cannot be used is named, and so is what its results mean."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest

import kvplug
from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug.testing import peers
from kvplug_pynccl.nccl import errors, places as places_module
from kvplug_pynccl.nccl.abi import HEADER, Config, DataType, Properties, RedOp, Result, UniqueId, Version
from kvplug_pynccl.nccl.errors import (
    NcclCudaError,
    NcclError,
    NcclInvalidArgumentError,
    NcclInvalidUsageError,
    NcclLibraryError,
    NcclRemoteError,
    NcclTimeoutError,
    error_of,
)
from kvplug_pynccl.nccl.library import Library, load
from kvplug_pynccl.nccl.places import PACKAGE, SONAME, VARIABLE, Place, places
from kvplug_pynccl.nccl.prototypes import MIN_VERSION, OPTIONAL, PROTOTYPES
from kvplug_pynccl.testing import fake

ranks = SimpleNamespace(**run_path(str(Path(__file__).with_name("ranks.py"))))


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


# -- where it is looked for ------------------------------------------------------------------------------


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


@compiled
def test_one_that_cannot_be_loaded_is_passed_over_where_none_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = nowhere(monkeypatch, tmp_path)
    bad, good = torch / "lib", torch.parent / "nvidia" / "nccl" / "lib"
    for folder in (bad, good):
        folder.mkdir(parents=True)
    (bad / SONAME).write_bytes(b"no library")
    path = fake.build(good)
    assert load().path == path


def test_where_there_is_none_the_error_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = nowhere(monkeypatch, tmp_path)
    monkeypatch.setattr(places_module, "SONAME", "libnccl-that-nobody-has.so.2")
    with pytest.raises(NcclLibraryError) as caught:
        load()
    text = str(caught.value)
    assert f"install {PACKAGE}" in text and VARIABLE in text
    assert f"the package {PACKAGE}: it is not installed" in text
    assert str(torch / "lib") in text and str(torch.parent / "nvidia") in text
    assert "the system's loader: libnccl-that-nobody-has.so.2 cannot be loaded" in text


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
        return Path(fake.build(Path(folder))).read_bytes()


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
        (half_of_one, "is not all there: [0-9]+ bytes are missing at its end"),
        (its_first_bytes, "is not all there|cannot be loaded"),
        (another_library, "is no NCCL: it lacks ncclGetErrorString, .*, \\.\\.\\."),
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
    path = fake.build(tmp_path, old=True)
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


# -- errors ----------------------------------------------------------------------------------------------


FAILURES = [result for result in Result if result not in (Result.SUCCESS, Result.IN_PROGRESS)]


@pytest.mark.parametrize("result", FAILURES, ids=lambda result: result.name)
def test_a_failure_is_an_error_of_its_own(result: Result) -> None:
    error = error_of(result, "ncclSend", "what\n  happened.\n")
    assert type(error) is not NcclError
    assert isinstance(error, NcclError) and isinstance(error, TransportError) and isinstance(error, OSError)
    assert (error.result, error.function) == (result, "ncclSend")
    assert re.match(r"ncclSend gave nccl[A-Z]\w+: ", str(error))
    assert "NCCL says: what happened. NCCL_DEBUG=WARN shows more" in str(error)


def test_each_failure_has_another_class() -> None:
    kinds = [type(error_of(result, "f")) for result in FAILURES]
    assert len({*kinds}) == len(kinds)
    theirs = {
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, NcclError)
    }
    assert {*kinds, NcclError} == theirs


def test_errors_are_also_what_they_mean() -> None:
    assert issubclass(NcclRemoteError, PeerGoneError) and issubclass(NcclTimeoutError, TimeoutError)
    assert issubclass(NcclInvalidUsageError, ValueError) and issubclass(NcclInvalidArgumentError, ValueError)
    assert issubclass(NcclLibraryError, TransportError) and not issubclass(NcclCudaError, ValueError)
    text = str(error_of(Result.INVALID_USAGE, "ncclCommInitRank"))
    assert "two ranks have the same GPU" in text and "do not agree on the world size, the unique id" in text
    assert "NCCL says" not in text


def test_a_result_that_nobody_knows_is_an_error_with_its_number() -> None:
    error = error_of(42, "ncclSend")
    assert type(error) is NcclError and "result 42" in str(error) and error.result == 42


def test_what_is_in_progress_is_no_error(nccl: Library) -> None:
    assert nccl.raise_for(Result.IN_PROGRESS, "x") is Result.IN_PROGRESS
    assert nccl.raise_for(0, "x") is Result.SUCCESS
    with pytest.raises(NcclTimeoutError, match="the start gave ncclTimeout"):
        nccl.raise_for(Result.TIMEOUT, "the start")


def test_every_error_of_the_plugin_is_in_its_readme() -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    named = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, KvplugError)
    } - {*kvplug.__all__}
    assert {"NcclError", "NcclLibraryError"} <= named
    assert not {name for name in named if f"`{name}`" not in readme}


# -- calls -----------------------------------------------------------------------------------------------


def test_a_call_that_waits_lets_other_threads_run(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    me = ranks.Rank(fake_path, bytes(nccl.get_unique_id()), 1, 0)
    assert me.settled() == Result.SUCCESS
    controls.set(abort_hangs=1)
    thread = threading.Thread(target=nccl.comm_abort, args=(me.comm,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    controls.set(abort_hangs=0)
    thread.join(60.0)
    assert not thread.is_alive()
    me.stream.close()


def test_a_communicator_is_asked_and_destroyed(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    assert (
        repr(nccl) == f"<NCCL 2.32.3 of {fake_path}>" and nccl.get_error_string(Result.TIMEOUT) == "timeout"
    )
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    assert (nccl.comm_count(comm), nccl.comm_user_rank(comm), nccl.comm_cu_device(comm)) == (1, 0, 0)
    assert nccl.comm_destroy(comm) is Result.SUCCESS  # also one that was not finalized
    controls.set(init_result=77)  # of a release to come
    me = ranks.Rank(fake_path, bytes(nccl.get_unique_id()), 1, 0)
    assert me.settled() == 77
    with pytest.raises(NcclError, match="the start gave result 77"):
        nccl.raise_for(nccl.comm_get_async_error(me.comm), "the start", me.comm)
    nccl.comm_abort(me.comm)
    me.stream.close()


def test_what_nccl_writes_at_the_end_of_a_start_is_kept_until_then(fake_path: str, nccl: Library) -> None:
    """A non-blocking start writes the communicator twice: at once, and from its thread when it is over."""
    unique_id = bytes(nccl.get_unique_id())
    first = ranks.Rank(fake_path, unique_id, 2, 0)
    gc.collect()
    others = [ctypes.c_void_p(0x5A5A5A5A) for _ in range(10_000)]  # in the place of whatever was let go
    second = ranks.Rank(fake_path, unique_id, 2, 1)
    assert (first.settled(), second.settled()) == (Result.SUCCESS, Result.SUCCESS)
    for each in (first, second):
        nccl.comm_abort(each.comm)
        each.stream.close()
    assert {each.value for each in others} == {0x5A5A5A5A}


def test_importing_the_binding_loads_neither_torch_nor_nccl() -> None:
    code = (
        "import sys, kvplug_pynccl.nccl.library, kvplug_pynccl.nccl.dtypes, kvplug_pynccl.testing.fake\n"
        "assert 'torch' not in sys.modules and 'libnccl' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_arguments_arrive_in_their_order(nccl: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the arguments of each operation, as the function gets them."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def recorder(name: str) -> Callable[..., int]:
        return lambda *args: seen.append((name, args)) or 0  # type: ignore[func-returns-value]

    monkeypatch.setattr(nccl, "_functions", {name: recorder(name) for name in PROTOTYPES})
    dtype, op = DataType.FLOAT16, RedOp.MAX
    nccl.all_reduce(1, 2, 3, dtype, op, 4, 5)
    nccl.reduce(1, 2, 3, dtype, op, 6, 4, 5)
    nccl.all_gather(1, 2, 3, dtype, 4, 5)
    nccl.reduce_scatter(1, 2, 3, dtype, op, 4, 5)
    nccl.broadcast(1, 2, 3, dtype, 6, 4, 5)
    nccl.send(1, 3, dtype, 6, 4, 5)
    nccl.recv(2, 3, dtype, 6, 4, 5)
    assert seen == [
        ("ncclAllReduce", (1, 2, 3, dtype, op, 4, 5)),
        ("ncclReduce", (1, 2, 3, dtype, op, 6, 4, 5)),
        ("ncclAllGather", (1, 2, 3, dtype, 4, 5)),
        ("ncclReduceScatter", (1, 2, 3, dtype, op, 4, 5)),
        ("ncclBroadcast", (1, 2, 3, dtype, 6, 4, 5)),
        ("ncclSend", (1, 3, dtype, 6, 4, 5)),
        ("ncclRecv", (2, 3, dtype, 6, 4, 5)),
    ]
