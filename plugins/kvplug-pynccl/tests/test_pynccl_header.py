"""The binding is what the header says that the installed package ships, and what the compiler makes of it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvplug_pynccl.nccl import abi
from kvplug_pynccl.nccl.abi import Config, DataType, Properties, RedOp, Result, UniqueId, Version
from kvplug_pynccl.nccl.errors import _ERRORS, _MEANINGS
from kvplug_pynccl.nccl.places import PACKAGE
from kvplug_pynccl.nccl.prototypes import FLOAT8_SINCE, OPTIONAL, PROTOTYPES
from nccl_header import Header


def folder() -> Path | None:
    try:
        files = importlib.metadata.distribution(PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "nccl.h"), None)


INCLUDE = folder()
pytestmark = pytest.mark.skipif(INCLUDE is None, reason=f"{PACKAGE} is not installed")


@pytest.fixture(scope="module")
def header() -> Any:
    return Header(INCLUDE)


@pytest.fixture(scope="module")
def version(header: Any) -> Version:
    return Version.of(header.number("NCCL_VERSION_CODE"))


POINTER = ctypes.POINTER
TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    "bool": ctypes.c_bool,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "int*": POINTER(ctypes.c_int),
    "cudaStream_t": ctypes.c_void_p,
    "ncclComm_t": ctypes.c_void_p,
    "ncclComm_t*": POINTER(ctypes.c_void_p),
    "ncclWindow_t": ctypes.c_void_p,
    "ncclWindow_t*": POINTER(ctypes.c_void_p),
    "ncclUniqueId": UniqueId,
    "ncclUniqueId*": POINTER(UniqueId),
    "ncclConfig_t*": POINTER(Config),
    "ncclCommProperties_t*": POINTER(Properties),
    "ncclGinType_t": ctypes.c_int,
    "ncclGinConnectionType_t": ctypes.c_int,
    "ncclResult_t": ctypes.c_int,
    "ncclResult_t*": POINTER(ctypes.c_int),
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
}


def type_of(spelt: str) -> Any:
    name, _, length = spelt.partition("[")
    return TYPES[name] * int(length[:-1]) if length else TYPES[name]


def spelt(ours: Any) -> dict[str, int]:
    """The members of an enumeration as the header spells them."""
    return {"nccl" + "".join(part.capitalize() for part in each.name.split("_")): each.value for each in ours}


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_function_is_bound_as_it_is_declared(name: str, header: Any, version: Version) -> None:
    declared = header.prototypes()
    if name in OPTIONAL:
        assert (name in declared) is (version >= OPTIONAL[name])
        if name not in declared:
            pytest.skip(f"NCCL {version} does not have it")
    returns, *takes = PROTOTYPES[name]
    assert returns is TYPES[declared[name].returns]
    assert takes == [TYPES[each] for each in declared[name].takes]


@pytest.mark.parametrize(
    ("ours", "theirs", "ends_with"),
    [(Result, "ncclResult_t", "ncclNumResults"), (DataType, "ncclDataType_t", "ncclNumTypes")],
)
def test_an_enumeration_has_the_numbers_of_the_header(
    ours: Any, theirs: str, ends_with: str, header: Any, version: Version
) -> None:
    declared = header.enum(theirs)
    known = declared.pop(ends_with)
    if version >= abi.HEADER:
        assert len(ours) == known
    assert {name: value for name, value in spelt(ours).items() if value < known}.items() <= declared.items()


def test_the_operators_have_the_numbers_of_the_header(header: Any) -> None:
    declared = header.enum("ncclRedOp_t")
    assert declared["ncclNumOps"] == len(RedOp)
    assert spelt(RedOp).items() <= declared.items()


def test_8_bit_floats_are_there_since_when_we_say(header: Any, version: Version) -> None:
    assert ("ncclFloat8e4m3" in header.enum("ncclDataType_t")) is (version >= FLOAT8_SINCE)


@pytest.mark.parametrize(
    ("ours", "prefix"), [(abi.WindowFlag, "NCCL_WIN_"), (abi.SuspendFlag, "NCCL_SUSPEND_")]
)
def test_flags_are_those_of_the_header(ours: Any, prefix: str, header: Any, version: Version) -> None:
    declared = header.macros(prefix)
    declared.pop("NCCL_WIN_REQUIRED_ALIGNMENT", None)
    mine = {f"{prefix}{name}": each.value for name, each in ours.__members__.items()}
    assert declared.items() <= mine.items()
    if version >= abi.HEADER:
        assert declared == mine


def test_constants_are_those_of_the_header(header: Any) -> None:
    assert header.number("NCCL_UNIQUE_ID_BYTES") == abi.UNIQUE_ID_BYTES == ctypes.sizeof(UniqueId)
    assert header.macro("NCCL_CONFIG_UNDEF_INT") == "INT_MIN" and abi.UNDEFINED == -(2**31)


@pytest.mark.parametrize(("ours", "theirs"), [(Config, "ncclConfig_t"), (Properties, "ncclCommProperties_t")])
def test_a_structure_has_the_fields_of_the_header(
    ours: Any, theirs: str, header: Any, version: Version
) -> None:
    if ours is Properties and version < OPTIONAL["ncclCommQueryProperties"]:
        pytest.skip(f"NCCL {version} does not have it")
    declared = [(name, type_of(spelt)) for name, spelt in header.struct(theirs)]
    mine = [(name, kind) for name, kind in ours._fields_]
    both = min(len(declared), len(mine))  # fields are only ever appended
    assert mine[:both] == declared[:both]
    if version == abi.HEADER:
        assert len(mine) == len(declared)


def test_a_config_is_initialised_as_the_header_does(header: Any, version: Version) -> None:
    declared = header.initialiser("NCCL_CONFIG_INITIALIZER")
    config = Config()
    magic = declared[1] if declared[1].startswith("0x") else header.macro(declared[1])
    assert (declared[0], int(magic, 0)) == ("sizeof(ncclConfig_t)", abi.API_MAGIC)
    assert (config.size, config.magic) == (ctypes.sizeof(Config), abi.API_MAGIC)
    assert config.version == abi.HEADER.code
    values = {"NCCL_CONFIG_UNDEF_INT": abi.UNDEFINED, "NCCL_CONFIG_UNDEF_PTR": None}
    for (name, _), value in zip(Config._fields_[3:], declared[3:], strict=False):
        assert getattr(config, name) == values[value]


def test_every_result_that_is_a_failure_has_an_error() -> None:
    assert {*_ERRORS} == {*_MEANINGS} == {*Result} - {Result.SUCCESS, Result.IN_PROGRESS}


PROGRAM = """
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <nccl.h>
{properties}
#define ENUM(name) printf("\\"%s\\": %lld,\\n", #name, (long long)name);
#define SIZE(type) printf("\\"sizeof %s\\": %zu,\\n", #type, sizeof(type));
#define FIELD(type, field) printf("\\"%s.%s\\": %zu,\\n", #type, #field, offsetof(type, field));
int main(void) {{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    puts("{{");
    {lines}
    printf("\\"blocking\\": %d, \\"magic\\": %u}}\\n", config.blocking, config.magic);
    return 0;
}}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
def test_the_compiler_lays_it_out_as_ctypes_does(header: Any, version: Version, tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime.h").write_text(
        "#pragma once\n#include <stddef.h>\n#define CUDART_VERSION 12000\n"
        "typedef struct CUstream_st *cudaStream_t;\n"
        "typedef struct CUevent_st *cudaEvent_t;\n"
    )
    for name in ("cuda_fp16.h", "cuda_fp8.h"):
        (tmp_path / name).write_text("")
    (tmp_path / "cuda_bf16.h").write_text("#define __CUDA_BF16_TYPES_EXIST__\n")
    expected = {
        "sizeof ncclUniqueId": ctypes.sizeof(UniqueId),
        "sizeof ncclResult_t": ctypes.sizeof(ctypes.c_int),
        "sizeof ncclDataType_t": ctypes.sizeof(ctypes.c_int),
        "sizeof ncclRedOp_t": ctypes.sizeof(ctypes.c_int),
    }
    for ours, theirs in ((Result, "ncclResult_t"), (DataType, "ncclDataType_t"), (RedOp, "ncclRedOp_t")):
        expected |= {name: value for name, value in spelt(ours).items() if name in header.enum(theirs)}
    lines = [f"ENUM({name})" for name in expected if not name.startswith("sizeof")]
    lines += [f"SIZE({name.removeprefix('sizeof ')})" for name in expected if name.startswith("sizeof")]
    properties = ""
    for ours, theirs in ((Config, "ncclConfig_t"), (Properties, "ncclCommProperties_t")):
        if ours is Properties and version < abi.HEADER:
            continue
        declared_fields = header.struct(theirs)
        if ours is Properties:
            # Its own header is C++ only; the structure as it stands there is C.
            body = "".join(
                f"{'int' if kind.startswith('nccl') else kind.partition('[')[0]} {name}"
                f"{''.join(kind.partition('[')[1:])};"
                for name, kind in declared_fields
            )
            properties = f"typedef struct {{{body}}} ncclCommProperties_t;"
        known = {name for name, _ in declared_fields}
        if version >= abi.HEADER:
            lines.append(f"SIZE({theirs})")
            expected[f"sizeof {theirs}"] = ctypes.sizeof(ours)
        for name, _ in ours._fields_:
            if name in known:
                lines.append(f"FIELD({theirs}, {name})")
                expected[f"{theirs}.{name}"] = getattr(ours, name).offset
    source = tmp_path / "layout.c"
    source.write_text(PROGRAM.format(properties=properties, lines="\n    ".join(lines)))
    program = tmp_path / "layout"
    command = ["cc", "-std=c11", f"-I{tmp_path}", f"-I{INCLUDE}", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=60)
    printed = json.loads(subprocess.run([program], check=True, capture_output=True, timeout=60).stdout)
    assert printed.pop("blocking") == abi.UNDEFINED
    assert printed.pop("magic") == abi.API_MAGIC
    assert printed == expected
