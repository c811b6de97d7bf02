"""Specs describe what a plugin offers, as strings. Nothing heavy is imported until a name is chosen.

A plugin's entry-point module builds the specs. ``factory``, ``options`` and ``probe`` are strings
``"package.module:Name"`` that are resolved only when used; only :meth:`load_factory` imports transport code.
``options`` and ``probe`` must name light modules, since ``kvplug list`` imports them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import re
import types
from collections.abc import Callable
from typing import Any, Final

import attrs

from kvplug.errors import PluginError, PluginLoadError, UnsupportedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.transport.capabilities import Capabilities

_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_MADE = (type, types.FunctionType)
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kind(enum.StrEnum):
    """The kinds of things that are selected by name."""

    CONNECTOR = "connector"
    """Connects an engine to kvplug."""
    PIPE = "pipe"
    """Carries tensors, in order, between two processes."""
    QUEUE = "queue"
    """A message queue with one writer and many readers."""
    LOOKUP_BUFFER = "lookup_buffer"
    """Holds KV entries, which are found by their tokens."""
    COMMUNICATOR = "communicator"
    """Runs the collectives of a group of ranks on one kind of device."""
    STORE = "store"
    """Holds pages of KV under keys."""
    DIRECTORY = "directory"
    """Lets engines announce themselves and find each other."""
    SINK = "sink"
    """Receives snapshots of the counters."""
    COMMAND = "command"
    """A command of the program ``kvplug``."""


TRANSPORTS: Final = (Kind.PIPE, Kind.QUEUE, Kind.LOOKUP_BUFFER, Kind.COMMUNICATOR)
"""The kinds of transport."""


def _kind(given: Any) -> Kind:
    try:
        return Kind(given)
    except ValueError:
        from kvplug.config.messages import bad_value, did_you_mean, listed

        kinds = [kind.value for kind in TRANSPORTS]
        hint = did_you_mean(str(given), kinds)
        raise PluginError(f"{bad_value('kind', given, listed(kinds))}{hint}") from None


def _check_name(_: Any, __: Any, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(
            f"{name!r} cannot be a name: use up to 40 lower-case letters, digits and hyphens, starting with a"
            " letter"
        )
    if name in ("auto", "none"):
        raise PluginError(f"a plugin cannot use the name {name!r}, which has a special meaning in configs")


def _check_target(_: Any, attribute: Any, target: Any) -> None:
    if target is not None and not (isinstance(target, str) and _TARGET.fullmatch(target)):
        raise PluginError(f"{attribute.name} must be a string 'package.module:Name', got {target!r}")


def _meant(name: str, module: Any) -> str:
    """Suggest the name in a module that is closest to ``name``, preferably one that the module defines."""
    from kvplug.config.messages import did_you_mean

    made = {each: found for each, found in vars(module).items() if issubclass(type(found), _MADE)}
    own = [each for each, found in made.items() if found.__module__ == module.__name__]
    return did_you_mean(name, own) or did_you_mean(name, dir(module))


def load_target(target: str) -> Any:
    """Import the object that ``"package.module:Name"`` names.

    Raises:
        PluginLoadError: the module does not import or has no such name; the cause is chained.
        ResourceExhaustedError: there was no free descriptor or memory to import it; a later attempt may work.
    """
    module_name, _, attribute = target.partition(":")
    module = None
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute)
    except (Exception, SystemExit) as e:
        NamedExhaustion.check(e, f"importing {target}")
        absent = isinstance(e, AttributeError) and e.obj is module and e.name == attribute
        hint = ""
        with contextlib.suppress(Exception):  # a module's ``__dir__`` may raise anything
            hint = _meant(attribute, module) if absent and module is not None else ""
        raise PluginLoadError(f"cannot load {target}: {type(e).__name__}: {e}{hint}") from e


@attrs.frozen(kw_only=True)
class Probe:
    """The result of a transport's probe of this host. A probe must be cheap, without heavy imports."""

    viable: bool = True
    """Whether the transport can work on this host."""
    reason: str = attrs.field(default="", converter=peer_text)
    """Why the transport cannot work here, in one line; empty if it can."""
    domain: str = ""
    """An opaque string, made for example of the boot id and namespaces. The two ends of a transport that is
    not ``cross_host`` must have equal domains."""


