"""The fake CUDA runtime, compiled once, and pipes over it."""

from __future__ import annotations

import pytest

import cuda_ipc_ends
from kvplug_cuda_ipc.cudart.library import Runtime, load
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.fixtures import fixtures_of

fake_path, controls = fixtures_of(fake.CUDART)
pipe_pairs, local_pair, remote_pair, gated = cuda_ipc_ends.FIXTURES


@pytest.fixture
def runtime(fake_path: str, controls: fake.Controls) -> Runtime:
    return load(fake_path)
