"""The fake CUDA runtime, compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kvplug_cuda_ipc.cudart.library import Runtime, load
from kvplug_cuda_ipc.testing import fake

FAULTS = (
    "version",
    "devices",
    "gpu",
    "hold",
    "gate",
    "capturing",
    "delay_us",
    "malloc_result",
    "open_result",
    "copy_result",
)
FAULTS += ("fail_after", "fail_result", "exit_after", "freed_while_mapped")


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) for the fake CUDA runtime")
    return fake.build(tmp_path_factory.mktemp("cudart"))


@pytest.fixture
def controls(fake_path: str) -> Iterator[fake.Controls]:
    """The fake's in this process; whatever a test sets is taken back."""
    made = fake.Controls(fake_path)
    before = {name: made.get(name) for name in FAULTS}
    yield made
    made.set(**before)
    made.heal()


@pytest.fixture
def runtime(fake_path: str, controls: fake.Controls) -> Runtime:
    return load(fake_path)