class _Offered:
    """Names a spec in errors when a part of it does not load."""

    __slots__ = ("_distribution",)  # not part of its value: specs of two distributions may be equal

    name: str
    kind: Kind

    def _load(self, field: str) -> Any:
        """Load the target in ``field``. Errors name the spec and its distribution."""
        try:
            return load_target(getattr(self, field))
        except PluginLoadError as e:
            raise PluginLoadError(f"{self._called(field)}: {e}") from e.__cause__

    def _load_callable(self, field: str) -> Callable[..., Any]:
        found = self._load(field)
        if not callable(found):
            raise PluginLoadError(f"{self._called(field)}: {getattr(self, field)} is not callable")
        return found  # type: ignore[no-any-return]

    @property
    def called(self) -> str:
        """The spec's name in messages: ``"the pipe 'mine' from kvplug-mine"``."""
        distribution = getattr(self, "_distribution", "")
        whose = f" from {distribution}" if distribution else ""
        return f"the {self.kind.replace('_', ' ')} {self.name!r}{whose}"

    def _called(self, field: str) -> str:
        return f"the {field.replace('_', ' ')} of {self.called}"


def note_distribution(spec: _Offered, distribution: str) -> None:
    """Set the distribution that offers ``spec``, which its errors name."""
    object.__setattr__(spec, "_distribution", distribution)


@attrs.frozen(kw_only=True)
class _Spec(_Offered):
    name: str = attrs.field(validator=_check_name)
    """The name that an operator writes in the config: up to 40 lower-case letters, digits and hyphens,
    beginning with a letter."""
    factory: str = attrs.field(validator=_check_target)
    """The factory, as ``"package.module:Name"``; imported when it is first used."""
    options: str | None = attrs.field(default=None, validator=_check_target)
    """The attrs class of the options, as ``"package.module:Name"`` in a light module. ``None``: there are no
    options."""
    summary: str = ""
    """One line for ``kvplug list``."""
    for_tests: bool = False
    """Whether this is a fake or injects faults. ``kvplug list`` shows it only with ``--all``, and ``"auto"``
    never selects it, but a config may name it."""

    def load_factory(self) -> Callable[..., Any]:
        """Import the plugin's code and return the factory.

        Raises:
            PluginLoadError: the factory cannot be imported, does not exist, or is not callable.
        """
        return self._load_callable("factory")

    def load_options(self) -> type | None:
        """Return the attrs class of the options, or ``None`` if there are no options.

        Raises:
            PluginLoadError: the class cannot be imported, does not exist, or is not an attrs class.
        """
        if self.options is None:
            return None
        found = self._load("options")
        if not (isinstance(found, type) and attrs.has(found)):
            raise PluginLoadError(f"{self._called('options')}: {self.options} is not an attrs class")
        return found


@attrs.frozen(kw_only=True)
class _ProbedSpec(_Spec):
    probe: str | None = attrs.field(default=None, validator=_check_target)
    """A function without arguments that returns a :class:`Probe`."""

    def run_probe(self) -> Probe:
        """Run the probe and return its result. If the probe fails, return "not viable" with the reason.

        Raises:
            ResourceExhaustedError: the probe failed because the process has no free descriptor, thread or
                memory. A later probe may succeed.
        """
        if self.probe is None:
            return Probe()
        try:
            probe = self._load("probe")
        except PluginLoadError as e:
            return Probe(viable=False, reason=str(e))
        try:
            found = probe()
        except (Exception, SystemExit) as e:
            NamedExhaustion.check(e, self._called("probe"))
            return Probe(viable=False, reason=f"its probe failed: {type(e).__name__}: {e}")
        if not isinstance(found, Probe):
            return Probe(viable=False, reason=f"its probe returned {found!r}, not a Probe")
        return found


@attrs.frozen(kw_only=True)
class TransportSpec(_ProbedSpec):
    """One transport: a pipe, message queue, lookup buffer or device communicator.

    ``factory`` is called with one argument, the kind's context: for a pipe, a :class:`PipeEndpoint.Context`.

    Raises:
        PluginError: the kind is not a kind of transport, or the fields contradict each other.
    """

    kind: Kind = attrs.field(converter=_kind)
    """``PIPE``, ``QUEUE``, ``LOOKUP_BUFFER`` or ``COMMUNICATOR``, or the same as text."""
    capabilities: Capabilities = attrs.field(factory=Capabilities)
    """What the transport claims to do; tests check the claims, and ``"auto"`` compares them."""
    protocol: int = 1
    """The version of the transport's own wire protocol; both ends must have the same."""
    auto: bool = attrs.field()
    """Whether ``"auto"`` considers the transport. If not, a config must name it. The default is False for
    transports that are made for tests, else True."""

    @auto.default
    def _unless_for_tests(self) -> bool:
        return not self.for_tests

    def __attrs_post_init__(self) -> None:
        if self.for_tests and self.auto:
            raise PluginError(f"the {self.kind} {self.name!r} is made for tests, so 'auto' cannot select it")
        if self.kind not in TRANSPORTS:
            raise PluginError(f"a {self.kind} needs a {self.kind.capitalize()}Spec, not a TransportSpec")


