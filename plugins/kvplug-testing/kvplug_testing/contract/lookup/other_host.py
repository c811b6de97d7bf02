"""The store and the end that reaches it are on two hosts (capability ``cross_host``).

See :mod:`kvplug_testing.hosts`. Both ends are in other processes, which carry out the test's commands.
"""

from __future__ import annotations

from typing import Any

from kvplug import KvplugError
from kvplug_testing import waits
from kvplug_testing.contract.base import at_host, law
from kvplug_testing.contract.lookup.entries import unlike
from kvplug_testing.contract.lookup.suite import (
    LIFE_S,
    LookupSuite,
    insert,
    known_entry,
    pipe_endpoint,
)
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent, Peer


class OtherHost(LookupSuite):
    """The store is on host 0, the other end on host 1; between them are pipes (``remote_pipes``)."""

    @law("LOOKUP-7", "LOOKUP-4", needs="another_host")
    def test_an_entry_is_read_and_taken_whole_from_another_host(self) -> None:
        store, end = self._ends()
        assert _do(end, "match") == 3
        for verb in ("select", "drop_select"):
            assert not (wrong := _do(end, verb)), f"{verb}: {wrong}"
        assert _do(end, "match") == 0, "an entry that was handed to another host is still found"
        assert _do(store, "match") == 0

    @law("ALL-2", needs="another_host")
    def test_a_store_that_is_killed_on_another_host_is_gone(self) -> None:
        store, end = self._ends()
        end.send("wait")
        assert not end.poll(0.3), "a query without an entry did not wait"
        store.kill()
        error, said = end.recv(waits.patience_s)
        assert error == "PeerGoneError", f"the store was killed, and a waiting call gave {error or said!r}"

    def _ends(self) -> tuple[Peer, Peer]:
        """The processes of the store, which holds an entry, and of the end that reaches it."""
        store = self._start_at(0, "")
        end = self._start_at(1, store.recv())
        for each in (store, end):
            assert each.recv(2 * waits.patience_s) == "ready"
        return store, end

    def _start_at(self, host: int, contact: str) -> Peer:
        return self.start_at(host, f"{__name__}:run_end", self.suite_ref(), host, contact, timeout_s=LIFE_S)


def _do(end: Peer, verb: str) -> Any:
    """Let an end carry out a command, which must succeed in time."""
    end.send(verb)
    error, value = end.recv(waits.patience_s + 5)
    assert not error, f"{verb}: {error}: {value}"
    return value


# -- on a host -------------------------------------------------------------------------------------


def run_end(parent: Parent, suite_ref: dict[str, Any], host: int, contact: str) -> None:
    """An end, the store's if there is no contact: carries out commands, and reports each error or value."""
    suite = suite_from_ref(suite_ref)
    pipes = pipe_endpoint(suite.remote_pipes, suite.timeout_s, suite.data_pipe_options, **at_host(host))
    if contact:
        end = suite.endpoint().reach(pipes.connect(contact), pipes.connect(contact))
    else:
        listener = pipes.listen()
        parent.send(listener.contact)
        signal, data = (listener.accept(timeout=waits.patience_s) for _ in range(2))
        listener.close()
        end = suite.endpoint().hold()
        insert(end, known_entry())
        end.attach(signal, data)
    parent.send("ready")
    while True:
        verb = parent.recv(None)
        try:
            parent.send(["", _carry_out(end, verb)])
        except KvplugError as e:
            parent.send([type(e).__name__, str(e)])


def _carry_out(end: Any, verb: str) -> Any:
    tokens = list(known_entry().tokens)
    match verb:
        case "match":
            return end.match(tokens)
        case "wait":
            return str(end.drop_select([5], timeout=None).header)
    return unlike(known_entry(), getattr(end, verb)(tokens, timeout=waits.patience_s))
