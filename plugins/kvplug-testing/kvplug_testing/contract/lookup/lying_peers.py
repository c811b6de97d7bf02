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
from kvplug_testing.contract.lookup.suite import LookupSuite
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


class _Conversations:
    def __init__(self, suite: Any) -> None:
        self._suite = suite
        self._received: dict[str, int] = {}

    def truth(self) -> list[Ended]:
        calls, self._received = _Conversation(self._suite, waits.patience_s).hold(None, None)
        return calls

    def lies(self, rng: random.Random) -> Iterator[tuple[str, Falsehood]]:
        places = [(name, at) for name, number in self._received.items() for at in range(number)]
        while places:
            name, at = rng.choice(places)
            yield name, Falsehood(at, rng.getrandbits(32))

    def lie(self, lie: tuple[str, Falsehood]) -> tuple[str, list[Ended]]:
        name, falsehood = lie
        conversation = _Conversation(self._suite, CALL_S)
        calls, _ = conversation.hold(name, falsehood)
        return f"{name}, {conversation.said}", calls


@attrs.frozen
class _Asked:
    """What a call asked for, and how its result is judged."""

    tokens: tuple[int, ...] | None
    min_tokens: int = 0
    """Of ``select``; 0: one is a prefix of the other, as for ``drop_select``."""

    def unlike(self, got: Any, sink: Sink | None = None) -> str:
        """In which way it is not what was asked for; empty: it is."""
        header = got.header
        num_tokens = len(header.tokens)
        if not got.tokens.equal(header.tokens) or not got.roi.equal(header.roi):
            return "the entry's tokens and roi are not those of its header"
        if str(header.tokens.dtype) != "torch.int64" or str(header.roi.dtype) != "torch.bool":
            return f"tokens and roi are {header.tokens.dtype} and {header.roi.dtype}"
        if header.roi.shape != header.tokens.shape or header.tokens.ndim != 1:
            return f"tokens and roi have the shapes {[*header.tokens.shape]} and {[*header.roi.shape]}"
        key = tuple(header.tokens[header.roi].tolist())
        if not self._is_answered_by(key):
            return f"an entry of the tokens {key[:20]} was handed out to who had asked for {self.tokens}"
        layers = [got.key, got.value]
        if sink is not None:
            if [index for index, *_ in sink.layers] != [*range(header.num_layers)] or len(sink.headers) != 1:
                return f"the sink was given the layers {[index for index, *_ in sink.layers][:20]}"
            for _, key_layer, value_layer in sink.layers:
                layers += [None if part is None else part[None] for part in (key_layer, value_layer)]
        for part in layers:
            first = 1 if sink is not None else header.num_layers
            if part is not None and [*part.shape[:2]] != [first, num_tokens]:
                return f"{num_tokens} tokens in {header.num_layers} layers came as {[*part.shape]}"
        return "" if isinstance(header.metadata, dict) else f"metadata is {header.metadata!r}"

    def _is_answered_by(self, key: tuple[int, ...]) -> bool:
        if self.tokens is None:
            return bool(key)
        common = shared(self.tokens, key)
        return common >= self.min_tokens if self.min_tokens else common == min(len(self.tokens), len(key)) > 0


class _Conversation:
    """A store, and an end that reaches it and calls it."""

    def __init__(self, suite: Any, call_s: float) -> None:
        self._suite = suite
        self._call_s = call_s
        self._calls: list[Ended] = []
        self.said = ""

    def hold(self, name: str | None, falsehood: Falsehood | None) -> tuple[list[Ended], dict[str, int]]:
        """How each call has ended, and how many messages have come over each pipe."""
        with self._suite.scope():
            our_signal, their_signal = self._suite.pipe_pair()
            our_data, their_data = self._suite.pipe_pair()
            pipes = {
                each: TamperingPipe(pipe, falsehood if each == name else None)
                for each, pipe in zip(PIPES, (their_signal, their_data, our_signal, our_data), strict=True)
            }
            store = self._suite.hold()
            for put in _entries():
                store.insert(
                    put.tokens, put.roi, put.key, put.value, put.hidden, extra=put.extra, timeout=SLACK_S
                )
            store.attach(pipes[PIPES[0]], pipes[PIPES[1]])
            end = self._suite.endpoint(timeout_s=self._call_s).reach(pipes[PIPES[2]], pipes[PIPES[3]])
            self._suite.later(end.abort)
            try:
                self._talk(store, end)
            finally:
                said = next((pipe.said for pipe in pipes.values() if pipe.said), "")
                self.said = said or f"{falsehood}, which was not reached"
        return self._calls, {each: pipe.num_received for each, pipe in pipes.items()}

    def _talk(self, store: Any, end: Any) -> None:
        self._match(end, (1, 2, 3, 9))
        self._entry("select", end, _Asked((1, 2, 3), 1))
        self._entry("select", end, _Asked((1, 2, 4, 5), 4), sink=Sink())
        self._entry("drop_select", end, _Asked((6,)))
        self._entry("drop_select", end, _Asked(None), extra=b"other")
        self._match(store, (1, 2, 9))
        self._entry("select", store, _Asked((1, 2, 3), 1))
        for what, closed in (("close", end), ("close of the store", store)):
            self._call(what, functools.partial(closed.close, self._call_s))

    def _match(self, end: Any, query: tuple[int, ...]) -> None:
        call = ended("match", self._call_s, lambda: end.match(query))
        is_wrong = not call.error and (type(call.value) is not int or not 0 <= call.value <= len(query))
        wrong = f"{call.value!r} of {len(query)} tokens match" if is_wrong else ""
        self._calls.append(attrs.evolve(call, value=None, wrong=wrong))

    def _entry(self, verb: str, end: Any, asked: _Asked, **given: Any) -> None:
        if asked.min_tokens:
            given["min_tokens"] = asked.min_tokens
        run = functools.partial(getattr(end, verb), asked.tokens, timeout=self._call_s, **given)
        call = ended(verb, self._call_s, run)
        wrong = "" if call.error else asked.unlike(call.value, given.get("sink"))
        self._calls.append(attrs.evolve(call, value=None, wrong=wrong))

    def _call(self, what: str, run: Any) -> None:
        self._calls.append(attrs.evolve(ended(what, self._call_s, run), value=None))


@functools.cache
def _entries() -> tuple[Put, ...]:
    return (
        entry((1, 2, 3), hidden=2000),
        entry((1, 2, 4, 5), layers=3),
        entry((6, 7), without=("value",)),
        entry((9, 8), extra=b"other", without=("hidden",)),
    )
