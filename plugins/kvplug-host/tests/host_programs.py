"""Programs that tests run in other processes, and stores that they use."""

from __future__ import annotations

import signal
import threading
from typing import Any

from kvplug import Config, build_store
from kvplug.assembly.stores import serve_store
from kvplug_host import protocol
from kvplug_host.client.page_pipe import PagePipe
from kvplug_lab.named_pages import NamedPages
from kvplug_testing import peers


def config(**options: Any) -> Config:
    """Of a program that opens a store with these options."""
    common = {
        key: options.pop(key) for key in ("transport", "timeout_s", "host", "integrity") if key in options
    }
    return Config.from_dict(
        {"stores": ["host"], "timeout_s": 20, "connect_timeout_s": 20, **common, "options": {"host": options}}
    )


def serve(parent: peers.Parent, address: str, options: dict[str, Any]) -> None:
    """Serve a store until the parent says so."""
    with serve_store(config(**options), address=address) as server:
        parent.send(server.contact)
        parent.recv(None)


def put_and_stop(
    parent: peers.Parent, address: str, options: dict[str, Any], nbytes: int, count: int
) -> None:
    """Put pages into a store, and stop in the middle of the first message with pages."""

    def send_rows(pipe: PagePipe, request: int, first: int, rows: int, *_: Any) -> None:
        pipe.pipe.send_tensor(protocol.tag(request, first, rows), timeout=None).wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    with build_store(config(contact=address, **options)) as store:
        NamedPages(nbytes).put(store, "before")
        PagePipe.send_rows = send_rows  # type: ignore[method-assign]
        store.submit_put(NamedPages(nbytes).request(store, *map(str, range(count))), timeout=600)
        parent.recv(None)
