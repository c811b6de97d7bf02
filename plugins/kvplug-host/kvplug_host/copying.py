"""Copies between slots and the caller's memory, with the checksums: all of them pass through here.

Two functions, over many pages and layers in one call, so that a native helper can take their place."""

from __future__ import annotations

from collections.abc import Sequence

from kvplug.transport import MissReason, PageFormat, PageMemory, PageRows, PageSeal


def save(memory: PageMemory, first: int, rows: PageRows) -> None:
    """Copy whole pages of ``memory``, from page ``first`` on, into the rows: one page each."""
    memory.gather(first, rows)


def load(
    seal: PageSeal,
    form: PageFormat,
    headers: Sequence[bytes],
    rows: PageRows,
    memory: PageMemory,
    first: int,
    layers: range,
) -> list[MissReason | None]:
    """Verify layers of pages, and copy them into ``memory``, from page ``first`` on.

    Args:
        headers: of each page; they have passed :meth:`PageSeal.check_header`.
        rows: the bytes of these layers, of one page each.

    Returns: for each page why its bytes are wrong; ``None`` if they are right, as far as the seal can tell.
        All pages are copied: what is wrong is found by the caller, who releases nothing of it.
    """
    checks = [
        seal.check_layers(form, header, layers.start, rows.row(index)) for index, header in enumerate(headers)
    ]
    memory.scatter(first, rows, layers)
    return checks
