"""A device in CPU memory that shows wrong stream orders: copies and kernels run as late as they may.

:func:`enable` makes torch know the device ``simulated``. Its tensors cannot be mixed with those of the CPU,
and nothing that was queued for it runs until something has to wait for it, or a seeded choice lets it.
"""

from kvplug_testing.simulated.streams import Event, Stream, enable, failing, seeded, stalled

__all__ = ["Event", "Stream", "enable", "failing", "seeded", "stalled"]
