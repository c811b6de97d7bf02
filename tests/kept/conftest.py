"""The kept wheels, installed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def kept(site: Any) -> Any:
    """A place where all wheels are installed, as pip unpacks them."""
    for path in Path(__file__).parent.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site.folder / "site")
    return site
