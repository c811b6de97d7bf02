"""The suites as functions, for any test runner and for plain programs: ``check_pipe(make_pair)`` and others.

Each runs the same tests as the class of its kind, with pytest in this process, without your own options and
files of pytest. If the maker is at the top level of a file, the tests that need other processes run,
too; otherwise they are skipped with that reason. The ends of a pair are always in one process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from kvplug.kit import Kind
from kvplug.transport import Pipe, PipeEndpoint, Timeout
from kvplug_testing import reporting
from kvplug_testing.contract import suites
from kvplug_testing.contract.base import Contract
from kvplug_testing.laws import LAWS
from kvplug_testing.memory.pipe import MemoryEndpoint, listener_at
from kvplug_testing.scorecard import Outcome, Scorecard
from kvplug_testing.sources import at_source, source_of

Maker: TypeAlias = Callable[..., Any]
"""What makes the subject of a suite."""

_METHODS: Mapping[Kind, str] = {
    Kind.QUEUE: "make_endpoint",
    Kind.LOOKUP_BUFFER: "make_endpoint",
    Kind.COMMUNICATOR: "make_communicator",
    Kind.STORE: "make_store",
    Kind.DIRECTORY: "opened",
    Kind.SINK: "made",
}
"""The method of each suite that makes what it judges."""


def check_pipe(make_pair: Maker, **settings: Any) -> Scorecard:
    """Judge pipes by the laws ALL, END and PIPE. ``make_pair(context)`` returns two connected ends.

    Args:
        settings: ``level`` and ``laws`` as ``--kvplug-level`` and ``--kvplug-law`` of pytest take them, and
            attributes of the class of the kind, such as ``options_class``. ``limit_option`` is empty here
            unless it is given.

    Returns the results, also what was skipped and why.

    Raises:
        AssertionError: laws are broken. It has every failed test, and quotes the laws. Also if no test ran.
    """
    return _check(Kind.PIPE, make_pair, {"limit_option": "", **settings})


def check_queue(make_endpoint: Maker, **settings: Any) -> Scorecard:
    """Judge message queues by the laws ALL and QUEUE; otherwise like :func:`check_pipe`.

    ``make_endpoint(context)`` returns an endpoint.
    """
    return _check(Kind.QUEUE, make_endpoint, settings)


def check_lookup_buffer(make_endpoint: Maker, **settings: Any) -> Scorecard:
    """Judge lookup buffers by the laws ALL and LOOKUP; otherwise like :func:`check_pipe`.

    ``make_endpoint(context)`` returns an endpoint.
    """
    return _check(Kind.LOOKUP_BUFFER, make_endpoint, settings)


def check_communicator(make_communicator: Maker, **settings: Any) -> Scorecard:
    """Judge device communicators by the laws ALL and COMM; otherwise like :func:`check_pipe`.

    ``make_communicator(context)`` returns the communicator of one rank.
    """
    return _check(Kind.COMMUNICATOR, make_communicator, settings)


def check_store(make_store: Maker, **settings: Any) -> Scorecard:
    """Judge stores by the laws ALL and STORE; otherwise like :func:`check_pipe`.

    ``make_store(context)`` returns a store, or a blocking store, which gets the executor of kvplug, as in an
    engine.
    """
    return _check(Kind.STORE, make_store, settings)


def check_directory(open_directory: Maker, make_url: Callable[[], str], **settings: Any) -> Scorecard:
    """Judge directories by the laws DIR; otherwise like :func:`check_pipe`.

    ``open_directory(url)`` returns a directory, and ``make_url()`` a URL at which nothing is announced yet.
    """
    return _check(Kind.DIRECTORY, open_directory, {"url": lambda self: make_url(), **settings})


def check_sink(make_sink: Maker, **settings: Any) -> Scorecard:
    """Judge sinks of metrics by the laws SINK; otherwise like :func:`check_pipe`.

    ``make_sink()`` returns a sink.
    """
    return _check(Kind.SINK, make_sink, settings)


def check_connector(name: str, **settings: Any) -> Scorecard:
    """Judge an installed connector by the laws ALL, CONN and REF; otherwise like :func:`check_pipe`.

    Engines make a connector by its name, so it is installed first, with ``pip install -e .`` for example.
    """
    return _check(Kind.CONNECTOR, None, {"connector": name, **settings})


class _Pairs(MemoryEndpoint):
    """An endpoint whose connected pipes a function makes, two at a time."""

    def __init__(self, context: PipeEndpoint.Context, make_pair: Maker) -> None:
        super().__init__(context)
        self._make_pair = make_pair

    def connect(self, contact: str, timeout: Timeout = None) -> Pipe:
        ends: tuple[Pipe, Pipe] = self._make_pair(self._context)
        listener_at(contact).offer(ends[1])
        return ends[0]


def suite_around(kind: Kind, make: Maker | None, **attributes: Any) -> type[Contract]:
    """The suite of a kind for what ``make`` makes, with these attributes.

    Other processes make it again from ``_attributes``, where the options class is the text that names it.
    """
    suite, options_class = suites.suite_of(kind), attributes.get("options_class")
    if isinstance(options_class, str):
        options_class = attributes["options_class"] = at_source(options_class)
    made = {"made_from": source_of(make or suite), **attributes}
    if make is not None:
        text = {"options_class": source_of(options_class)} if options_class else {}
        made |= {"_around": f"{__name__}:{suite_around.__name__}", "_attributes": attributes | text}
        if kind is Kind.PIPE:
            made |= {"across_processes": False, "make_endpoint": lambda self, context: _Pairs(context, make)}
        else:
            made[_METHODS[kind]] = lambda self, *arguments: make(*arguments)
    hidden = [each.__qualname__ for each in (make, options_class) if each and not source_of(each)]
    if hidden:
        why = f"other processes cannot import {hidden[0]}: put it at the top of a file"
        made |= dict.fromkeys(("other_processes", "forked_processes"), property(lambda self: why))
    return type(f"Test{suite.__name__}", (suite,), made)


def _check(kind: Kind, make: Maker | None, settings: Mapping[str, Any]) -> Scorecard:
    attributes = dict(settings)
    level, laws = attributes.pop("level", "quick"), attributes.pop("laws", ())
    suite = suite_around(kind, make, **attributes)
    cards: list[Scorecard] = []
    keep = SimpleNamespace(
        pytest_sessionfinish=lambda session: cards.append(reporting.reporter_of(session.config).scorecard)
    )
    arguments = ["-q", "--no-header", "-c", os.devnull, "--rootdir", os.getcwd(), "--kvplug-level", level]
    arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--noconftest"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *(f"--kvplug-law={law}" for law in laws)]
    with _alone(suite):
        code = pytest.main([*arguments, str(suites.COLLECTED)], plugins=[keep])
    if not cards or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise AssertionError(f"no test ran: pytest ended with {code!r}; its message is above")
    (card,) = cards
    failed = [result for result in card.results if result.outcome is Outcome.FAILED]
    if failed:
        lines = [f"{', '.join(each.laws)}: {each.test}: {each.reason}" for each in failed]
        quoted = [LAWS[law].quoted for law in dict.fromkeys(law for each in failed for law in each.laws)]
        raise AssertionError(
            "\n".join([f"{len(failed)} of {len(card.results)} tests fail:", *lines, *quoted])
        )
    return card


@contextmanager
def _alone(suite: type[Contract]) -> Iterator[None]:
    """Let pytest collect only this suite; afterwards restore what a run of pytest around this one uses."""
    is_main = threading.current_thread() is threading.main_thread()
    timer, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_ADDOPTS", raising=False)
            patch.setattr(suites, "chosen", [suite])
            patch.delitem(sys.modules, f"{suites.__package__}.{suites.COLLECTED.stem}", raising=False)
            yield
    finally:
        if is_main:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)
