"""A lookup buffer by name, from a config, between two processes."""

from __future__ import annotations

import pytest
import torch

from kvplug import Config, ConfigError, build_lookup, connect_pipe, listen_pipe
from kvplug.transport import UnknownTransportError
from kvplug_testing import peers

pytestmark = pytest.mark.timeout(60)

CONFIG = Config(lookup_buffer="simple", transport="cpu", timeout_s=20)


def holds(parent: peers.Parent) -> None:
    with listen_pipe(CONFIG, "unix:") as server:
        parent.send(server.contact)
        store = build_lookup(CONFIG).hold()
        key = torch.arange(48.0).reshape(2, 3, 1, 8)
        store.insert([1, 2, 3], None, key, -key, None)
        store.attach(server.accept(), server.accept())
        parent.recv()
        store.close()


@pytest.mark.full
def test_a_store_in_one_process_is_read_from_another() -> None:
    with peers.start(holds, timeout_s=50) as holder:
        contact = holder.recv()
        signal, data = connect_pipe(CONFIG, contact), connect_pipe(CONFIG, contact)
        buffer = build_lookup(CONFIG).reach(signal, data)
        found = buffer.select([1, 2, 3, 4])
        assert found.tokens.tolist() == [1, 2, 3]
        assert found.key is not None
        assert torch.equal(found.key, torch.arange(48.0).reshape(2, 3, 1, 8))
        buffer.close()
        holder.send("done")


def test_an_unknown_name_and_an_unknown_option_are_refused() -> None:
    with pytest.raises(UnknownTransportError, match="simple"):
        build_lookup(Config(lookup_buffer="lokup"))
    with pytest.raises(ConfigError, match="nosuch"):
        build_lookup(Config(lookup_buffer="simple", options={"simple": {"nosuch": 1}}))
