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

    While the block runs, these variables are in the environment, as far as it has none of that name; then
    they are gone, so that programs which this process starts do not see them.

    Raises:
        TransportError: NIXL cannot be loaded, and why.
    """
    with _creating:
        # NIXL logs to stdout and stderr, each failure several times; what fails is raised, and said once.
        added = {**environment, "NIXL_LOG_LEVEL": "FATAL"}
        added = {key: value for key, value in added.items() if key not in os.environ}
        os.environ.update(added)
        raising = logging.raiseExceptions
        try:
            try:
                from nixl_cu12 import _api
            except ImportError as e:
                raise TransportError(f"NIXL cannot be loaded: {e}; {INSTALL}") from e
            if "NIXL_LOG_LEVEL" in added:
                logging.getLogger("nixl").setLevel(logging.CRITICAL)
            yield _api
        finally:
            logging.raiseExceptions = raising  # NIXL's import changes it for the whole process
            for key in added:
                os.environ.pop(key, None)
