"""What the spec names: the store in this process, or the end of one in another process."""

from __future__ import annotations

from kvplug.transport import Store


def make_store(context: Store.Context) -> Store:
    """The store that a config names: in this process, or the one at the option ``contact``."""
    options = context.options
    if options is not None and options.contact:
        from kvplug_host.client.contact import ContactStore

        return ContactStore(context, options.contact)
    from kvplug_host.store import HostStore

    return HostStore(context)


def make_client(context: Store.Context, link: Store.Link) -> Store:
    """This process's end of the store that the peer at the other end of the link serves."""
    from kvplug_host.client.client import HostClient

    return HostClient(context, link)
