"""The connector "lookup" keeps the laws, over the pipe "cpu" and the lookup buffer "simple"."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from kvplug import IntegrityError
from kvplug_lookup.connector.load import Load
from kvplug_testing import ConnectorContract


class TestLookup(ConnectorContract):
    connector = "lookup"
    config = MappingProxyType({"transport": "cpu", "lookup_buffer": "simple", "connect_timeout_s": 20})
    injects_into_own = True

    _refuses = False

    @pytest.fixture(autouse=True)
    def _own_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the role "both" an entry crosses no pipe: it is refused where it is handed to the load."""
        begin: Callable[..., Any] = Load.begin

        def refuse(load: Load, header: Any) -> None:
            if self._refuses:
                raise IntegrityError("the test wants it so")
            begin(load, header)

        monkeypatch.setattr(Load, "begin", refuse)

    def inject_fault(self, how: str) -> None:
        super().inject_fault(how)
        self._refuses = how == "fail"
