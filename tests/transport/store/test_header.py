"""Headers of pages: a wrong or forged page is detected, with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug.transport.store.copy import PageCopy
from kvplug.transport.store.format import PageFormat, Part, opaque_format
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageBuffers, PageRows
from kvplug.transport.store.results import MissReason

PARTS = (Part(name="key", dtype="uint8", shape=(4, 2)), Part(name="value", dtype="uint8", shape=(4, 3)))
FORM = PageFormat(page_tokens=4, num_layers=3, parts=PARTS)
PAYLOAD = bytes(range(FORM.nbytes))
SEALS = [
    PageSeal(),
    PageSeal(checksums=False),
    PageSeal(secret=b"secret"),
    PageSeal(checksums=False, secret=b"s"),
]


def series_of(seal: PageSeal) -> Series:
    return Series(FORM, b"0 of 1", seal.id)


def check(seal: PageSeal, series: Series, header: bytes, payload: bytes) -> MissReason | None:
    """As readers do."""
    reason = seal.check_header(series, b"identity", header) or seal.check_proof(header, memoryview(payload))
    return reason or check_layers(seal, header, payload, range(FORM.num_layers))


def check_layers(seal: PageSeal, header: bytes, payload: bytes, layers: range) -> MissReason | None:
    copy = PageCopy(PageBuffers.empty(FORM, 1), seal)
    row = memoryview(payload)
    copy.use(0, PageRows.dense(row, 1, len(row)), [header])
    return (copy.load(range(1), layers) or [None])[0]


@pytest.mark.parametrize("seal", SEALS)
def test_a_page_passes_as_what_it_is(seal) -> None:
    series = series_of(seal)
    header = seal.header(series, b"identity", memoryview(PAYLOAD))
    assert len(header) == seal.header_length(FORM, b"identity")
    assert check(seal, series, header, PAYLOAD) is None
    assert PageSeal.split(header) == (FORM.digest, series.id, b"identity", FORM.nbytes)


@pytest.mark.parametrize("seal", SEALS)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_turned_bit_is_found(seal, at, bit) -> None:
    series = series_of(seal)
    page = bytearray(seal.header(series, b"identity", memoryview(PAYLOAD)) + PAYLOAD)
    length = len(page) - len(PAYLOAD)
    at %= length if not seal.checksums and seal.secret is None else len(page)
    page[at] ^= 1 << bit
    found = check(seal, series, bytes(page[:length]), bytes(page[length:]))
    assert found is not None
    if at >= length:
        assert found is (MissReason.FORGED if seal.secret else MissReason.CORRUPT)


def test_pages_of_other_tokens_formats_or_protection_are_named() -> None:
    seal = SEALS[0]
    series = series_of(seal)
    header = seal.header(series, b"identity", memoryview(PAYLOAD))
    assert seal.check_header(series, b"identitx", header) is MissReason.IDENTITY
    assert seal.check_header(series, b"identity, longer", header) is MissReason.FORMAT
    assert seal.check_header(Series(opaque_format(FORM.nbytes)), b"identity", header) is MissReason.FORMAT
    assert seal.check_header(series, b"identity", header[:-1]) is MissReason.FORMAT
    for other in SEALS[1:]:
        assert other.check_header(series_of(other), b"identity", header) is MissReason.FORMAT


@pytest.mark.parametrize("seal", SEALS)
def test_equal_headers_mean_equal_bytes_if_they_have_digests(seal: PageSeal) -> None:
    payloads = PAYLOAD, bytes(len(PAYLOAD))
    one, other = (seal.header(series_of(seal), b"identity", memoryview(each)) for each in payloads)
    assert PageSeal.has_digests(one) is (one != other) is (seal.checksums or seal.secret is not None)
    assert not PageSeal.has_digests(b"") and not PageSeal.has_digests(bytes(1000))


def test_layers_are_checked_alone_and_a_wrong_one_spoils_no_other() -> None:
    seal, series = SEALS[0], series_of(SEALS[0])
    header = seal.header(series, b"identity", memoryview(PAYLOAD))
    wrong = bytearray(PAYLOAD)
    wrong[FORM.layer_nbytes] ^= 1
    found = [check_layers(seal, header, bytes(wrong), range(layer, layer + 1)) for layer in range(3)]
    assert found == [None, MissReason.CORRUPT, None]


def test_deployments_with_other_secrets_have_other_keys_and_no_id_shows_the_secret() -> None:
    assert len({seal.id for seal in SEALS}) == len(SEALS)
    assert PageSeal(secret=b"ours").id == PageSeal(secret=b"ours").id != PageSeal(secret=b"theirs").id
    assert b"ours" not in PageSeal(secret=b"ours").id and "ours" not in repr(PageSeal(secret=b"ours"))
