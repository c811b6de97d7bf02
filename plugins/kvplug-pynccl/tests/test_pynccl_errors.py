"""What NCCL's results mean, as errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvplug
from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug_pynccl.nccl import errors
from kvplug_pynccl.nccl.abi import Result
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
from kvplug_pynccl.nccl.library import Library

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
    } - {*vars(kvplug.errors)}
    assert {"NcclError", "NcclLibraryError"} <= named
    assert not {name for name in named if f"`{name}`" not in readme}
