"""The registry: loads each plugin separately, collects the specs that it offers, and resolves names.

pluggy only calls the hooks; the registry keeps the specs in dicts.
"""

from __future__ import annotations

import importlib
import logging
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import pluggy

from kvplug.assembly.registry.discovery import PluginInfo, PluginStatus, check_api, discover, normalised
from kvplug.assembly.registry.packages import PACKAGES
from kvplug.config.messages import did_you_mean, nearest, shown
from kvplug.errors import (
    AmbiguousNameError,
    ConfigError,
    PluginError,
    PluginLoadError,
    UnknownConnectorError,
    UnknownNameError,
    UnknownTransportError,
)
from kvplug.net.exhaustion import DESCRIPTORS, NamedExhaustion
from kvplug.transport import hookspecs
from kvplug.transport.spec import TRANSPORTS, Kind, Spec, note_distribution

_log = logging.getLogger(__name__)

_CALLED: Final = {Kind.PIPE: "transport", Kind.QUEUE: "message queue", Kind.LOOKUP_BUFFER: "lookup buffer"}
"""What messages call a kind, if that differs from its value."""
_KEYS: Final = {Kind.PIPE: "transport", Kind.STORE: "stores", Kind.SINK: "sinks", Kind.DIRECTORY: "peers"}
"""The config key under which an offer of a kind is named, if it differs from the kind's value."""
_PREFIX: Final = f"{hookspecs.PROJECT}_"
_HOOKS: Final = ", ".join(hookspecs.OFFERED)
_FLAGS: Final = dict.fromkeys(("", "0", "false", "no", "off"), False) | dict.fromkeys(
    ("1", "true", "yes", "on"), True
)


