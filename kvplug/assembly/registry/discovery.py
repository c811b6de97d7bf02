"""Finds the installed entry points in the group ``kvplug``, and the plugin API that each was written for.

This module imports neither plugins nor their packages.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any, Final

import attrs

from kvplug.errors import PluginLoadError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import free_locks_after_fork
from kvplug.transport.hookspecs import PLUGIN_API, PROJECT
from kvplug.transport.spec import Spec

_log = logging.getLogger(__name__)

_API: Final = "KVPLUG_API"
_EXAMPLE: Final = f"{_API} = {PLUGIN_API}"
_LOOKING: Final = "looking for plugins"
_parsing = threading.Lock()
"""Serialises parsing: in Python 3.11, threads that parse at the same time can raise SystemError."""
free_locks_after_fork(sys.modules[__name__])


class PluginStatus(enum.StrEnum):
    """The status of an installed plugin."""

    OK = "ok"
    """Its module was imported, and its specs are valid."""
    BROKEN = "broken"
    """It does not load, or breaks a rule for plugins."""
    BLOCKED = "blocked"
    """``KVPLUG_DISABLE_PLUGINS`` names it: it was not imported."""


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One plugin that was discovered, loaded or not."""

    name: str
    """The entry point's name, which ``kvplug list`` prints and ``KVPLUG_DISABLE_PLUGINS`` blocks."""
    module: str = ""
    """The module that the entry point names; empty for an object that a program registered."""
    distribution: str = ""
    """The installed package that its entry point belongs to."""
    version: str = ""
    """The distribution's version; empty if its metadata has none."""
    status: PluginStatus = PluginStatus.OK
    """``ok``, ``broken`` or ``blocked``."""
    reason: str = ""
    """Why it is broken or blocked; empty when it is neither."""
    api: tuple[int, int] | None = None
    """The plugin API that its ``KVPLUG_API`` states; ``None`` if kvplug did not read it."""
    specs: tuple[Spec, ...] = ()
    """The plugin's offers; empty unless it is ``ok``."""
    error: BaseException | None = attrs.field(default=None, eq=False, repr=False)
    """Why it is broken, as an exception with its traceback; ``None`` when it is not."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip() or self.name

    @property
    def label(self) -> str:
        """The plugin's status, name and package."""
        return f"{self.status}: {self.name} ({self})"


def discover() -> tuple[PluginInfo, ...]:
    """Return every installed plugin once, sorted by name, without loading any.

    If a distribution is on the path twice (say, an editable install beside its build), the first one counts,
    as it does for imports. A distribution with unreadable metadata is skipped and logged.

    Raises:
        ResourceExhaustedError: the process has no free descriptor for the search.
    """
    # importlib.metadata treats a folder that it cannot list as empty, and caches that.
    for folder in sys.path:
        try:
            os.listdir(folder or os.curdir)
        except OSError as e:  # usually a file, or a missing folder
            NamedExhaustion.check(e, _LOOKING)
    metadata.MetadataPathFinder().invalidate_caches()  # before Python 3.13 this is an instance method
    found: dict[str, list[PluginInfo]] = {}
    for distribution in metadata.distributions():
        try:
            plugins = dict.fromkeys(_plugins_of(distribution))
            for each in plugins:
                found.setdefault(normalised(each.distribution), [*plugins])
        except Exception as e:  # one distribution's broken metadata must not hide the others' plugins
            NamedExhaustion.check(e, _LOOKING)
            _log.warning("skipped a distribution with unreadable metadata: %s", e)
    every = (each for plugins in found.values() for each in plugins)
    return tuple(sorted(every, key=lambda each: (each.name, each.distribution, each.module)))


def _plugins_of(distribution: metadata.Distribution) -> Iterator[PluginInfo]:
    text = distribution.read_text("entry_points.txt")
    if not text or f"[{PROJECT}]" not in text:  # a quick test, since parsing every file is slow
        return
    # Distribution.metadata would parse the whole text, readme included.
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    headers = dict(line.partition(":")[::2] for line in about.partition("\n\n")[0].splitlines())
    name, version = (headers.get(key, "").strip() or "unknown" for key in ("Name", "Version"))
    for each in distribution.entry_points:
        if each.group == PROJECT:
            module = each.value.partition("[")[0].strip()
            yield PluginInfo(name=each.name, module=module, distribution=name, version=version)


def normalised(distribution: str) -> str:
    """Normalise a distribution's name, as packaging tools do to compare names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def check_api(plugin: PluginInfo) -> tuple[int, int]:
    """Return the plugin API that a plugin's module states, without importing the module.

    Raises:
        PluginLoadError: the entry point does not name a module, or the module does not exist, or does not
            state an API that this kvplug supports.
        Exception: the module cannot be read.
    """
    module, _, attribute = plugin.module.partition(":")
    if attribute:
        raise PluginLoadError(
            f"its entry point names {attribute} in the module, but must name only the module:"
            f' {plugin.name} = "{module}"'
        )
    stated = stated_api(module)
    dotted, here = "{}.{}".format(*stated), "this kvplug has {}.{}".format(*PLUGIN_API)
    if stated[0] != PLUGIN_API[0]:
        which = "kvplug" if stated[0] > PLUGIN_API[0] else "the plugin"
        raise PluginLoadError(f"written for plugin API {dotted}, and {here}: upgrade {which}")
    if stated[1] > PLUGIN_API[1]:
        raise PluginLoadError(f"needs plugin API {dotted}, and {here}: upgrade kvplug")
    return stated


def stated_api(module: str) -> tuple[int, int]:
    """Read ``KVPLUG_API`` from a module's source.

    Raises:
        PluginLoadError: the module does not exist, or does not assign a literal pair of whole numbers.
        Exception: the source cannot be read or parsed.
    """
    source = _source(module)
    with _parsing:
        tree = ast.parse(source, module)
    stated: list[ast.expr | None] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stated += [node.value for each in targets if isinstance(each, ast.Name) and each.id == _API]
    if not stated or stated[-1] is None:
        raise PluginLoadError(f"{module} does not state the plugin API it was written for; add {_EXAMPLE}")
    try:
        pair: Any = ast.literal_eval(stated[-1])
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as e:
        raise PluginLoadError(
            f"{_API} in {module} is not a literal, so it cannot be read without running the module;"
            f" write {_EXAMPLE}"
        ) from e
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(each) is int for each in pair)):
        raise PluginLoadError(
            f"{_API} in {module} is {pair!r}, not a pair of whole numbers; write {_EXAMPLE}"
        )
    return pair


def _source(module: str) -> str:
    """Find a module's source through the search paths of its packages, without importing them."""
    name, *parts = module.split(".")
    spec = importlib.util.find_spec(name)  # finders of editable installs know top-level packages only
    for part in parts:
        path = None if spec is None else spec.submodule_search_locations
        if path is None:
            raise PluginLoadError(f"there is no module {module}: {name} is not an installed package")
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, path)
    if spec is None:
        raise PluginLoadError(f"there is no module {name}, which the entry point names")
    read = getattr(spec.loader, "get_source", None)
    source: str | None = read(name) if read is not None else None
    if source is None:
        raise PluginLoadError(f"{module} has no source to read {_API} from")
    return source
