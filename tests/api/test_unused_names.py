"""Every name has a user."""

from __future__ import annotations

import pytest
import unused_names


@pytest.fixture(scope="module", autouse=True)
def _whole_tree() -> None:
    if not (unused_names.ROOT / "plugins").exists():
        pytest.skip("the plugins are not here: this is the sdist of the core")


def test_a_name_of_a_door_has_a_user_outside_the_core() -> None:
    found = [name for name in unused_names.without_user_outside() if name not in unused_names.ALLOWED]
    assert not found, "take them from the door"


def test_a_name_of_the_core_has_a_user_that_is_no_test() -> None:
    found = [name for name in unused_names.unused() if name not in unused_names.ALLOWED]
    assert not found, "delete them; or give the reason in tests/api/unused_names.py"


def test_no_exception_is_made_for_a_name_that_needs_none() -> None:
    needed = {*unused_names.without_user_outside(), *unused_names.unused()}
    assert not unused_names.ALLOWED.keys() - needed
