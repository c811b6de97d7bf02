"""The hooks of one plugin: which it implements, and what each returns. Errors suggest the likely name."""

from __future__ import annotations

import types
from typing import Any, Final

import pluggy

from kvplug.config.messages import nearest, shown
from kvplug.errors import PluginLoadError
from kvplug.transport import hookspecs
from kvplug.transport.spec import Spec

_PREFIX: Final = f"{hookspecs.PROJECT}_"
_HOOKS: Final = ", ".join(hookspecs.OFFERED)


def offers_of(manager: pluggy.PluginManager, plugin: object, no_hook: str = "") -> list[Spec]:
    """The results of the hooks of a plugin that is registered with ``manager``, each called alone.

    ``no_hook``: the advice in the error if the plugin implements none.

    Raises:
        PluginLoadError: a hook is unknown, not marked, a wrapper, returns something else, or there is none.
    """
    callers = [caller for caller in manager.get_hookcallers(plugin) or [] if not _may_be_unknown(caller)]
    for caller in callers:
        if caller.name not in hookspecs.OFFERED:
            raise PluginLoadError(f"no hook is called {caller.name}{_meant(caller.name)} there are {_HOOKS}")
    _check_marked(plugin)
    if not callers:
        raise PluginLoadError(
            f"implements no hook; {no_hook or f'there are {_HOOKS}, marked with kvplug.transport.hookimpl'}"
        )
    return [spec for caller in callers for spec in _offered(caller, plugin)]


def _may_be_unknown(caller: pluggy.HookCaller) -> bool:
    """Whether the hook is of a later kvplug, and marked as optional for earlier ones (``optionalhook``)."""
    return caller.name not in hookspecs.OFFERED and all(each.optionalhook for each in caller.get_hookimpls())


def _meant(name: str) -> str:
    """The hook that a misspelt name is closest to, compared without the common prefix."""
    found = nearest(name.removeprefix(_PREFIX), (hook.removeprefix(_PREFIX) for hook in hookspecs.OFFERED))
    return f"; did you mean {_PREFIX}{found}?" if found else ";"


def _check_marked(plugin: object) -> None:
    """Refuse an unmarked hook: pluggy would never call it, and does not report that."""
    for name, found in vars(plugin).items() if hasattr(plugin, "__dict__") else ():
        if name.startswith(_PREFIX) and isinstance(found, types.FunctionType):
            if not hasattr(found, f"{_PREFIX}impl"):
                raise PluginLoadError(
                    f"{name} is not marked with kvplug.transport.hookimpl, so it would never be called"
                )


def _offered(caller: pluggy.HookCaller, plugin: object) -> list[Spec]:
    wanted = hookspecs.OFFERED[caller.name]
    specs: list[Spec] = []
    for implementation in caller.get_hookimpls():
        if implementation.plugin is not plugin:
            continue
        if implementation.hookwrapper or implementation.wrapper:
            raise PluginLoadError(f"{caller.name} is a wrapper; hooks of kvplug only collect")
        offered: Any = implementation.function()
        if not isinstance(offered, (list, tuple)):
            raise PluginLoadError(f"{caller.name} returned {shown(offered)}, not a list of {wanted.__name__}")
        for each in offered:
            if not isinstance(each, wanted):
                raise PluginLoadError(
                    f"{caller.name} returned {shown(each)} in its list, not a {wanted.__name__}"
                )
            specs.append(each)  # type: ignore[arg-type]
    return specs
