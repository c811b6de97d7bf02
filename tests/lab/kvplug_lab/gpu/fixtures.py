"""Fixtures for tests with a fake library. A ``conftest.py`` defines them by name:

fake_path, controls = fixtures_of(fake.NCCL)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kvplug_lab.gpu.fake import Controls, FakeLibrary


def fixtures_of(library: FakeLibrary) -> tuple[Any, Any]:
    """``fake_path``, the path of the compiled library, and ``controls``, whose faults end with the test."""

    @pytest.fixture(scope="session")
    def fake_path(tmp_path_factory: pytest.TempPathFactory) -> str:
        if shutil.which("cc") is None:
            pytest.skip(f"there is no C compiler (cc) for the fake {library.file}")
        return library.build(tmp_path_factory.mktemp(library.folder))

    @pytest.fixture
    def controls(fake_path: str) -> Iterator[Controls]:
        made = Controls(fake_path)
        yield made
        made.reset()

    return fake_path, controls
