"""The base of every suite: laws of tests, the subject, time limits, and the check for leaks.

A suite is an ordinary pytest class. Each of its tests names the law that it judges::

    class TestEnds(Contract):
        @law("ALL-1")
        def test_closing_twice_is_closing_once(self, pair): ...

The plugin in :mod:`kvplug_testing.pytest_plugin` reads those names: for levels, waivers, failures and the
scorecard.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import pytest

from kvplug import ConfigError, Registry
from kvplug.kit import Kind, Secret, check_options
from kvplug.transport import Credentials
from kvplug_testing import peers, waits
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts import ADDRESSES, HostPair, NoHostsError
from kvplug_testing.laws import LAWS

LEVELS = ("quick", "long")
TIMEOUT_S = 60.0
"""The default time limit of one test: then all stacks are dumped and the test fails."""

T = TypeVar("T", bound=Callable[..., Any])


def law(
    id_: str, *more: str, level: str = "quick", needs: str = "", timeout_s: float = TIMEOUT_S
) -> Callable[[T], T]:
    """Mark a test with the law that it judges.

    Args:
        id_, more: of :data:`kvplug_testing.laws.LAWS`; more than one where the test shows several at once.
        level: the lowest level (:data:`LEVELS`) that runs it.
        needs: names of properties of the suite that return ``""``, or the reason to skip the test: what the
            subject does not claim. A name that ends in ``_processes`` prepares :meth:`Contract.start_forked`,
            and ``another_host`` :meth:`Contract.start_at`.
        timeout_s: the test's time limit, in seconds.
    """
    for each in (id_, *more):
        if each not in LAWS:
            raise ValueError(f"{each!r} is not a law; these are: {', '.join(LAWS)}")
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not a level; these are: {', '.join(LEVELS)}")

    def mark(test: T) -> T:
        marked = pytest.mark.timeout(timeout_s)(test)
        return pytest.mark.kvplug_law(id_, *more, level=level, needs=needs)(marked)  # type: ignore[no-any-return]

    return mark


class Contract:
    """The base of all suites. An author's subclass sets the class attributes to name the subject."""

    kind: ClassVar[Kind]
    """The kind of the subject."""
    _named_by: ClassVar[str] = "transport"
    """The attribute that names the subject."""
    transport: ClassVar[str] = ""
    """Name of an installed transport of the kind. Empty if the method that makes it is overridden
    instead."""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The transport's own options, as a config would give them."""
    options_class: ClassVar[type | None] = None
    """The attrs class of the options. ``None`` is the one in the installed transport's spec."""
    across_processes: ClassVar[bool] = True
    """Whether its ends can be in two processes. If not, the tests that need this are skipped."""
    ends_are_processes: ClassVar[bool] = False
    """Whether every end is in a process of its own, in a suite that supports both."""
    settle_s: ClassVar[float] = 5.0
    """How long resources may remain after they are closed."""
    forks: ClassVar[bool] = True
    """Whether a process that has loaded its library may fork."""
    _attributes: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What another process sets of a suite that was made around a function."""
    _around: ClassVar[str] = ""
    """What makes that suite, as :func:`.at_source` finds it; empty for the others."""
    waivers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Tests that the subject cannot pass yet, each with the reason: names with parameters, or without for
    all of them."""
    one_host: ClassVar[str] = ""
    """Why its ends cannot be on two hosts here although the transport claims `cross_host`, such as an
    option. That claim is not judged then, and the scorecard has this reason."""

    _stack: ExitStack

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for one, other in ((cls._named_by, "transport"), ("transport", cls._named_by)):
            if name := cls.__dict__.get(one):
                setattr(cls, other, name)
                break

    @classmethod
    def subject(cls) -> str:
        """The subject's name in the scorecard: ``"pipe cpu"``, or the class's name if it makes its own."""
        return f"{cls.kind.replace('_', ' ')} {cls.transport or cls.__name__}"

    @pytest.fixture(autouse=True)
    def _judged(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Around every test: skip it if ``needs`` gives a reason, and check for leaks afterwards."""
        marker = request.node.get_closest_marker("kvplug_law")
        needs = marker.kwargs["needs"] if marker is not None else ""
        for each in needs.split():
            if reason := getattr(self, each):
                pytest.skip(reason)
        if "_processes" in needs or "another_host" in needs or self.ends_are_processes:
            self._start_server(request.node)
        if "another_host" in needs:
            self._make_hosts(request.node)
        _registry()  # before the check for leaks: plugins may load what stays
        self.warm_up()
        with peers.nothing_left(self.settle_s), ExitStack() as self._stack:
            yield
            while isinstance(self._stack, _Scope):
                self._stack.close()
                self._stack = self._stack.outer

    def _start_server(self, node: pytest.Item) -> None:
        """Start a fork server before the first check for leaks."""
        if not self.other_and_forked_processes:
            prepare, base = f"{__name__}:_prepare", session_server(node.session)
            self._keep(node, _servers, lambda: ForkServer(prepare, self.suite_ref(), forked_from=base))

    def _keep(self, node: pytest.Item, kept: dict[Any, Any], make: Callable[[], Any]) -> None:
        """Make what classes of the test file share, unless there is one. It ends with the file."""
        key = self.server_key
        if key not in kept:
            kept[key] = make()
            (node.getparent(pytest.Module) or node).addfinalizer(lambda: kept.pop(key).close())

    @property
    def server_key(self) -> tuple[str, str, Any]:
        """Classes of a file share a server if they have the same subject and import it in the same way."""
        return self.suite_ref()["source"].rpartition(":")[0], self.transport, type(self).import_all

    def warm_up(self) -> None:
        """Make what a process makes once and keeps, such as threads of torch, before leaks are searched.

        Override it for a library that makes more, and call this one as well.
        """
        with contextlib.suppress(ImportError):
            import torch

            torch.ones(1 << 20).add_(1)

    def import_all(self) -> None:
        """Import the modules that an end in another process needs, without creating anything.

        Override it if that is more than torch and the factory's module, and call this one as well.
        """
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
        if self.spec is not None:
            self.spec.load_factory()

    def later(self, end: Callable[[], Any]) -> None:
        """Call ``end`` when the test is over; the last one given is called first."""
        self._stack.callback(end)

    @contextmanager
    def scope(self) -> Iterator[ExitStack]:
        """What is started in the block, and calls given to :meth:`later` in it, end with the block; or with
        the test, if it fails in the block of a generator.
        """
        outer = self._stack
        try:
            with _Scope() as scope:
                scope.outer = outer
                self._stack = scope
                yield scope
        finally:
            self._stack = outer

    def start(self, target: Callable[..., Any], *args: Any, **given: Any) -> peers.Peer:
        """Run ``target(parent, *args)`` in a real child process, which ends with the test."""
        return self._stack.enter_context(peers.start(target, *args, **given))

    def start_forked(self, target: str, *args: Any, **given: Any) -> peers.Peer:
        """Like :meth:`start`, in milliseconds: a fork of a process that has imported only the suite's
        modules. Without a fork server it starts a fresh process. ``target`` is ``"module:function"``.

        For tests whose ``needs`` ends in ``_processes``, or all if :attr:`ends_are_processes`.
        """
        server = _servers.get(self.server_key)
        start = peers.start if server is None else server.start
        return self._stack.enter_context(start(target, *args, **given))

    def start_at(self, host: int, target: str, *args: Any, **given: Any) -> peers.Peer:
        """Like :meth:`start_forked`, on one of two hosts, 0 and 1. For tests whose ``needs`` ends in
        ``another_host``.
        """
        return self._stack.enter_context(self.hosts().start(host, target, *args, **given))

    def hosts(self) -> HostPair:
        """Two hosts, for tests whose ``needs`` ends in ``another_host``."""
        return _hosts[self.server_key]

    def _make_hosts(self, node: pytest.Item) -> None:
        """Make two hosts of the fork server, or skip the test."""
        try:
            self._keep(node, _hosts, lambda: HostPair(_servers[self.server_key]))
        except NoHostsError as e:
            pytest.skip(f"cross_host is not judged: no second host can be made of namespaces here: {e}")

    # -- the subject ---------------------------------------------------------------------------

    @property
    def spec(self) -> Any:
        """The spec of the transport that :attr:`transport` names; ``None`` without a name."""
        return _registry().get(self.kind, self.transport) if self.transport else None

    def installed(self, override: str = "") -> Any:
        """The spec, for code that requires one.

        Raises:
            pytest.fail.Exception: no :attr:`transport` is named. The message names the attribute to set,
                and the method to override.
        """
        if self.spec is None:
            or_else = f", or override `{override}`" if override else ""
            pytest.fail(
                f"{self.called} has no subject: set `{self._named_by}` to the name of an"
                f" installed {self.kind.replace('_', ' ')}{or_else}",
                pytrace=False,
            )
        return self.spec

    @property
    def _takes(self) -> type | None:
        """The options class; ``None`` if there are no options."""
        if self.options_class is not None:
            return self.options_class
        return None if self.spec is None else self.spec.load_options()

    def made_options(self, **more: Any) -> Any:
        """An instance of the options class: :attr:`options`, and ``more`` over them.

        Raises:
            ConfigError: the options are wrong; lists every fault. Or some were given, and there is no options
                class.
        """
        cls, given = self._takes, {**self.options, **more}
        if cls is None:
            if given:
                hint = "" if self.transport else " (where it does, set `options_class`)"
                raise ConfigError(f"{self.called} takes no options{hint}, and these were given: {given}")
            return None
        return check_options(cls, given, where=f"options.{self.called}")

    def suite_ref(self) -> dict[str, Any]:
        """Plain values from which another process recreates this suite. See :func:`suite_from_ref`."""
        cls = type(self)
        source = getattr(cls, "made_from", "")
        if not source:
            source = f"{os.path.abspath(inspect.getfile(cls))}:{cls.__qualname__}"
        return {
            "source": source,
            "kind": cls.kind.value,
            "around": cls._around,
            "attributes": dict(cls._attributes),
            "transport": self.transport,
            "options": dict(self.options),
        }

    # -- what tests need -----------------------------------------------------------------------

    @property
    def other_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        reason = f"the ends of {self.called} are in one process (across_processes)"
        return "" if self.across_processes else reason

    @property
    def forked_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if not hasattr(os, "fork"):
            return "this system has no fork"
        return "" if self.forks else f"a process with {self.called} must not fork (forks)"

    @property
    def other_and_forked_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.other_processes or self.forked_processes

    @property
    def another_host(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if self.spec is None:
            return f"cross_host is not judged: {self.called} names no transport that claims it (transport)"
        if not getattr(getattr(self.spec, "capabilities", None), "cross_host", False):
            return f"{self.called} does not claim cross_host"
        reason = self.one_host or self.other_and_forked_processes
        return f"cross_host is not judged: {reason}" if reason else ""

    @property
    def called(self) -> str:
        """The subject's name, for messages."""
        return self.transport or type(self).__name__


class _Scope(ExitStack):
    """The end of a :meth:`Contract.scope`."""

    outer: ExitStack


def in_time(call: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """The result of a call that has a timeout, and must end by then."""
    within = waits.patience_s
    return waits.Call(functools.partial(call, *args, timeout=within, **given)).result(within + 1)


def at_host(host: int) -> dict[str, Any]:
    """The fields of a context with which an end on host 0 or 1 can be reached from the other one."""
    return {"host": ADDRESSES[host], "credentials": Credentials(Secret(b"the hosts share a secret"))}


def _prepare(suite_ref: Mapping[str, Any]) -> None:
    """In a fork server: import what its children will need, without creating anything."""
    suite_from_ref(suite_ref).import_all()


def session_server(session: pytest.Session) -> ForkServer:
    """The server from which those of all suites are forked. It has imported pytest, and the modules of torch,
    hypothesis, kvplug and the kit that this process has, which takes two seconds. It ends with the session.
    """
    if _SESSION_SERVER not in session.stash:
        packages = ("kvplug", "kvplug_testing")
        imported = [
            name
            for name in sys.modules
            if name in ("torch", "hypothesis") or name.partition(".")[0] in packages
        ]
        server = ForkServer.of("pytest", *imported)
        session.stash[_SESSION_SERVER] = server
        session.addfinalizer(server.close)
    return session.stash[_SESSION_SERVER]


_SESSION_SERVER = pytest.StashKey[ForkServer]()
_servers: dict[tuple[str, str, Any], ForkServer] = {}
_hosts: dict[tuple[str, str, Any], HostPair] = {}


@functools.cache
def _registry() -> Registry:
    return Registry.from_env()
