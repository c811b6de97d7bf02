"""Fake GPU libraries, compiled once."""

from __future__ import annotations

from kvplug_lab.gpu import fake
from kvplug_lab.gpu.fixtures import fixtures_of

nccl_path, _ = fixtures_of(fake.NCCL)
cudart_path, _ = fixtures_of(fake.CUDART)