@attrs.frozen(kw_only=True)
class StoreSpec(_ProbedSpec):
    """One store of KV pages.

    ``factory`` is called with one argument, a ``kvplug.transport.Store.Context``, and returns a ``Store`` or
    a ``BlockingStore``.
    """

    kind: Kind = attrs.field(default=Kind.STORE, init=False, repr=False)
    """``Kind.STORE``."""
    client: str | None = attrs.field(default=None, validator=_check_target)
    """Makes a ``Store`` that reaches a peer's store: called with the same context and the link. ``None``: the
    store cannot be served to peers."""
    persistent: bool = False
    """Whether the pages outlive the processes that use the store."""
    cross_host: bool = False
    """Whether processes of several hosts can use the store."""

    def run_probe(self) -> Probe:
        """Run the probe and return its result. Return "not viable" if the compiled part of kvplug, which all
        stores need, is missing.

        Raises:
            ResourceExhaustedError: the process has no free descriptor, thread or memory. A later probe may
                succeed.
        """
        from kvplug.transport.store.compiled import library

        try:
            library()
        except UnsupportedError as e:
            return Probe(viable=False, reason=str(e))
        return super().run_probe()

    def load_client(self) -> Callable[..., Any]:
        """Load ``client``. Raises as :meth:`load_factory`."""
        return self._load_callable("client")


@attrs.frozen(kw_only=True)
class DirectorySpec(_ProbedSpec):
    """One directory of engines. Its name is the scheme of the URLs in ``peers`` by which a config selects it.

    ``factory`` is called with one argument, a ``kvplug.transport.Directory.Context``, and returns a
    ``Directory``.
    """

    kind: Kind = attrs.field(default=Kind.DIRECTORY, init=False, repr=False)
    """``Kind.DIRECTORY``."""


@attrs.frozen(kw_only=True)
class ConnectorSpec(_Spec):
    """One connector: a factory for each of its two sides.

    ``factory`` makes the scheduler side, ``worker_factory`` the worker side; both are called with one
    argument, a ``kvplug.engine.context.ConnectorContext``.
    """

    kind: Kind = attrs.field(default=Kind.CONNECTOR, init=False, repr=False)
    """``Kind.CONNECTOR``."""
    worker_factory: str = attrs.field(validator=_check_target)
    """The factory of the worker side, as ``"package.module:Name"``."""
    moves_pages: bool = False
    """Whether KV moves between engines only as pages of stores, which lie in host memory. If so, links need
    pipes for CPU tensors, wherever the caches are. If not, a pipe must move tensors of the caches' device."""
    splits_heads: bool = False
    """Whether the connector can move KV between engines that split the heads over different numbers of
    workers. If so, each worker connects to the workers of the peer engine that have its heads."""
    hashes_on_devices: bool = True
    """Whether ``integrity`` also applies to KV in caches on a device."""
    uses_lookup_buffer: bool = False
    """Whether the connector keeps KV in the lookup buffer that the config names. If not, a config that names
    a lookup buffer is refused."""

    def load_worker_factory(self) -> Callable[..., Any]:
        """Load the worker side's factory. Raises as :meth:`load_factory`."""
        return self._load_callable("worker_factory")


@attrs.frozen(kw_only=True)
class SinkSpec(_Spec):
    """A sink for metrics.

    ``factory`` is called with one argument, an instance of the options class (``None`` if there are no
    options), and returns a ``Sink``.
    """

    kind: Kind = attrs.field(default=Kind.SINK, init=False, repr=False)
    """``Kind.SINK``."""


@attrs.frozen(kw_only=True)
class CommandSpec(_Offered):
    """One command of the program ``kvplug``."""

    kind: Kind = attrs.field(default=Kind.COMMAND, init=False, repr=False)
    """``Kind.COMMAND``."""
    name: str = attrs.field(validator=_check_name)
    """The word that an operator writes on the command line, after ``kvplug``."""
    target: str = attrs.field(validator=_check_target)
    """A click command, as ``"package.module:name"``. Imported when the command is used, not for
    ``kvplug --help``."""
    summary: str = ""
    """One line for ``kvplug --help``."""

    def load(self) -> Any:
        """Import the plugin's code and return the click command.

        Raises:
            PluginLoadError: the command cannot be imported or does not exist.
        """
        return self._load("target")


Spec = TransportSpec | StoreSpec | DirectorySpec | ConnectorSpec | SinkSpec | CommandSpec
"""Anything a plugin can offer."""
