"""A store, or an end that reaches it, has proved its identity and lies (law ALL-10).

One message of one of the pipes is changed. Each call of both ends must end in time, and what it returns must
be an answer to what was asked.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import attrs

from kvplug_testing import peers, waits
from kvplug_testing.contract.lied_to import LiedToOverPipes, report_lies
from kvplug_testing.contract.lookup.entries import Put, Sink, entry, shared
from kvplug_testing.contract.lookup.suite import LookupSuite, insert
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.falsehood import Falsehood
from kvplug_testing.tampering.pipe import TamperingPipe
from kvplug_testing.tampering.victim import CALL_S, SLACK_S, Ended, ended

PIPES: Final = ("the store's signal pipe", "the store's data pipe", "signal pipe", "data pipe")
"""Of the end to which the false message comes."""


class LyingPeers(LookupSuite, LiedToOverPipes):
    """What a store may say to an end that reaches it, and such an end to a store."""

    lies = 100
    _run_ends = f"{__name__}:run_both_ends"


def run_both_ends(parent: peers.Parent, suite_ref: dict[str, Any], count: int, seed: int) -> str:
    """In a child process: a store, and an end that reaches it."""
    suite: Any = suite_from_ref(suite_ref)
    with ExitStack() as suite._stack:
        suite.warm_up()
        return report_lies(parent, _Conversations(suite), count, seed)


@attrs.frozen
class _Asked:
    """What a call asked for, and how its result is judged."""

    tokens: tuple[int, ...] | None
    min_tokens: int = 0
    """Of ``select``; 0: one is a prefix of the other, as for ``drop_select``."""

    def unlike(self, got: Any, sink: Sink | None) -> str:
        """In which way it is not what was asked for; empty: it is."""
        tokens, roi = got.header.tokens, got.header.roi
        if not (got.tokens.equal(tokens) and got.roi.equal(roi) and isinstance(got.header.metadata, dict)):
            return "the entry's tokens and roi are not those of its header, or it has no metadata"
        form = [str(tokens.dtype), str(roi.dtype), tokens.ndim]
        if form != ["torch.int64", "torch.bool", 1] or roi.shape != tokens.shape:
            return f"tokens and roi have dtypes and dimensions {form}"
        key = tuple(tokens[roi].tolist())
        if not self._is_answered_by(key):
            return f"an entry of the tokens {key[:20]} was handed out to who had asked for {self.tokens}"
        num_layers, layers = got.header.num_layers, [got.key, got.value]
        if sink is not None:
            if [index for index, *_ in sink.layers] != [*range(num_layers)] or len(sink.headers) != 1:
                return f"the sink was given the layers {[index for index, *_ in sink.layers][:20]}"
            layers = [None if part is None else part[None] for _, *parts in sink.layers for part in parts]
            num_layers = 1
        wrong = [part.shape for part in layers if part is not None]
        wrong = [shape for shape in wrong if [*shape[:2]] != [num_layers, len(tokens)]]
        return f"{len(tokens)} tokens in {num_layers} layers came as {wrong}" if wrong else ""

    def _is_answered_by(self, key: tuple[int, ...]) -> bool:
        if self.tokens is None:
            return bool(key)
        common = shared(self.tokens, key)
        return common >= self.min_tokens if self.min_tokens else common == min(len(self.tokens), len(key)) > 0


class _Conversations:
    """Each of a store, and an end that reaches it and calls it."""

    def __init__(self, suite: Any) -> None:
        self._suite = suite
        self._received: dict[str, int] = {}
        """How many messages have come over each pipe."""

    def truth(self) -> list[Ended]:
        calls, pipes = self._hold(waits.patience_s)
        self._received = {each: pipe.num_received for each, pipe in pipes.items()}
        return calls

    def lies(self, rng: random.Random) -> Iterator[tuple[str, Falsehood]]:
        places = [(name, at) for name, number in self._received.items() for at in range(number)]
        while places:
            name, at = rng.choice(places)
            yield name, Falsehood(at, rng.getrandbits(32))

    def lie(self, lie: tuple[str, Falsehood]) -> tuple[str, list[Ended]]:
        name, falsehood = lie
        calls, pipes = self._hold(CALL_S, *lie)
        return f"{name}, {pipes[name].said or f'{falsehood}, which was not reached'}", calls

    def _hold(
        self, call_s: float, name: str = "", falsehood: Falsehood | None = None
    ) -> tuple[list[Ended], dict[str, TamperingPipe]]:
        """How each call has ended, and the pipes."""
        with self._suite.scope():
            our_signal, their_signal = self._suite.pipe_pair()
            our_data, their_data = self._suite.pipe_pair()
            pipes = {
                each: TamperingPipe(pipe, falsehood if each == name else None)
                for each, pipe in zip(PIPES, (their_signal, their_data, our_signal, our_data), strict=True)
            }
            store = self._suite.hold()
            for put in _entries():
                insert(store, put, SLACK_S)
            store.attach(pipes[PIPES[0]], pipes[PIPES[1]])
            end = self._suite.endpoint(timeout_s=call_s).reach(pipes[PIPES[2]], pipes[PIPES[3]])
            self._suite.later(end.abort)
            return [*_calls(store, end, call_s)], pipes


def _calls(store: Any, end: Any, call_s: float) -> Iterator[Ended]:
    def match(which: Any, query: tuple[int, ...]) -> Ended:
        call = ended("match", call_s, lambda: which.match(query))
        is_wrong = not call.error and (type(call.value) is not int or not 0 <= call.value <= len(query))
        wrong = f"{call.value!r} of {len(query)} tokens match" if is_wrong else ""
        return attrs.evolve(call, value=None, wrong=wrong)

    def entry_of(verb: str, which: Any, asked: _Asked, **given: Any) -> Ended:
        if asked.min_tokens:
            given["min_tokens"] = asked.min_tokens
        run = functools.partial(getattr(which, verb), asked.tokens, timeout=call_s, **given)
        call = ended(verb, call_s, run)
        wrong = "" if call.error else asked.unlike(call.value, given.get("sink"))
        return attrs.evolve(call, value=None, wrong=wrong)

    yield match(end, (1, 2, 3, 9))
    yield entry_of("select", end, _Asked((1, 2, 3), 1))
    yield entry_of("select", end, _Asked((1, 2, 4, 5), 4), sink=Sink())
    yield entry_of("drop_select", end, _Asked((6,)))
    yield entry_of("drop_select", end, _Asked(None), extra=b"other")
    yield match(store, (1, 2, 9))
    yield entry_of("select", store, _Asked((1, 2, 3), 1))
    yield ended("close", call_s, functools.partial(end.close, call_s))
    yield ended("close of the store", call_s, functools.partial(store.close, call_s))


@functools.cache
def _entries() -> tuple[Put, ...]:
    return (
        entry((1, 2, 3), hidden=2000),
        entry((1, 2, 4, 5), layers=3),
        entry((6, 7), without=("value",)),
        entry((9, 8), extra=b"other", without=("hidden",)),
    )
