"""The plugin as a whole: found, light to load, what its specs say, and documented."""

from __future__ import annotations

from kvplug_testing import check_plugin


def test_it_keeps_the_laws_of_plugins():
    assert check_plugin("transformers") == ()
