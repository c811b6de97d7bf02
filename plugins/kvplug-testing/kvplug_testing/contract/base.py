"""The base of every suite: laws of tests, the subject, deadlines, and the check that nothing is left.

A suite is an ordinary pytest class. Each of its tests names the law that it judges::

    class TestEnds(Contract):
        @law("ALL-1")
        def test_closing_twice_is_closing_once(self, pair): ...

The plugin in :mod:`kvplug_testing.pytest_plugin` reads those names: for levels, waivers, failures and the
scorecard.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import pytest

from kvplug.assembly.registry import Registry
from kvplug.config import check_options
from kvplug.transport.spec import Kind
from kvplug_testing import peers
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.laws import LAWS

LEVELS = ("quick", "full", "soak")
TIMEOUT_S = 60.0
"""The life of one test, unless it says otherwise: then all stacks are dumped, and it has failed."""

T = TypeVar("T", bound=Callable[..., Any])


def law(
    id_: str, *more: str, level: str = "quick", needs: str = "", timeout_s: float = TIMEOUT_S
) -> Callable[[T], T]:
    """Mark a test with the law that it judges.

    Args:
        id_, more: of :data:`kvplug_testing.laws.LAWS`; more than one where the test shows several at once.
        level: the lowest level (:data:`LEVELS`) that runs it.
        needs: what the subject must claim, or the test is skipped and says so: the name of a property of the
            suite that returns ``""``, or in words why it is not there. One that ends in ``_processes`` has
            :meth:`Contract.start_forked` made ready.
        timeout_s: seconds that the test may take.
    """
    for each in (id_, *more):
        if each not in LAWS:
            raise ValueError(f"{each!r} is no law; these are: {', '.join(LAWS)}")
    if level not in LEVELS:
        raise ValueError(f"{level!r} is no level; these are: {', '.join(LEVELS)}")

    def mark(test: T) -> T:
        marked = pytest.mark.timeout(timeout_s)(test)
        return pytest.mark.kvplug_law(id_, *more, level=level, needs=needs)(marked)  # type: ignore[no-any-return]

    return mark


class Contract:
    """What the suites share. The class attributes say what is judged; an author's subclass sets them."""

    kind: ClassVar[Kind]
    """Of what the suite judges."""
    _named_by: ClassVar[str] = "transport"
    """The attribute that an author names it with."""
    transport: ClassVar[str] = ""
    """Name of an installed transport of the kind. Empty where the method that makes it is overridden
    instead."""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The transport's own options, as a config would give them."""
    options_class: ClassVar[type | None] = None
    """The attrs class that they are made into. ``None`` is that of the installed transport's spec."""
    across_processes: ClassVar[bool] = True
    """Whether its ends can be in two processes. If not, the tests that need it are skipped, and say so."""
    ends_are_processes: ClassVar[bool] = False
    """Whether a suite that can do either puts every end into a process of its own."""
    settle_s: ClassVar[float] = 5.0
    """How long what has been closed may take to be gone."""
    forks: ClassVar[bool] = True
    """Whether a process that has its library loaded may fork at all."""

    _stack: ExitStack

    @classmethod
    def subject(cls) -> str:
        """What is judged, for the scorecard: ``"pipe cpu"``; a class that makes its own gives its name."""
        return f"{cls.kind.replace('_', ' ')} {cls.transport or cls.__name__}"

    @classmethod
    def distribution(cls) -> str:
        """What has brought it, with its version: ``"kvplug-cpu 0.1.0"``. Empty for what is not installed."""
        owners = _registry().owners(cls.kind, cls.transport) if cls.transport else ()
        return ", ".join(str(plugin) for plugin in owners)

    @pytest.fixture(autouse=True)
    def _judged(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Around every test: what it needs is there, and afterwards nothing is left."""
        marker = request.node.get_closest_marker("kvplug_law")
        needs = marker.kwargs["needs"] if marker is not None else ""
        if needs and (reason := getattr(self, needs)):
            pytest.skip(reason)
        if needs.endswith("_processes") or self.ends_are_processes:
            self._have_a_server(request.node)
        self.warm_up()
        with peers.nothing_left(self.settle_s), ExitStack() as self._stack:
            yield

    def _have_a_server(self, node: pytest.Item) -> None:
        """For a test that starts processes, before "nothing left" looks first. It ends with the test file."""
        key = self._server_key
        if key in _servers or self.other_and_forked_processes or not ForkServer.works():
            return
        _servers[key] = ForkServer(f"{__name__}:_prepare", self.suite_ref())
        (node.getparent(pytest.Module) or node).addfinalizer(lambda: _servers.pop(key).close())

    @property
    def _server_key(self) -> tuple[str, str, Any]:
        """One server does for all classes of a file that judge the same and import it in the same way."""
        return self.suite_ref()["source"].rpartition(":")[0], self.transport, type(self).import_all

    def warm_up(self) -> None:
        """Before "nothing left" looks first: what a process makes once and keeps (the watcher's thread).

        Override it for a library that makes more, and call this one as well.
        """

    def import_all(self) -> None:
        """Import what an end in another process needs, and make nothing of it.

        Override it where that is not the factory's module alone, and call this one as well.
        """
        if self.spec is not None:
            self.spec.load_factory()

    def later(self, end: Callable[[], Any]) -> None:
        """Call ``end`` when the test is over; the last one given is called first."""
        self._stack.callback(end)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is started and put off until later in the block ends with the block."""
        outer = self._stack
        try:
            with ExitStack() as self._stack:
                yield
        finally:
            self._stack = outer

    def start(self, target: Callable[..., Any], *args: Any, **given: Any) -> peers.Peer:
        """``target(parent, *args)`` in a real child process, which ends with the test."""
        return self._stack.enter_context(peers.start(target, *args, **given))

    def start_forked(self, target: str, *args: Any, **given: Any) -> peers.Peer:
        """The same in milliseconds: a fork of a process that has imported all that the suite needs, and no
        more. Where there can be none it is a fresh process too. ``target`` is ``"module:function"``.

        For tests whose ``needs`` ends in ``_processes``, or all where :attr:`ends_are_processes`.
        """
        server = _servers.get(self._server_key)
        start = peers.start if server is None else server.start
        return self._stack.enter_context(start(target, *args, **given))

    # -- what is judged ------------------------------------------------------------------------

    @property
    def spec(self) -> Any:
        """The spec of the transport that :attr:`transport` names; ``None`` without a name."""
        return _registry().get(self.kind, self.transport) if self.transport else None

    def installed(self, override: str = "") -> Any:
        """The spec, for what cannot do without.

        Raises:
            pytest.fail.Exception: no :attr:`transport` is named. It says to name one, or to override the
                method ``override``.
        """
        if self.spec is None:
            or_else = f", or override `{override}`" if override else ""
            pytest.fail(
                f"{self.called} does not say what it judges: set `{self._named_by}` to the name of an"
                f" installed {self.kind.replace('_', ' ')}{or_else}",
                pytrace=False,
            )
        return self.spec

    @property
    def _takes(self) -> type | None:
        """The options class; ``None`` where there are no options."""
        if self.options_class is not None:
            return self.options_class
        return None if self.spec is None else self.spec.load_options()

    def made_options(self, **more: Any) -> Any:
        """An instance of the options class: :attr:`options`, and ``more`` over them.

        Raises:
            ValueError: there is no options class, and something was given.
            ConfigError: with every fault of what was given.
        """
        cls, given = self._takes, {**self.options, **more}
        if cls is None:
            if given:
                hint = "" if self.transport else " (where it does, set `options_class`)"
                raise ValueError(f"{self.called} takes no options{hint}, and these were given: {given}")
            return None
        return check_options(cls, given, where=f"options.{self.called}")

    def suite_ref(self) -> dict[str, Any]:
        """How another process makes this very suite again; plain values. See :func:`suite_from_ref`."""
        cls = type(self)
        source = (
            getattr(cls, "made_from", None) or f"{os.path.abspath(inspect.getfile(cls))}:{cls.__qualname__}"
        )
        return {"source": source, "transport": self.transport, "options": dict(self.options)}

    # -- what tests need -----------------------------------------------------------------------

    @property
    def other_processes(self) -> str:
        """For ``needs``."""
        return (
            ""
            if self.across_processes
            else f"the ends of {self.called} are in one process (across_processes)"
        )

    @property
    def forked_processes(self) -> str:
        """For ``needs``."""
        if not hasattr(os, "fork"):
            return "this system has no fork"
        return "" if self.forks else f"a process with {self.called} must not fork (forks)"

    @property
    def other_and_forked_processes(self) -> str:
        """For ``needs``."""
        return self.other_processes or self.forked_processes

    @property
    def called(self) -> str:
        """What is judged, for messages."""
        return self.transport or type(self).__name__


def _prepare(suite_ref: Mapping[str, Any]) -> None:
    """In a fork server: import what its children will need, and make nothing."""
    suite_from_ref(suite_ref).import_all()


_servers: dict[tuple[str, str, Any], ForkServer] = {}
_loaded: list[Registry] = []


def _registry() -> Registry:
    if not _loaded:
        _loaded.append(Registry.from_env())
    return _loaded[0]
