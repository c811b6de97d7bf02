"""Capabilities: a claim that is not one is refused where it is written, not at the handshake."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import PluginError
from kvplug.transport import Capabilities


@pytest.mark.parametrize("given", ["cpu", "", 7, None, {"cpu", 7}, b"cpu"])
def test_devices_that_are_no_set_of_names_are_refused(given: Any) -> None:
    with pytest.raises(PluginError) as caught:
        Capabilities(devices=given)
    assert str(caught.value) == f"devices must be a set of names, such as {{'cpu'}}; got {given!r}"


@pytest.mark.parametrize("given", [{"cpu", "cuda"}, ("cpu", "cuda"), ["cuda", "cpu"]])
def test_devices_may_be_any_collection_of_names(given: Any) -> None:
    assert Capabilities(devices=given).devices == frozenset({"cpu", "cuda"})
