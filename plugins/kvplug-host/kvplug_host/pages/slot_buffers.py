"""Memory of the store that its user fills: a put of it copies nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from kvplug.transport import PageFormat, PageRows, ReservedPages
from kvplug_host.arena.slots import Slot


class SlotBuffers(ReservedPages):
    """Pages in slots of one size that belong to the caller of ``allocate`` until they are put or freed."""

    def __init__(
        self,
        form: PageFormat,
        buffer: memoryview,
        slots: Sequence[Slot],
        segment_bytes: int,
        abandon: Callable[[list[Slot | None]], None],
    ) -> None:
        """``abandon``: called with the slots that are left when the caller drops this object, in any thread
        and at any moment."""
        self._slots: list[Slot | None] = [*slots]
        weakref.finalize(self, abandon, self._slots).atexit = False  # before an interrupt can lose them
        super().__init__(form, PageRows(buffer, [slot.offset for slot in slots], form.nbytes))
        self.pitch = slots[0].chunk.size.slot_bytes if slots else 0
        self.piece_bytes = segment_bytes
        self.is_put = False

    def take(self, index: int, nbytes: int) -> Slot | None:
        """With the store's lock: the slot of a page, which is the store's from now on.

        ``None``: it was taken, or has not ``nbytes`` for the page and its header.
        """
        slot = self._slots[index]
        if slot is None or slot.nbytes < nbytes:
            return None
        self._slots[index] = None
        return slot

    def take_all(self) -> list[Slot]:
        """With the store's lock: all slots that are left."""
        slots = [slot for slot in self._slots if slot is not None]
        self._slots[:] = [None] * len(self._slots)
        return slots
