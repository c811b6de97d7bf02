"""The laws of plugins, for those whose own tests do not judge them."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from kvplug_testing import check_plugin


@pytest.mark.full
@pytest.mark.parametrize("name", ["bench", "host"])
def test_a_plugin_keeps_the_laws_of_plugins(name: str) -> None:
    assert check_plugin(name) == ()


def test_ours_are_installed() -> None:
    assert {"cpu", "lookup", "transformers"} <= {entry.name for entry in entry_points(group="kvplug")}
