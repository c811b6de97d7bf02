"""Groups whose ranks are all in one process, for tests of what is made over a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from kvplug import StatelessGroup


@contextmanager
def local_groups(timeout: float) -> Iterator[Callable[[int], list[StatelessGroup]]]:
    """Makes groups of as many ranks as it is told: the group as each rank has it. They end with the block."""
    with ExitStack() as stack:

        def make(world_size: int) -> list[StatelessGroup]:
            listener = StatelessGroup.listen("unix:")

            def one(rank: int) -> StatelessGroup:
                address = listener.contact if rank else listener
                return StatelessGroup.create(address, rank=rank, world_size=world_size, timeout=timeout)

            with ThreadPoolExecutor(world_size) as pool:
                made = list(pool.map(one, range(world_size)))
            for group in made:
                stack.callback(group.abort)
            return made

        yield make