class Registry:
    """Resolves names to specs. ``Registry()`` is empty; :meth:`from_env` loads the installed plugins.

    >>> registry = Registry()
    >>> registry.plugins, list(registry)
    ((), [])
    """

    def __init__(self) -> None:
        self._plugins: list[PluginInfo] = []
        self._owned: dict[tuple[Kind, str], list[tuple[PluginInfo, Spec]]] = {}
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Load all installed plugins. A plugin that does not load is listed with the reason; the others still
        load.

        ``KVPLUG_DISABLE_PLUGINS`` blocks plugins by name before they are imported.

        Raises:
            PluginLoadError: a plugin does not load, and ``KVPLUG_STRICT_PLUGINS`` is set.
            ConfigError: ``KVPLUG_STRICT_PLUGINS`` is not a flag such as 0 or 1.
            ResourceExhaustedError: the process has no free descriptor to find and load plugins.
        """
        environ = os.environ if environ is None else environ
        blocked = {each.strip() for each in environ.get("KVPLUG_DISABLE_PLUGINS", "").split(",")} - {""}
        given = environ.get("KVPLUG_STRICT_PLUGINS", "").strip().lower()
        if given not in _FLAGS:
            raise ConfigError(f"KVPLUG_STRICT_PLUGINS: {shown(given)} was given; allowed is 1 or 0")
        registry = cls()
        for each in discover():
            registry._keep(_loaded(registry._hooks, each, is_blocked=each.name in blocked))
        for name in sorted(blocked - {each.name for each in registry.plugins}):
            _log.warning("KVPLUG_DISABLE_PLUGINS names %r, but no such plugin is installed", name)
        broken = [each for each in registry.plugins if each.status is PluginStatus.BROKEN]
        if _FLAGS[given] and broken:
            lines = "".join(f"\n  - {each.name} ({each}): {each.reason}" for each in broken)
            raise PluginLoadError(
                f"KVPLUG_STRICT_PLUGINS is set, and installed plugins do not load ({len(broken)}):{lines}"
            ) from broken[0].error
        return registry

    # -- questions ------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin found, including blocked and broken ones, in loading order."""
        return tuple(self._plugins)

    def __iter__(self) -> Iterator[tuple[PluginInfo, Spec]]:
        """Iterate over all offers with their plugins, including names that two plugins offer."""
        for plugin in self._plugins:
            for spec in plugin.specs:
                yield plugin, spec

    def specs(self, kind: Kind) -> tuple[Any, ...]:
        """Return the offers of a kind, sorted by name, without names that two plugins offer."""
        every = sorted(self._owned.items(), key=lambda item: item[0])
        return tuple(owners[0][1] for (of, _), owners in every if of is kind and len(owners) == 1)

    @property
    def failed(self) -> tuple[PluginInfo, ...]:
        """The plugins that are broken or blocked. A name that no plugin offers may be one of theirs."""
        return tuple(plugin for plugin in self._plugins if plugin.status is not PluginStatus.OK)

    def failures(self) -> tuple[str, ...]:
        """Return one line for each failed plugin."""
        return tuple(f"{plugin.label}: {plugin.reason}" for plugin in self.failed)

    def owners(self, kind: Kind, name: str) -> tuple[PluginInfo, ...]:
        """Return the plugins that offer ``name``, which may be ``distribution:name``."""
        return tuple(plugin for plugin, _ in self._offers(kind, name))

    def get(self, kind: str, name: str) -> Any:
        """Return the spec that ``name`` (or ``distribution:name``) identifies.

        Raises:
            UnknownConnectorError, UnknownTransportError, UnknownNameError: no plugin offers the name; the
                error lists the known names, and the plugins that did not load.
            AmbiguousNameError: two plugins offer the name, so kvplug uses neither.
        """
        kind = Kind(kind)
        offers = self._offers(kind, name)
        if len(offers) == 1:
            return offers[0][1]
        raise self._ambiguous(kind, name, offers) if offers else self._unknown(kind, name)

    def find(self, kind: Kind, name: str) -> Any:
        """Return the spec that ``name`` identifies, or ``None`` where :meth:`get` would raise."""
        offers = self._offers(kind, name)
        return offers[0][1] if len(offers) == 1 else None

    # -- plugins --------------------------------------------------------------------------------

    def register(self, plugin: object, *, name: str, distribution: str = "", version: str = "") -> PluginInfo:
        """Add a plugin object: a module, or any object with ``hookimpl`` functions. Intended for tests.

        Raises:
            PluginLoadError: the plugin breaks a rule; none of its offers is registered.
        """
        info = PluginInfo(name=name, distribution=distribution, version=version, api=hookspecs.PLUGIN_API)
        try:
            info = attrs.evolve(info, specs=_collected(self._hooks, plugin))
        except (Exception, SystemExit) as e:
            raise PluginLoadError(f"plugin {name}: {_reason(e)}") from e
        self._keep(info)
        return info

    def _keep(self, info: PluginInfo) -> None:
        self._plugins.append(info)
        for spec in info.specs:
            note_distribution(spec, info.distribution)
            self._owned.setdefault((spec.kind, spec.name), []).append((info, spec))

    # -- names ----------------------------------------------------------------------------------

    def _offers(self, kind: Kind, name: str) -> list[tuple[PluginInfo, Spec]]:
        distribution, _, bare = name.rpartition(":")
        offers = self._owned.get((kind, bare), [])
        if not distribution:
            return offers
        wanted = normalised(distribution)
        return [offer for offer in offers if normalised(offer[0].distribution) == wanted]

    def _ambiguous(self, kind: Kind, name: str, offers: list[tuple[PluginInfo, Spec]]) -> AmbiguousNameError:
        word, bare = _CALLED.get(kind, kind), name.rpartition(":")[2]
        whose = " and ".join(f"{plugin} (plugin {plugin.name})" for plugin, _ in offers)
        full = sorted({f"{plugin.distribution}:{bare}" for plugin, _ in offers})
        plugins = " or ".join(sorted({plugin.name for plugin, _ in offers}))
        use = f"use {' or '.join(full)}, or " if len(full) > 1 else ""
        return AmbiguousNameError(
            f"the {word} {bare!r} is offered by {whose}, so neither is used;"
            f" {use}name {plugins} in KVPLUG_DISABLE_PLUGINS"
        )

    def _unknown(self, kind: Kind, name: str) -> UnknownNameError:
        known = (bare for (of, bare) in self._owned if of is kind)
        text = self.about_unknown(f"no {_CALLED.get(kind, kind)} named", name, known, kind)
        package = PACKAGES.get(kind, {}).get(name.rpartition(":")[2])
        owner = next((each for each in self._plugins if each.distribution == package), None)
        change = f"{_KEYS.get(kind, kind)}: a name that `kvplug list --kind {kind}` shows"
        if package is not None and owner is None:
            change = f"pip install {package}"
        elif owner is not None and owner.status is PluginStatus.BLOCKED:
            change = f"the plugin {owner.name}: take it out of KVPLUG_DISABLE_PLUGINS"
        elif owner is not None and owner.status is PluginStatus.BROKEN:
            change = f"pip install --upgrade {package}    (`kvplug list` says why it does not load)"
        if kind is Kind.CONNECTOR:
            return UnknownConnectorError(text, change=change)
        return (UnknownTransportError if kind in TRANSPORTS else UnknownNameError)(text, change=change)

    def about_unknown(self, what: str, name: str, known: Iterable[str], kind: Kind | None = None) -> str:
        """Return the message about a name that no installed plugin offers.

        It gives the nearest name, the known names, the first-party packages to install for the name, and the
        plugins that did not load. If it can name neither a nearest name nor a package, it says what else has
        the name, or how plugins are found.

        Args:
            what: the beginning of the message, such as "no command named".
            name: may be ``distribution:name``.
            kind: the kind of the name; ``None``: any kind.
        """
        distribution, _, bare = name.rpartition(":")
        known = sorted({*known})
        there = {normalised(plugin.distribution) for plugin in self._plugins}
        kinds = PACKAGES if kind is None else [kind]
        packages = dict.fromkeys(PACKAGES[each][bare] for each in kinds if bare in PACKAGES.get(each, {}))
        missing = [
            f"not installed: pip install {package}"
            for package in packages
            if package not in there and normalised(distribution) in ("", package)
        ]
        hint = did_you_mean(bare, known)
        others = sorted({str(_CALLED.get(of, of)) for of, offered in self._owned if offered == bare})
        how = (
            f"a plugin is found by its entry point in the group {hookspecs.PROJECT!r};"
            " reinstall it after changing its pyproject.toml"
        )
        if others:
            how = f"{bare!r} is the name of a {' and of a '.join(others)}"
        return "\n  ".join(
            [
                f"{what} {name!r}{hint}",
                f"known: {', '.join(known) or 'none'}",
                *missing,
                *self.failures(),
                *(() if hint or missing else (how,)),
            ]
        )


