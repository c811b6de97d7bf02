"""A device in CPU memory that shows wrong stream orders: copies and kernels run as late as they may.

:func:`enable` makes torch know the device ``simulated``. Its tensors cannot be mixed with those of the CPU,
and nothing that was queued for it runs until something has to wait for it, or a seeded choice lets it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvplug_testing.simulated.streams import Event, Stream, choosing, failing, stalled

__all__ = ["Event", "Stream", "enable", "failing", "seeded", "stalled"]


def enable() -> None:
    """Make torch know the device, in this process. Idempotent."""
    from kvplug_testing.simulated.tensors import register

    register()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch know the device, and let the choices in the block be those of this seed.

    What was queued before runs first.
    """
    enable()
    with choosing(seed):
        yield
