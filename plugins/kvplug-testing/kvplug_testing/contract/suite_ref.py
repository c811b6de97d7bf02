"""Recreates a suite in another process, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug.kit import Kind
from kvplug_testing.sources import at_source


def suite_from_ref(suite_ref: Mapping[str, Any]) -> Any:
    """The suite that :meth:`.Contract.suite_ref` describes, made in another process."""
    cls, attributes = at_source(suite_ref["source"]), dict(suite_ref["attributes"])
    if suite_ref["around"]:  # it makes the subject, and this makes the suite
        around = at_source(suite_ref["around"])
        cls, attributes = around(Kind(suite_ref["kind"]), cls, **attributes), {}
    attributes |= {"transport": suite_ref["transport"], "options": suite_ref["options"]}
    return type(cls.__name__, (cls,), attributes)()
