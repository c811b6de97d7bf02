"""The plugin as a whole: found, light to load, what its specs say, and documented."""

from __future__ import annotations

import pytest

from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("lookup") == ()
