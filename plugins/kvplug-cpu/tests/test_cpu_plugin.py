"""The plugin as a whole."""

from __future__ import annotations

import pytest

from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("cpu") == ()
