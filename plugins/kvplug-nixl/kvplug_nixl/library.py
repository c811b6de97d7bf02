"""NIXL, loaded quietly, and the environment that its libraries read while they are loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplug import TransportError
from kvplug_nixl.probe import INSTALL

_creating: Final = threading.Lock()
"""Held while the environment is changed."""


@contextlib.contextmanager
def nixl(environment: Mapping[str, str]) -> Iterator[Any]:
    """The module ``nixl_cu12._api``, to make one agent and its backends.

    While the block runs, these variables are in the environment; then it is as before, so that programs which
    this process starts do not see them.

    Raises:
        TransportError: NIXL cannot be loaded, and why.
    """
    with _creating:
        # NIXL logs to stdout and stderr, each failure several times; what fails is raised, and said once.
        added = dict(environment)
        if is_quiet := "NIXL_LOG_LEVEL" not in os.environ:
            added["NIXL_LOG_LEVEL"] = "FATAL"
        before = dict(os.environ)
        os.environ.update(added)
        raising = logging.raiseExceptions
        try:
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
            for name in added.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: before[name] for name in added.keys() & before.keys()})
