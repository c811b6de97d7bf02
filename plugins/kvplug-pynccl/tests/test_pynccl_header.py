"""The binding is what the header of NVIDIA's package declares, and what the compiler makes of it."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import c_header
from kvplug_pynccl.nccl import abi
from kvplug_pynccl.nccl.abi import Config, DataType, RedOp, Result, UniqueId
from kvplug_pynccl.nccl.errors import _ERRORS, _MEANINGS
from kvplug_pynccl.nccl.places import PACKAGE
from kvplug_pynccl.nccl.prototypes import PROTOTYPES

FOLDER = c_header.folder_of(PACKAGE, "nccl.h")
pytestmark = pytest.mark.skipif(FOLDER is None, reason=f"{PACKAGE} is not installed")
INCLUDE = FOLDER or Path()

POINTER = ctypes.POINTER
TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "int*": POINTER(ctypes.c_int),
    "cudaStream_t": ctypes.c_void_p,
    "ncclComm_t": ctypes.c_void_p,
    "ncclComm_t*": POINTER(ctypes.c_void_p),
    "ncclUniqueId": UniqueId,
    "ncclUniqueId*": POINTER(UniqueId),
    "ncclConfig_t*": POINTER(Config),
    "ncclResult_t": ctypes.c_int,
    "ncclResult_t*": POINTER(ctypes.c_int),
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
}


@pytest.fixture(scope="module")
def text() -> str:
    return c_header.text_of(INCLUDE / "nccl.h", *sorted((INCLUDE / "nccl_device").glob("*.h")))


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_function_is_bound_as_it_is_declared(name: str, text: str) -> None:
    returns = r"(const char\s*\*|ncclResult_t|void)\s+(?:__host__\s+)?"
    assert [*PROTOTYPES[name]] == c_header.signature(text, name, returns, TYPES)


def test_every_result_that_is_a_failure_has_an_error() -> None:
    assert {*_ERRORS} == {*_MEANINGS} == {*Result} - {Result.SUCCESS, Result.IN_PROGRESS}


FLAGS = {"NCCL_SUSPEND_": abi.SuspendFlag}
MAIN = """
static ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
config.version = %d;
for (size_t at = 0; at < sizeof config; at++) printf("%%02x", ((unsigned char *)&config)[at]);
puts("");
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
def test_what_has_a_number_a_size_or_a_place_has_it_as_the_compiler_says(text: str, tmp_path: Path) -> None:
    expected: dict[str, Any] = {
        "NCCL_UNIQUE_ID_BYTES": abi.UNIQUE_ID_BYTES,
        "NCCL_CONFIG_UNDEF_INT": abi.UNDEFINED,
        "sizeof(ncclUniqueId)": ctypes.sizeof(UniqueId),
        **{f"sizeof({name})": ctypes.sizeof(kind) for name, kind in TYPES.items() if kind is ctypes.c_int},
    }
    for ours, count in ((Result, "ncclNumResults"), (DataType, "ncclNumTypes"), (RedOp, "ncclNumOps")):
        expected[count] = len(ours)
        for each in ours:
            expected["nccl" + "".join(part.capitalize() for part in each.name.split("_"))] = each.value
    for prefix, flags in FLAGS.items():
        mine = {f"{prefix}{name}": each.value for name, each in flags.__members__.items()}
        assert {*re.findall(rf"#define\s+({prefix}\w+)\s+(?:0x)?\d", text)} == {*mine}
        expected |= mine
    expected["sizeof(ncclConfig_t)"] = ctypes.sizeof(Config)
    for field, *_ in Config._fields_:
        expected[f"offsetof(ncclConfig_t, {field})"] = getattr(Config, field).offset
    for name, code in (
        (
            "cuda_runtime.h",
            "#include <stddef.h>\n#define CUDART_VERSION 12000\n typedef void *cudaStream_t, *cudaEvent_t;\n",
        ),
        ("cuda_fp16.h", ""),
        ("cuda_fp8.h", ""),
        ("cuda_bf16.h", "#define __CUDA_BF16_TYPES_EXIST__\n"),
    ):
        (tmp_path / name).write_text(code)
    initial, *numbers = c_header.compiled(
        "#include <nccl.h>", MAIN % abi.HEADER.code, expected, tmp_path, INCLUDE
    )
    assert dict(zip(expected, map(int, numbers), strict=True)) == expected
    assert initial == bytes(Config()).hex(), "the config is not initialised as the header does"
