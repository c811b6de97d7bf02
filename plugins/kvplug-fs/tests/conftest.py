from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from folders import open_store
from kvplug.transport import PageSeal
from kvplug.transport.store.executor import ExecutedStore


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes blocking stores, by default over this test's folder; they are closed after it."""
    with ExitStack() as stack:

        def make(path: Path = tmp_path, **options: Any) -> Any:
            store = open_store(path, **options)
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture
def whole(opened: Any) -> Iterator[ExecutedStore]:
    """A store of jobs over this test's folder, without checksums or secret of its own."""
    with ExecutedStore(opened(), name="fs", seal=PageSeal()) as store:
        yield store
