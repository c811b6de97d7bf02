"""The binding agrees with the headers that NVIDIA's package ships, as a compiler lays them out."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
HOST_DEFINES = """
#define __device_builtin__
#define __cudart_builtin__
#define __host__
#define __device__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
"""
"""Declarations of another package of NVIDIA's, the compiler's."""
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def folder() -> Path | None:
    try:
        files = importlib.metadata.distribution(PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(each.locate())).parent for each in files if each.name == "driver_types.h"), None)


INCLUDE = folder()
pytestmark = pytest.mark.skipif(INCLUDE is None, reason=f"{PACKAGE} is not installed")

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
    assert INCLUDE is not None
    files = ("cuda_runtime_api.h", "driver_types.h")
    return COMMENT.sub(" ", "\n".join((INCLUDE / file).read_text(encoding="utf-8") for file in files))


def type_of(argument: str) -> Any:
    """``const void *src``, ``unsigned int flags __dv(0)``: what is constant does not show in a call."""
    spelt = re.sub(r"__dv\(.*", "", argument).replace("const ", "").strip()
    if not spelt.endswith("*"):
        spelt = re.sub(r"\w+$", "", spelt)
    return TYPES[re.sub(r"\s*\*", "*", " ".join(spelt.split()))]


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_function_is_bound_as_it_is_declared(name: str, text: str) -> None:
    pattern = (
        rf"extern __host__\s+(?:__cudart_builtin__\s+)?(const char\s*\*|cudaError_t)\s*CUDARTAPI\s+{name}"
    )
    found = re.search(rf"{pattern}\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", text)
    assert found, f"the header does not declare {name}"
    returns, *takes = PROTOTYPES[name]
    assert returns is TYPES[found[1].replace("const ", "").replace(" ", "")]
    assert takes == [type_of(each) for each in found[2].split(",") if each.strip() not in ("", "void")]


def test_exactly_the_functions_that_the_header_renames_have_a_second_name(text: str) -> None:
    declared = [*PROTOTYPES]
    renamed = dict(re.findall(r"#define\s+(\w+)\s+(\w+_v\d)\b", text))
    assert {name: renamed[name] for name in declared if name in renamed} == RENAMED


def spelt(name: str, prefix: str) -> str:
    return prefix + "".join(part.capitalize() for part in name.split("_"))


@pytest.mark.parametrize("result", Result)
def test_a_result_has_the_number_of_the_header(result: Result, text: str) -> None:
    name = "cudaSuccess" if result is Result.SUCCESS else spelt(result.name, "cudaError")
    assert re.search(rf"\b{name}\s*=\s*{result.value}\s*,", text), f"{name} is not {result.value}"


def test_flags_and_kinds_have_the_numbers_of_the_header(text: str) -> None:
    assert re.search(rf"cudaStreamCaptureModeRelaxed\s*=\s*{CaptureMode.RELAXED.value}\b", text)
    assert re.search(rf"cudaMemcpyDefault\s*=\s*{MemcpyKind.DEFAULT.value}\b", text)
    for name, value in (
        ("cudaEventDisableTiming", EventFlag.DISABLE_TIMING),
        ("cudaIpcMemLazyEnablePeerAccess", IpcFlag.LAZY_ENABLE_PEER_ACCESS),
        ("CUDA_IPC_HANDLE_SIZE", abi.IPC_HANDLE_BYTES),
    ):
        found = re.search(rf"#define\s+{name}\s+(\w+)", text)
        assert found is not None
        assert int(found[1], 0) == value


def test_structures_are_laid_out_as_by_the_compiler(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc)")
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    program = tmp_path / "sizes.c"
    program.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <driver_types.h>\n"
        'int main(void) { printf("%zu %zu %zu %zu", sizeof(cudaIpcMemHandle_t), sizeof(cudaUUID_t),'
        " offsetof(struct cudaDeviceProp, uuid), sizeof(struct cudaDeviceProp)); }\n"
    )
    binary = tmp_path / "sizes"
    subprocess.run(
        ["cc", f"-I{tmp_path}", f"-I{INCLUDE}", "-o", str(binary), str(program)],
        check=True,
        capture_output=True,
    )
    said = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    handle, uuid, at, whole = map(int, said.split())
    assert (handle, uuid, at) == (ctypes.sizeof(IpcMemHandle), abi.UUID_BYTES, Properties.uuid.offset)
    assert whole <= ctypes.sizeof(Properties)


def test_every_result_that_is_named_here_has_a_meaning() -> None:
    told = {*Result} - {Result.SUCCESS, Result.NOT_READY, Result.INVALID_VALUE}
    assert {*_MEANINGS} == told
