"""Formats of pages: sizes, digests, plain form, differences."""

from __future__ import annotations

import attrs
import pytest

from kvplug.engine import LayoutError
from kvplug.transport.store.format import PageFormat, Part

KEY = Part(name="key", dtype="bfloat16", shape=(16, 3, 64), head_axis=1)
FORM = PageFormat(page_tokens=16, num_layers=5, parts=(KEY, attrs.evolve(KEY, name="value")))


def test_a_format_survives_its_plain_form_and_fields_of_a_newer_version_are_passed_over() -> None:
    plain = FORM.to_plain()
    assert PageFormat.from_plain(plain) == FORM
    assert PageFormat.from_plain({**plain, "of a newer version": 1}) == FORM


@pytest.mark.parametrize(
    "change",
    [
        {"page_tokens": 32},
        {"num_layers": 6},
        {"parts": (KEY,)},
        {"parts": (attrs.evolve(KEY, name="value"), KEY)},
        {"parts": (attrs.evolve(KEY, dtype="float16"), attrs.evolve(KEY, name="value"))},
        {"parts": (attrs.evolve(KEY, head_axis=None), attrs.evolve(KEY, name="value"))},
        {"block_format": "a kernel's"},
        {"version": 2},
    ],
)
def test_formats_that_differ_have_other_digests_and_a_description_of_what_differs(change) -> None:
    other = attrs.evolve(FORM, **change)
    assert other.digest != FORM.digest
    (difference,) = FORM.differences(other)
    assert difference.startswith(next(iter(change)))
    assert not FORM.differences(FORM)


def test_a_part_has_a_dtype_sizes_and_axes_that_exist() -> None:
    for wrong in (
        {"dtype": "float17"},
        {"shape": ()},
        {"shape": (0, 2)},
        {"head_axis": 3},
        {"token_axis": -1},
    ):
        with pytest.raises(LayoutError):
            attrs.evolve(KEY, **wrong)
    with pytest.raises(LayoutError, match="its own name"):
        attrs.evolve(FORM, parts=(KEY, KEY))
