"""The header of a stored page: what the page is, and how its bytes are verified.

=================  ======  =======================================================================
field              bytes   content
=================  ======  =======================================================================
magic              4       ``KVPG``
version            1       of this table
checksum           1       0 none, 1 xxh3_64
proof              1       0 none, 1 HMAC-SHA256
reserved           1       0
header length      4       of the whole header; all numbers are little-endian
identity length    4
payload length     8       of the page's bytes, which follow the header
format             16      digest of the page format
series             16      id of the series, see :class:`~kvplug.transport.store.keys.Series`
identity                   token ids and parent, or the engine's own key
checksums          8 each  of each part of each layer, layer after layer; absent with checksum 0
proof              32      over the header before it and the page's bytes; absent with proof 0
=================  ======  =======================================================================

A reader knows the format, series and identity of the page it asks for. So it knows the header's length and
all of its bytes except the checksums and the proof, and compares what a store returns with them. It never
trusts a header."""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from kvplug.net.wire.checksum import digest
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.keys import Series
from kvplug.transport.store.results import MissReason

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"KVPG"
VERSION: Final = 1
MAX_IDENTITY_BYTES: Final = 1 << 20
CHECKSUM: Final = "xxh3_64"
_CHECKSUM_BYTES: Final = 8
_LOCK_FREE_BYTES: Final = 256 << 10
"""Parts of this size or larger are hashed without the interpreter's lock."""
_PROOF_BYTES: Final = 32
_FIXED = struct.Struct("<4sBBBBIIQ16s16s")


