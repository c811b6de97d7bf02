"""The module that ``pytest --kvplug-transport NAME`` collects: the suites of the named subjects."""

from __future__ import annotations

from kvplug_testing.contract import suites

globals().update({suite.__name__: suite for suite in suites.chosen})