def _loaded(hooks: pluggy.PluginManager, found: PluginInfo, *, is_blocked: bool) -> PluginInfo:
    """Load one plugin. If it raises an error, return it as broken, without specs."""
    if is_blocked:
        return attrs.evolve(found, status=PluginStatus.BLOCKED, reason="named in KVPLUG_DISABLE_PLUGINS")
    try:
        found = attrs.evolve(found, api=check_api(found))
        return attrs.evolve(found, specs=_collected(hooks, importlib.import_module(found.module)))
    except (Exception, SystemExit) as e:
        # Running out of descriptors is not the plugin's fault. A MemoryError may be, since the parser also
        # raises it for bad source.
        shortage = NamedExhaustion.of(e, f"loading the plugin {found.name}")
        if shortage is not None and shortage.resource == DESCRIPTORS:
            raise shortage from e
        _log.debug("plugin %s of %s did not load", found.name, found.distribution, exc_info=True)
        return attrs.evolve(found, status=PluginStatus.BROKEN, reason=_reason(e), error=e)


def _collected(hooks: pluggy.PluginManager, plugin: object) -> tuple[Spec, ...]:
    """Call each hook of a plugin and return its offers.

    Raises:
        PluginLoadError: a hook is unknown, is not marked, or returns the wrong type; or the plugin has no
            hooks, or offers a name twice.
    """
    hooks.register(plugin)
    found = [(caller.name, caller.get_hookimpls()) for caller in hooks.get_hookcallers(plugin) or ()]
    hooks.unregister(plugin)
    specs: dict[tuple[Kind, str], Spec] = {}
    for hook, (implementation,) in found:
        if hook in hookspecs.OFFERED:
            for spec in _offered(hook, implementation.function()):
                if specs.setdefault((spec.kind, spec.name), spec) is not spec:
                    raise PluginLoadError(
                        f"offers the {_CALLED.get(spec.kind, spec.kind)} {spec.name!r} twice"
                    )
        elif not implementation.optionalhook:  # an unknown optional hook comes with a later kvplug
            raise PluginLoadError(f"there is no hook named {hook}{_meant(hook)} the hooks are {_HOOKS}")
    for name, value in getattr(plugin, "__dict__", {}).items():
        is_hook = name.startswith(_PREFIX) and isinstance(value, types.FunctionType)
        if is_hook and not hasattr(value, f"{_PREFIX}impl"):  # pluggy would silently never call it
            raise PluginLoadError(
                f"{name} is not marked with kvplug.transport.hookimpl, so it would never be called"
            )
    if not found:
        raise PluginLoadError(
            f"implements no hook; the hooks are {_HOOKS}, marked with kvplug.transport.hookimpl"
        )
    return tuple(specs.values())


def _meant(name: str) -> str:
    """Return a hint with the hook whose name is closest, compared without the common prefix."""
    found = nearest(name.removeprefix(_PREFIX), (hook.removeprefix(_PREFIX) for hook in hookspecs.OFFERED))
    return f"; did you mean {_PREFIX}{found}?" if found else ";"


def _offered(hook: str, offered: Any) -> list[Spec]:
    """Return a hook's result as a list. Raise PluginLoadError unless it is a list of the right class."""
    wanted = hookspecs.OFFERED[hook]
    if not isinstance(offered, (list, tuple)):
        raise PluginLoadError(f"{hook} returned {shown(offered)}, not a list of {wanted.__name__}")
    for each in offered:
        if not isinstance(each, wanted):
            raise PluginLoadError(f"{hook} returned {shown(each)} in its list, not a {wanted.__name__}")
    return list(offered)


def _reason(error: BaseException) -> str:
    """Return one line that explains what a plugin did wrong."""
    if isinstance(error, (PluginError, pluggy.PluginValidationError)):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
