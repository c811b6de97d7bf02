"""Copies between slots and the caller's memory, with the checksums: all of them pass through here.

Compiled code does both at once where it was built and the memory can be reached from it (native/pages.c);
elsewhere Python does."""

from __future__ import annotations

from collections.abc import Sequence

from kvplug.transport import MissReason, PageFormat, PageMemory, PageRows, PageSeal
from kvplug_host.native.library import library


def save(seal: PageSeal, memory: PageMemory, first: int, rows: PageRows) -> Sequence[bytes | None]:
    """Copy whole pages of ``memory``, from page ``first`` on, into the rows: one page each.

    Returns: for each page its checksums, as :meth:`PageSeal.header` takes them.
    """
    form, compiled = memory.format, library()
    if compiled is not None and rows.nbytes == form.nbytes:
        places = memory.places(first, len(rows))
        if places is not None and len(places.writable) == len(rows) * places.page_tokens:
            made = compiled.save(form, rows, places, checksums=seal.checksums)
            if made is not None:
                return made
    memory.gather(first, rows)
    return [None] * len(rows)


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
    compiled = library()
    if compiled is not None and rows.nbytes == len(layers) * form.layer_nbytes:
        places = memory.places(first, len(rows))
        if places is not None:
            at = seal.checksums_at(form, layers)
            expected = b"".join([header[at] for header in headers])
            wrong = compiled.load(form, rows, places, layers, expected)
            if wrong is not None:
                return [MissReason.CORRUPT if each else None for each in wrong]
    checks = [
        seal.check_layers(form, header, layers.start, rows.row(index)) for index, header in enumerate(headers)
    ]
    memory.scatter(first, rows, layers)
    return checks