@attrs.frozen(kw_only=True)
class PageSeal:
    """How the pages of one deployment are protected. All writers and readers of a store use the same seal.

    Checksums detect accidents. A proof, which requires the secret, also detects forgery by a process that can
    write to the store."""

    checksums: bool = True
    """Whether headers have a checksum of each part of each layer."""
    secret: bytes | None = attrs.field(default=None, repr=False)
    """Key of the proof; ``None`` if pages have no proof."""

    @staticmethod
    def split(page: Buffer) -> tuple[bytes, bytes, bytes, int] | None:
        """Return the format digest, series id, identity and payload length in a header, or ``None`` if
        ``page`` does not begin with a header.

        For listing what a store holds. Readers do not use it: they compare a page with what they expect.
        """
        if len(page) < _FIXED.size:
            return None
        magic, version, _, _, _, length, identity_length, payload, form, series = _FIXED.unpack_from(page)
        if magic != MAGIC or version != VERSION or identity_length > MAX_IDENTITY_BYTES:
            return None
        identity = bytes(page[_FIXED.size : _FIXED.size + identity_length])
        if len(identity) != identity_length or length < _FIXED.size + identity_length:
            return None
        return form, series, identity, payload

    @staticmethod
    def has_digests(header: Buffer) -> bool:
        """Whether ``header`` is a header with checksums or a proof of the page's bytes. If so, pages with
        equal headers have equal bytes."""
        if PageSeal.split(header) is None:
            return False
        _, _, has_checksums, has_proof, *_ = _FIXED.unpack_from(header)
        return bool(has_checksums or has_proof)

    @functools.cached_property
    def id(self) -> bytes:
        """16 bytes that are equal for equal protection. Part of every key; does not reveal the secret."""
        checksum = CHECKSUM.encode() if self.checksums else b""
        if self.secret is None:
            return hashlib.sha256(b"kvplug seal" + checksum).digest()[:16]
        return hmac.digest(self.secret, b"kvplug seal" + checksum, "sha256")[:16]

    def header_length(self, form: PageFormat, identity: bytes) -> int:
        """Return the length in bytes of the header of a page with this format and identity."""
        checksums = form.num_layers * len(form.parts) * _CHECKSUM_BYTES if self.checksums else 0
        return _FIXED.size + len(identity) + checksums + (_PROOF_BYTES if self.secret is not None else 0)

    def beginnings(self, series: Series, identities: Sequence[bytes]) -> list[bytes]:
        """Return the first bytes of each page's header: all that a reader knows before it reads the page."""
        fixed: dict[int, bytes] = {}
        for identity in identities:
            if len(identity) not in fixed:
                fixed[len(identity)] = _FIXED.pack(
                    MAGIC,
                    VERSION,
                    1 if self.checksums else 0,
                    1 if self.secret is not None else 0,
                    0,
                    self.header_length(series.format, identity),
                    len(identity),
                    series.format.nbytes,
                    series.format.digest,
                    series.id,
                )
        return [fixed[len(identity)] + identity for identity in identities]

    def header(
        self, series: Series, identity: bytes, payload: memoryview, checksums: bytes | None = None
    ) -> bytes:
        """Return the header of a page whose bytes are ``payload``, layer after layer.

        ``checksums``: those of ``payload``, one after the other, if they were made before.
        """
        (header,) = self.beginnings(series, (identity,))
        return self.complete(header, series.format, payload, checksums)

    def complete(
        self, beginning: bytes, form: PageFormat, payload: memoryview, checksums: bytes | None = None
    ) -> bytes:
        """Return the header that begins with ``beginning``, from :meth:`beginnings`; see :meth:`header`."""
        header = beginning
        if self.checksums:
            header += b"".join(checksums_of(form, payload)) if checksums is None else checksums
        if self.secret is not None:
            header += _proof(self.secret, header, payload)
        return header

    def check_header(self, series: Series, identity: bytes, header: Buffer) -> MissReason | None:
        """Return why this is not the header of that page, or ``None`` if it is, as far as a header can
        tell."""
        return self.check_headers(series, (identity,), (bytes(header),))[0]

    def check_headers(
        self, series: Series, identities: Sequence[bytes], headers: Sequence[bytes]
    ) -> list[MissReason | None]:
        """:meth:`check_header` for several pages."""
        rest = self.header_length(series.format, b"") - _FIXED.size
        return [
            None
            if header.startswith(known) and len(header) == len(known) + rest
            else _difference(known, rest, header)
            for known, header in zip(self.beginnings(series, identities), headers, strict=True)
        ]

    def checksums_at(self, form: PageFormat, layers: range) -> slice:
        """Return where the checksums of these layers are in a header that has passed :meth:`check_header`; an
        empty slice if there are no checksums or layers."""
        if not self.checksums or not layers:
            return slice(0, 0)
        step = len(form.parts) * _CHECKSUM_BYTES
        proof = _PROOF_BYTES if self.secret is not None else 0
        after = (form.num_layers - layers.stop) * step + proof
        return slice(-after - len(layers) * step, -after or None)

    def check_proof(self, header: Buffer, payload: memoryview) -> MissReason | None:
        """Return why the page does not prove that its writer knew the secret, or ``None`` if it does or need
        not."""
        if self.secret is None:
            return None
        proof = _proof(self.secret, header[:-_PROOF_BYTES], payload)
        return None if hmac.compare_digest(bytes(header[-_PROOF_BYTES:]), proof) else MissReason.FORGED


def checksums_of(form: PageFormat, layers: memoryview) -> list[bytes]:
    """Return the checksum of each part of whole layers, layer after layer."""
    spans, step = form.spans, form.layer_nbytes
    is_small = max(count for _, count in spans) < _LOCK_FREE_BYTES
    hash_of = _hash_of() if is_small else functools.partial(digest, CHECKSUM)
    return [
        hash_of(layers[at + begin : at + begin + count])
        for at in range(0, len(layers), step)
        for begin, count in spans
    ]


@functools.cache
def _hash_of() -> Callable[[Buffer], bytes]:
    """Return the hash as one function that holds the interpreter's lock: four times as fast for small
    parts."""
    digest(CHECKSUM, b"")  # raises UnsupportedError
    import xxhash

    found: Callable[[Buffer], bytes] = xxhash.xxh3_64_digest
    return found


def _difference(known: bytes, rest: int, header: bytes) -> MissReason:
    """Return what is wrong with a header that is not ``known`` followed by ``rest`` more bytes."""
    if len(header) != len(known) + rest or header[: _FIXED.size] != known[: _FIXED.size]:
        return MissReason.FORMAT
    return MissReason.IDENTITY


def _proof(secret: bytes, header: Buffer, payload: memoryview) -> bytes:
    made = hmac.new(secret, b"kvplug page", hashlib.sha256)
    made.update(header)
    made.update(payload)
    return made.digest()
