"""Shell completion of the names of plugins and offers, of keys, and of files. Of each plugin, only the entry
point is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from kvplug.net.peer_text import printable
from kvplug.transport.spec import Kind

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def items(known: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """Return the names that begin with ``incomplete``, each with a line of help."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=printable(text)) for name, text in known if name.startswith(incomplete)]


def offers(*kinds: Kind, plugins: bool = False) -> Complete:
    """Return a completer for offers of these kinds (default: all). ``plugins``: also for plugins."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from kvplug.assembly.registry import Registry

        registry = Registry.from_env()
        known = {
            spec.name: getattr(spec, "summary", "")
            for _, spec in registry
            if (spec.kind in kinds if kinds else spec.kind is not Kind.COMMAND)
        }
        if plugins:
            known |= {plugin.name: f"the plugin of {plugin}" for plugin in registry.plugins}
        return items(sorted(known.items()), incomplete)

    return complete


def plugins(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of plugins."""
    from kvplug.assembly.registry import Registry

    return items(sorted((each.name, str(each)) for each in Registry.from_env().plugins), incomplete)


def overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the keys of KEY=VALUE."""
    from kvplug.config.config import KEYS

    return items([(f"{key}=", "") for key in KEYS], incomplete)


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
