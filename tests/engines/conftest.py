"""These tests need engines, each in an environment of its own: `tox run -e together-engines` makes them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("KVPLUG_TEST_ENGINES") else ["test_*.py"]
