"""The binding agrees with the headers that NVIDIA's package ships, as a compiler lays them out."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import c_header
from kvplug_cuda_ipc.cudart import abi
from kvplug_cuda_ipc.cudart.abi import (
    CaptureMode,
    EventFlag,
    IpcFlag,
    IpcMemHandle,
    MemcpyKind,
    Properties,
    Result,
)
from kvplug_cuda_ipc.cudart.errors import _MEANINGS
from kvplug_cuda_ipc.cudart.prototypes import PROTOTYPES, RENAMED

PACKAGE = "nvidia-cuda-runtime-cu12"
FOLDER = c_header.folder_of(PACKAGE, "driver_types.h")
pytestmark = pytest.mark.skipif(FOLDER is None, reason=f"{PACKAGE} is not installed")
INCLUDE = FOLDER or Path()

TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "cudaError_t": ctypes.c_int,
    "enum cudaMemcpyKind": ctypes.c_int,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "void**": ctypes.POINTER(ctypes.c_void_p),
    "int*": ctypes.POINTER(ctypes.c_int),
    "enum cudaStreamCaptureMode*": ctypes.POINTER(ctypes.c_int),
    "cudaStream_t": ctypes.c_void_p,
    "cudaEvent_t": ctypes.c_void_p,
    "cudaEvent_t*": ctypes.POINTER(ctypes.c_void_p),
    "cudaIpcMemHandle_t": IpcMemHandle,
    "cudaIpcMemHandle_t*": ctypes.POINTER(IpcMemHandle),
    "struct cudaDeviceProp*": ctypes.POINTER(Properties),
}


@pytest.fixture(scope="module")
def text() -> str:
    return c_header.text_of(INCLUDE / "cuda_runtime_api.h")


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_function_is_bound_as_it_is_declared(name: str, text: str) -> None:
    returns = r"extern __host__\s+(?:__cudart_builtin__\s+)?(const char\s*\*|cudaError_t)\s*CUDARTAPI"
    assert [*PROTOTYPES[name]] == c_header.signature(text, name, returns, TYPES)


def test_exactly_the_functions_that_the_header_renames_have_a_second_name(text: str) -> None:
    renamed = dict(re.findall(r"#define\s+(\w+)\s+(\w+_v\d)\b", text))
    assert {name: renamed[name] for name in PROTOTYPES if name in renamed} == RENAMED


def test_every_result_that_is_named_here_has_a_meaning() -> None:
    assert {*_MEANINGS} == {*Result} - {Result.SUCCESS, Result.NOT_READY, Result.INVALID_VALUE}


EXPECTED = {
    "cudaSuccess": Result.SUCCESS,
    **{
        "cudaError" + "".join(part.capitalize() for part in each.name.split("_")): each.value
        for each in Result
        if each is not Result.SUCCESS
    },
    "cudaStreamCaptureModeRelaxed": CaptureMode.RELAXED,
    "cudaMemcpyDefault": MemcpyKind.DEFAULT,
    "cudaEventDisableTiming": EventFlag.DISABLE_TIMING,
    "cudaIpcMemLazyEnablePeerAccess": IpcFlag.LAZY_ENABLE_PEER_ACCESS,
    "CUDA_IPC_HANDLE_SIZE": abi.IPC_HANDLE_BYTES,
    "sizeof(cudaIpcMemHandle_t)": ctypes.sizeof(IpcMemHandle),
    "sizeof(cudaUUID_t)": abi.UUID_BYTES,
    "offsetof(struct cudaDeviceProp, uuid)": Properties.uuid.offset,
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
def test_what_has_a_number_a_size_or_a_place_has_it_as_the_compiler_says(tmp_path: Path) -> None:
    defines = "".join(
        f"#define __{each}__\n" for each in ("device_builtin", "cudart_builtin", "host", "device")
    )
    aligned = "__attribute__((aligned(n)))"
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt" / "host_defines.h").write_text(  # of another package of NVIDIA's, the compiler's
        f"{defines}#define __align__(n) {aligned}\n#define __builtin_align__(n) {aligned}\n"
    )
    asked = [*EXPECTED, "sizeof(struct cudaDeviceProp)"]
    printed = c_header.compiled("#include <driver_types.h>", "", asked, tmp_path, INCLUDE)
    *numbers, whole = map(int, printed)
    assert dict(zip(EXPECTED, numbers, strict=True)) == EXPECTED
    assert whole <= ctypes.sizeof(Properties)
