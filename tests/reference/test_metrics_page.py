"""The page of metrics has what the code counts."""

from __future__ import annotations

import doc_metrics


def test_the_tables_are_what_is_made_of_the_code() -> None:
    page = doc_metrics.PAGE.read_text(encoding="utf-8")
    assert doc_metrics.refreshed(page) == page, "run: python docs/tools/doc_metrics.py"
    assert "| `kvplug_load_duration_seconds` | `load` |" in page
