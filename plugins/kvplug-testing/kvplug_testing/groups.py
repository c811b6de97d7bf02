"""Process groups whose ranks are all in one process, for tests of queues and communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from kvplug import StatelessGroup


@contextmanager
def local_groups(timeout: float) -> Iterator[Callable[[int], list[StatelessGroup]]]:
    """Yields a function that makes a group of a given size, and returns one object per rank. Groups end with
    the block.
    """
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
