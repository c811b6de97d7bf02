from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug import UnsupportedError
from kvplug_lookup.buffer.index import TokenIndex, token_array

M61 = 2**61 - 1  # Python's hash of an int is taken modulo this prime


def test_an_empty_query_matches_nothing_and_an_empty_entry_is_refused():
    index = TokenIndex()
    index.insert(0, [1])
    assert index.match([]) == 0
    assert index.oldest_match([]) is None
    assert index.longest_match([], min_tokens=0) is None
    with pytest.raises(ValueError, match="without tokens"):
        index.insert(5, [])
    with pytest.raises(ValueError, match="already"):
        index.insert(0, [2])


@pytest.mark.parametrize(
    "tokens",
    [[1.0, 2.0], [True, False], ["a"], [2**63], [2**70], np.array([1.5]), [2**63, -1], [None], [[1], [2, 3]]],
)
def test_what_is_not_a_64_bit_integer_is_no_token(tokens):
    with pytest.raises(UnsupportedError):
        token_array(tokens)


def test_tokens_may_be_any_integer_sequence_or_array():
    for tokens in ([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 0, 2])[::2]):
        assert token_array(tokens).tolist() == [1, 2]
    assert token_array([]).size == 0
    assert token_array(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]


def test_memory_does_not_grow_with_entries_that_come_and_go():
    index = TokenIndex()

    def come_and_go(number):
        for entry_id in range(1000 * number, 1000 * (number + 1)):
            index.insert(entry_id + 1, [entry_id % 4 + 1, entry_id])
            index.insert(-entry_id - 1, [1, 2], b"%d" % entry_id)
            assert index.remove(-entry_id - 1) and not index.remove(-entry_id - 1)
            index.remove(entry_id - 3)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = come_and_go(0)
        assert come_and_go(1) - before < 20_000
    finally:
        tracemalloc.stop()
    assert len(index) == 4


def test_a_long_chain_of_prefixes_needs_no_recursion():
    index = TokenIndex()
    prompt = list(range(3000))
    for length in range(3000, 0, -1):
        index.insert(3000 - length, prompt[:length])
    assert index.match(prompt) == 3000
    assert index.oldest_match(prompt[:1]) == 0
    for length in range(1, 3001):
        index.remove(3000 - length)
    assert len(index) == 0


def test_finding_takes_as_many_steps_among_many_entries_as_among_few():
    def steps(count):
        """Calls, of Python functions and of C ones, that a hundred matches among ``count`` entries make."""
        rng = np.random.default_rng(3)
        system = rng.integers(0, 50_000, 300)
        index, prompts = TokenIndex(), []
        for entry_id in range(count):
            prompt = np.concatenate((system, rng.integers(0, 50_000, 100)))
            index.insert(entry_id, prompt)
            prompts.append(prompt)
        calls = 0

        def count_call(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            found = [index.match(prompts[at]) for at in range(0, count, count // 100)]
        finally:
            sys.setprofile(before)
        assert found == [400] * 100
        return calls

    # Times are measured by benchmarks/lookup.py; a linear scan would take 50 times the steps.
    assert steps(5000) <= 1.1 * steps(100)


class Model:
    """The law, as a list that is searched from end to end."""

    def __init__(self):
        self.entries = {}
        self.suspended = set()

    @staticmethod
    def common(a, b):
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        return n

    def of(self, extra):
        return {i: key for i, (key, e) in self.entries.items() if e == extra}

    def match(self, query, extra):
        return max((self.common(key, query) for key in self.of(extra).values()), default=0)

    def oldest_match(self, query, extra):
        found = [
            i
            for i, key in self.of(extra).items()
            if i not in self.suspended and query and self.common(key, query) == min(len(key), len(query))
        ]
        return min(found, default=None)


TOKENS = st.lists(st.sampled_from([1, 2, 1 + M61, -1, -2]), min_size=1, max_size=7).map(tuple)
EXTRA = st.sampled_from([b"", b"x"])


class IndexAgainstList(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index, self.model, self.next_id, self.gone = TokenIndex(), Model(), 0, []

    def key(self, data):
        """New tokens, or those of an entry."""
        held = sorted(self.model.entries)
        if held and data.draw(st.booleans()):
            return self.model.entries[data.draw(st.sampled_from(held))]
        return data.draw(TOKENS), data.draw(EXTRA)

    @rule(data=st.data())
    def insert(self, data):
        tokens, extra = self.key(data)
        self.index.insert(self.next_id, tokens, extra)
        self.model.entries[self.next_id] = (tokens, extra)
        self.next_id += 1

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def remove(self, data):
        entry_id = data.draw(st.sampled_from(sorted(self.model.entries)))
        assert self.index.remove(entry_id)
        self.gone.append((entry_id, self.model.entries.pop(entry_id)))
        self.model.suspended.discard(entry_id)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def put_back(self, data):
        entry_id, (tokens, extra) = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        self.index.insert(entry_id, tokens, extra)
        self.model.entries[entry_id] = (tokens, extra)

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def suspend(self, data):
        entry_id = data.draw(st.sampled_from(sorted(self.model.entries)))
        self.index.suspend(entry_id)
        self.model.suspended.add(entry_id)

    @rule(data=st.data())
    def resume(self, data):
        """Also an entry that is not suspended, or gone."""
        entry_id = data.draw(st.integers(0, self.next_id))
        self.index.resume(entry_id)
        self.model.suspended.discard(entry_id)

    @rule(data=st.data())
    def ask(self, data):
        query, extra = self.key(data)
        longest = self.model.match(query, extra)
        assert self.index.match(query, extra) == longest
        assert self.index.oldest_match(query, extra) == self.model.oldest_match(query, extra)
        found = self.index.longest_match(query, extra)
        if not longest:
            assert found is None
            return
        sharing = {i for i, key in self.model.of(extra).items() if self.model.common(key, query) == longest}
        free = sharing - self.model.suspended
        assert found is not None and found[1] == longest
        assert found[0] == min(free) if free else found[0] in sharing
        assert self.index.longest_match(query, extra, longest + 1) is None

    @rule(extra=EXTRA)
    def ask_for_any(self, extra):
        free = self.model.of(extra).keys() - self.model.suspended
        assert self.index.oldest(extra) == min(free, default=None)

    @invariant()
    def as_many_as_the_model(self):
        assert set(self.index) == self.model.entries.keys()


TestIndexAgainstList = IndexAgainstList.TestCase
TestIndexAgainstList.settings = settings(
    max_examples=3 * settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)
