"""The fake NCCL, compiled once, a new release and an old one; and pipes and communicators over it."""

from __future__ import annotations

import pytest

import pynccl_ends
import pynccl_group
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.fixtures import fixtures_of
from kvplug_pynccl.nccl.library import Library, load

fake_path, controls = fixtures_of(fake.NCCL)
old_path, _ = fixtures_of(fake.OLD_NCCL)
pipe_pairs, local_pair, remote_pair, gated = pynccl_ends.FIXTURES
groups, ranks, local_ranks = pynccl_group.groups, pynccl_group.ranks, pynccl_group.local_ranks


@pytest.fixture
def nccl(fake_path: str, controls: fake.Controls) -> Library:
    return load(fake_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pipes have begun to send and receive: the functions of NCCL that were called."""
    called: list[str] = []
    for name in ("send", "recv"):
        function = getattr(Library, name)
        monkeypatch.setattr(Library, name, lambda *a, n=name, f=function: (called.append(n), f(*a))[1])
    return called
