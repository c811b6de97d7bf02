"""NIXL, loaded quietly, and the environment that its libraries read while they are loaded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplug import TransportError
from kvplug_nixl.probe import INSTALL

_creating: Final = threading.Lock()
"""Held while the environment is changed."""
_arrays: Final[dict[tuple[int, ...], ctypes.Array[Any]]] = {}
"""Arrays of variables that were made, by their entries."""


@contextlib.contextmanager
def nixl(environment: Mapping[str, str]) -> Iterator[Any]:
    """The module ``nixl_cu12._api``, to make one agent and its backends.

    While the block runs, C libraries find these variables in the environment; then it is as before, so that
    programs which this process starts do not see them. ``os.environ`` does not change.

    Raises:
        TransportError: NIXL cannot be loaded, and why.
    """
    with _creating:
        # NIXL logs to stdout and stderr, each failure several times; failures are raised as errors instead.
        added = dict(environment)
        if is_quiet := "NIXL_LOG_LEVEL" not in os.environ:
            added["NIXL_LOG_LEVEL"] = "FATAL"
        raising = logging.raiseExceptions
        try:
            with _added(added):
                try:
                    import torch  # noqa: F401 - NIXL imports it as well, and fails later where it did so first
                    from nixl_cu12 import _api
                except ImportError as e:
                    raise TransportError(f"NIXL cannot be loaded: {e}; {INSTALL}") from e
                if is_quiet:
                    logging.getLogger("nixl").setLevel(logging.CRITICAL)
                yield _api
        finally:
            logging.raiseExceptions = raising  # NIXL's import changes it for the whole process


@contextlib.contextmanager
def _added(variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment of C libraries while the block runs.

    Before glibc 2.41 ``setenv`` frees the array in which ``getenv`` of another thread may be searching, and
    the process crashes; the AWS SDK calls ``getenv`` for each request. So the array is replaced as a whole.
    """
    environ = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ")
    ours = [_entry(f"{name}={value}") for name, value in variables.items()]
    environ.value = _array((*ours, *_entries(environ)))  # `getenv` takes the first one of a name
    try:
        yield
    finally:
        environ.value = _array(tuple(entry for entry in _entries(environ) if entry not in ours))


def _entries(environ: ctypes.c_void_p) -> tuple[int, ...]:
    """The addresses of the entries. The loop runs in C, so no other Python thread changes them meanwhile."""
    array = ctypes.cast(environ, ctypes.POINTER(ctypes.c_void_p))
    return tuple(iter(iter(array).__next__, None))


@functools.cache
def _entry(text: str) -> int:
    return _kept(ctypes.create_string_buffer(os.fsencode(text)))


def _array(entries: tuple[int, ...]) -> int:
    array = _arrays.get(entries)
    if array is None or tuple(array) != (*entries, None):  # setenv has changed a variable in it
        array = _arrays[entries] = (ctypes.c_void_p * (len(entries) + 1))(*entries)
    return _kept(array)


def _kept(made: ctypes.Array[Any]) -> int:
    """Return the address. The memory is never freed: C libraries may use it even after Python has ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return ctypes.addressof(made)
