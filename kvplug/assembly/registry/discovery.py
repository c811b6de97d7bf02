"""Finds the installed entry points of the group ``kvplug``, and the plugin API that each was written for.

This module imports neither plugins nor their packages.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any

import attrs

from kvplug.errors import PluginLoadError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import free_locks_after_fork
from kvplug.transport.hookspecs import PLUGIN_API, PROJECT

_log = logging.getLogger(__name__)

API_NAME = "KVPLUG_API"

_LOOKING = "looking for plugins"
_parsing = threading.Lock()
"""Serialises parsing: in Python 3.11, threads that parse at the same time can raise SystemError."""
free_locks_after_fork(sys.modules[__name__])


@attrs.frozen(kw_only=True)
class DiscoveredPlugin:
    """One entry point and the distribution that it belongs to."""

    name: str
    module: str
    """The module that the entry point names."""
    distribution: str
    version: str


def discover() -> tuple[DiscoveredPlugin, ...]:
    """Return every installed plugin once, sorted by name.

    If a distribution is on the path twice (say, an editable install beside its build), the first one counts,
    as it does for imports. A distribution with unreadable metadata is skipped and logged.

    Raises:
        ResourceExhaustedError: the process has no free descriptor for the search.
    """
    by_distribution: dict[str, set[DiscoveredPlugin]] = {}
    for distribution in distributions():
        try:
            found = _plugins_of(distribution)
        except Exception as e:  # one distribution's broken metadata must not hide the others' plugins
            NamedExhaustion.check(e, _LOOKING)
            _log.warning("skipped a distribution with unreadable metadata: %s", e)
            continue
        for each in found:
            by_distribution.setdefault(normalised(each.distribution), found)
    every = (each for found in by_distribution.values() for each in found)
    return tuple(sorted(every, key=lambda each: (each.name, each.distribution, each.module)))


def distributions() -> Iterator[metadata.Distribution]:
    """Yield every distribution on the path.

    importlib.metadata treats a folder that it cannot list as empty, and caches that until the folder changes.
    This function therefore lists the folders itself first, and clears the cache.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to list the folders.
    """
    for folder in sys.path:
        try:
            os.listdir(folder or os.curdir)
        except OSError as e:  # usually a file, or a missing folder
            NamedExhaustion.check(e, _LOOKING)
    metadata.MetadataPathFinder().invalidate_caches()  # before Python 3.13 this is an instance method
    yield from metadata.distributions()


def _plugins_of(distribution: metadata.Distribution) -> set[DiscoveredPlugin]:
    text = distribution.read_text("entry_points.txt")
    if not text or f"[{PROJECT}]" not in text:  # parsing the others would cost most of the time
        return set()
    about = distribution.metadata
    return {
        DiscoveredPlugin(
            name=each.name,
            module=each.value.partition("[")[0].strip(),
            distribution=about["Name"] or "unknown",
            version=about["Version"] or "unknown",
        )
        for each in distribution.entry_points
        if each.group == PROJECT
    }


def normalised(distribution: str) -> str:
    """Normalise a distribution's name, as packaging tools do to compare names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def check_api(plugin: DiscoveredPlugin) -> tuple[int, int]:
    """Return the plugin API that a plugin's module states, without importing the module.

    Raises:
        PluginLoadError: the entry point does not name a module, the module cannot be found or read, or it
            does not state an API that this kvplug supports.
    """
    module, _, attribute = plugin.module.partition(":")
    if attribute:
        raise PluginLoadError(
            f"its entry point names {attribute} in the module, but must name only the module:"
            f' {plugin.name} = "{module}"'
        )
    stated = stated_api(module)
    here = f"this kvplug has {_dotted(PLUGIN_API)}"
    if stated[0] != PLUGIN_API[0]:
        which = "kvplug" if stated[0] > PLUGIN_API[0] else "the plugin"
        raise PluginLoadError(f"written for plugin API {_dotted(stated)}, and {here}: upgrade {which}")
    if stated[1] > PLUGIN_API[1]:
        raise PluginLoadError(f"needs plugin API {_dotted(stated)}, and {here}: upgrade kvplug")
    return stated


def _dotted(api: tuple[int, int]) -> str:
    return f"{api[0]}.{api[1]}"


def stated_api(module: str) -> tuple[int, int]:
    """Read ``KVPLUG_API`` from a module's source.

    Raises:
        PluginLoadError: the module or its source cannot be found, or it does not assign a literal pair of
            whole numbers.
    """
    example = f"{API_NAME} = ({PLUGIN_API[0]}, {PLUGIN_API[1]})"
    try:
        source = _source(module)
        with _parsing:
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise PluginLoadError(f"cannot read {module}: {type(e).__name__}: {e}") from e
    stated = [value for node in tree.body if (value := _assigned(node)) is not None]
    if not stated:
        raise PluginLoadError(f"{module} does not state the plugin API it was written for; add {example}")
    try:
        pair: Any = ast.literal_eval(stated[-1])
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as e:
        raise PluginLoadError(
            f"{API_NAME} in {module} is not a literal; it is read without running the module: {example}"
        ) from e
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(each) is int for each in pair)):
        raise PluginLoadError(
            f"{API_NAME} in {module} is {pair!r}; a pair of whole numbers is needed: {example}"
        )
    return pair


def _assigned(node: ast.stmt) -> ast.expr | None:
    """Return the value that a statement assigns to ``KVPLUG_API``, or ``None`` if it assigns none."""
    match node:
        case ast.AnnAssign(target=target, value=value):
            targets = [target]
        case ast.Assign(targets=targets, value=value):
            pass
        case _:
            return None
    return value if any(isinstance(each, ast.Name) and each.id == API_NAME for each in targets) else None


def _source(module: str) -> str:
    """Find a module's source through the search paths of its packages, without importing them."""
    name, path, spec = "", None, None
    errors = (ImportError, ValueError, OSError, SyntaxError)
    with NamedExhaustion(f"cannot find {module}", PluginLoadError, errors):
        for part in module.split("."):
            if name and path is None:
                raise PluginLoadError(f"there is no module {module}: {name} is not an installed package")
            name = f"{name}.{part}" if name else part
            # The finders of editable installations know whole packages.
            spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
            path = None if spec is None else spec.submodule_search_locations
        if spec is None:
            raise PluginLoadError(f"there is no module {name}, which the entry point names")
        read = getattr(spec.loader, "get_source", None)
        source: str | None = read(name) if read is not None else None
    if source is None:
        raise PluginLoadError(f"{module} has no source to read {API_NAME} from")
    return source
