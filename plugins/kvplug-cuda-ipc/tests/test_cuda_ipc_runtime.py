"""The binding over the fake, and over NVIDIA's library as far as it works without a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
from pathlib import Path

import pytest

from kvplug_cuda_ipc.cudart.errors import CudaError, CudaLibraryError, CudaMemoryError
from kvplug_cuda_ipc.cudart.library import Runtime, load
from kvplug_cuda_ipc.cudart.places import VARIABLE, loaded, places
from kvplug_lab.gpu import fake

PACKAGE = "nvidia-cuda-runtime-cu12"
PATIENCE_S = 40.0


def real_path() -> str:
    try:
        files = importlib.metadata.distribution(PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(each.locate()) for each in files if each.name == "libcudart.so.12"), "")


REAL = real_path()

# -- NVIDIA's ----------------------------------------------------------------------------------------

needs_the_package = pytest.mark.skipif(not REAL, reason=f"{PACKAGE} is not installed")


@needs_the_package
def test_nvidias_library_is_loaded_with_its_version_and_texts() -> None:
    runtime = load(REAL)
    assert runtime.version // 1000 == 12
    assert runtime.get_error_name(2) == "cudaErrorMemoryAllocation"
    assert runtime.get_error_string(0) == "no error"
    assert "12." in repr(runtime)


# -- which library -------------------------------------------------------------------------------------


def test_a_path_that_was_given_is_the_only_one_that_is_tried(
    fake_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, fake_path)
    assert load().path == fake_path
    with pytest.raises(CudaLibraryError, match="the path that was given: /none cannot be loaded"):
        load("/none")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(CudaLibraryError, match=f"{VARIABLE}: .*gone cannot be loaded"):
        load()


def test_pytorchs_library_comes_before_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 0000 08:01 1 /usr/lib/libc.so.6\n"
        "7f01-7f02 r--p 0000 08:01 2 /a b/libcudart.so.12\n"
        "7f02-7f03 r-xp 0000 08:01 2 /a b/libcudart.so.12\n"
        "7f03-7f04 rw-p 0000 00:00 0 [heap]\n"
    )
    assert loaded(maps) == ["/a b/libcudart.so.12"]
    assert loaded(tmp_path / "none") == []
    assert [what for what, _ in places()][-1] == "the system's loader"


def test_a_library_that_is_no_cuda_runtime_or_too_old_is_refused(
    controls: fake.Controls, fake_path: str
) -> None:
    with pytest.raises(CudaLibraryError, match="not a CUDA runtime: it lacks cudaRuntimeGetVersion"):
        Runtime(ctypes.util.find_library("m") or "libm.so.6")
    controls.set(version=10020)
    with pytest.raises(CudaLibraryError, match=r"CUDA 10\.2; at least 11\.0 is needed"):
        Runtime(fake_path)


# -- calls ---------------------------------------------------------------------------------------------


def test_errors_have_a_number_a_function_and_a_meaning(runtime: Runtime, controls: fake.Controls) -> None:
    controls.set(malloc_result=2)
    with pytest.raises(CudaMemoryError, match="does not have enough free memory") as caught:
        runtime.malloc(1)
    assert caught.value.resource == "memory"
    assert (caught.value.result, caught.value.function) == (2, "cudaMalloc")
    controls.set(malloc_result=0, open_result=999)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle returned unrecognized error code"):
        runtime.ipc_open_mem_handle(bytes(64))
