"""The fake CUDA runtime, compiled once."""

from __future__ import annotations

import pytest

from kvplug_cuda_ipc.cudart.library import Runtime, load
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.fixtures import fixtures_of

fake_path, controls = fixtures_of(fake.CUDART)


@pytest.fixture
def runtime(fake_path: str, controls: fake.Controls) -> Runtime:
    return load(fake_path)
