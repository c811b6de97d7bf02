"""Chains, series and keys."""

from __future__ import annotations

from array import array

from hypothesis import given, strategies as st

from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import KEY_BYTES, ChainMemo, Series

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=24)
ROOT = ChainMemo.root(b"model", b"salt")


@given(tokens=TOKENS, more=TOKENS, page=st.integers(1, 5))
def test_equal_prefixes_have_equal_chains_and_others_do_not(tokens, more, page) -> None:
    ours, longer = ChainMemo().chains_of(ROOT, tokens, page), ChainMemo().chains_of(ROOT, tokens + more, page)
    assert len(ours) == len(tokens) // page
    assert longer[: len(ours)] == ours
    assert ChainMemo().chains_of(ROOT, tokens + more, page, known=ours) == longer
    assert ChainMemo().chains_of(ROOT, array("i", tokens), page) == ours
    for at in range(len(ours)):
        changed = list(tokens)
        changed[at * page] ^= 1
        other = ChainMemo().chains_of(ROOT, changed, page)
        assert other[:at] == ours[:at]
        assert not set(other[at:]) & set(ours)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=12),
    page=st.integers(1, 3),
    most=st.integers(1, 9),
)
def test_what_is_remembered_of_chains_is_what_their_hashes_are_and_is_bounded(prompts, page, most) -> None:
    memo = ChainMemo(max_pages=most)
    for number, tokens in enumerate(prompts):
        root = ChainMemo.root(b"model", b"%d" % (number % 2))
        known = ChainMemo().chains_of(root, tokens[:4], page)
        for given_chains in ((), known):
            assert memo.chains_of(root, tokens, page, given_chains) == ChainMemo().chains_of(
                root, tokens, page
            )
        assert len(memo) <= max(1, most // 2) + 2 * 16


def test_what_else_determines_the_kv_is_in_the_chain() -> None:
    roots = {
        ChainMemo.root(*each)
        for each in ((b"model", b"salt"), (b"models", b"alt"), (b"model",), (b"", b"model"))
    }
    assert len(roots) == 4
    chains = {ChainMemo().chains_of(root, range(4), 4)[0] for root in roots}
    assert len(chains) == 4


def test_the_keys_of_a_chain_differ_by_format_shard_and_seal_and_give_the_chain_back() -> None:
    chain = ChainMemo().chains_of(ROOT, range(4), 4)[0]
    series = [
        Series(opaque_format(8), b"0 of 2"),
        Series(opaque_format(16), b"0 of 2"),
        Series(opaque_format(8), b"1 of 2"),
        Series(opaque_format(8), b"0 of ", b"2"),
        Series(opaque_format(8), b"0 of 2", b"seal"),
    ]
    assert len({each.key_of(chain) for each in series}) == len({each.id for each in series}) == 5
    for each in series:
        assert len(each.key_of(chain)) == KEY_BYTES
        assert each.key_of(each.key_of(chain)) == chain
        assert each.keys_of([chain, ROOT]) == [each.key_of(chain), each.key_of(ROOT)]
    assert Series(opaque_format(8), b"0 of 2") == series[0]
