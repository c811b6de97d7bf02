"""A resource that ran out is named, in whichever form the system or a library reports it."""

from __future__ import annotations

import errno
import os

import pytest

from kvplug.errors import ConfigError, PeerGoneError, ResourceExhaustedError, TransportError
from kvplug.net.exhaustion import NamedExhaustion


def of_system(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class ForeignError(Exception):
    """As ZeroMQ's: no OSError, with a number."""

    def __init__(self, number: int) -> None:
        self.errno = number


CASES = {
    "no descriptor": (of_system(errno.EMFILE), "descriptors", "RLIMIT_NOFILE is"),
    "a foreign error": (ForeignError(errno.EMFILE), "descriptors", "RLIMIT_NOFILE is"),
    "a library that is not loaded": (
        ImportError("libx.so: cannot open shared object file: Too many open files"),
        "descriptors",
        "RLIMIT_NOFILE is",
    ),
    "no thread": (RuntimeError("can't start new thread"), "threads", "can start no more threads"),
    "no memory": (of_system(errno.ENOMEM), "memory", "not enough free memory"),
    "no tensor": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        "memory",
        "not enough free memory",
    ),
    "no memory of a device": (
        RuntimeError("CUDA out of memory."),
        "memory",
        "RuntimeError: CUDA out of memory",
    ),
    "a full disk": (of_system(errno.ENOSPC), "space", "No space left on device"),
    "too large a file": (of_system(errno.EFBIG), "space", "File too large"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_ran_out_is_named_with_its_limit_and_the_cause_is_chained(case: str) -> None:
    error, what, message = CASES[case]
    expected = pytest.raises(ResourceExhaustedError, match=f"^connecting a pipe: .*{message}")
    with expected as caught, NamedExhaustion("connecting a pipe"):
        raise error
    assert caught.value.resource == what
    assert caught.value.errno == getattr(error, "errno", caught.value.errno)
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, TransportError)


OTHERS = {
    "a timeout": TimeoutError("timed out"),
    "a mistake": ValueError("can't start new thread"),
    "a peer that is gone": PeerGoneError("Too many open files, says the peer"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_error_passes_unchanged(case: str) -> None:
    error = OTHERS[case]
    assert NamedExhaustion.of(error) is None
    NamedExhaustion.check(error, "connecting a pipe")
    with pytest.raises(type(error)) as caught, NamedExhaustion("connecting a pipe"):
        raise error
    assert caught.value is error


def test_an_error_of_kvplug_with_such_a_cause_keeps_its_words_and_names_it() -> None:
    try:
        raise ConfigError("secret_file x") from of_system(errno.EMFILE)
    except ConfigError as e:
        found = NamedExhaustion.of(e, "a call")
    assert str(found).startswith("bad configuration: secret_file x; there is no free descriptor")
