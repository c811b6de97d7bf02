"""The laws of directories, as tests: announcements, leases, time, addresses."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

import pytest

from kvplug import ConfigError
from kvplug.kit import Kind
from kvplug.transport import Directory
from kvplug_testing import waits
from kvplug_testing.contract.base import Contract, law
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent

_ENTRIES: Final = {
    "engine/0": b"{}",
    "another-engine/0": bytes(range(256)) * 64,
    "engine/1": b"",
    "engine/10": "ключ".encode(),
    "!~|{}[]()*?^$\\'\"%:@/2": b"a name may have any printable character",
}

_PROMPT_S: Final = 1.0
_MISTAKES: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Errors that no service causes."""


def _holding(parent: Parent, suite: dict[str, Any], url: str, lease_s: float) -> None:
    """Announce, and wait to be killed."""
    directory: Directory = suite_from_ref(suite).opened(url)
    directory.announce("engine/0", b"mine", lease_s)
    parent.send("announced")
    parent.recv(timeout=None)


class DirectoryContract(Contract):
    """The suite of directories. An author's subclass names the directory, and gives each test a URL::

    class TestMine(DirectoryContract):
        directory = "mine"

        def url(self):
            return f"mine://127.0.0.1:{PORT}/{uuid.uuid4().hex}"
    """

    kind: ClassVar[Kind] = Kind.DIRECTORY
    _named_by: ClassVar[str] = "directory"
    directory: ClassVar[str] = ""
    """Name of an installed directory."""
    lease_s: ClassVar[float] = 2.0
    """A lease that the service takes as it is given."""
    late_s: ClassVar[float] = 2.0
    """How long after the end of its lease an entry may still be seen."""
    timeout_s: ClassVar[float] = 1.0
    """The context's ``timeout_s``."""

    def url(self) -> str:
        """A URL at which nothing is announced yet."""
        pytest.fail(f"{self.called} has no URL: override `url`", pytrace=False)

    def stop(self) -> Callable[[], object]:
        """Stop the service that the test's URL names, as SIGSTOP does; returns what lets it go on. Skips the
        test unless it is overridden."""
        pytest.skip(f"{self.called} does not override `stop`: calls of a stopped service are not judged")

    def opened(self, url: str) -> Directory:
        """A new object at that URL. Override it for a directory that is not installed."""
        context = Directory.Context(options=self.made_options(), url=url, timeout_s=self.timeout_s)
        made = self.installed("opened").load_factory()(context)
        assert isinstance(made, Directory), f"the factory made {made!r}, which is not a Directory"
        return made

    def open(self, url: str) -> Directory:
        made = self.opened(url)
        self.later(made.close)
        return made

    @law("DIR-1")
    def test_an_announcement_is_seen_as_it_was_made_and_is_replaced_by_the_next(self) -> None:
        url = self.url()
        mine, theirs = self.open(url), self.open(url)
        assert dict(theirs.entries()) == {}
        for name, entry in _ENTRIES.items():
            mine.announce(name, entry, 30)
        assert dict(theirs.entries()) == _ENTRIES
        mine.announce("engine/0", b"changed", 30)
        theirs.announce("engine/1", b"by another", 30)
        assert dict(mine.entries()) == {**_ENTRIES, "engine/0": b"changed", "engine/1": b"by another"}
        for is_withdrawn in (False, True):
            if is_withdrawn:
                theirs.withdraw("engine/1")
            mine.announce("engine/1", _ENTRIES["engine/1"], 30)
            assert dict(theirs.entries()) == {**_ENTRIES, "engine/0": b"changed"}

    @law("DIR-1")
    def test_what_is_withdrawn_is_gone_at_once_and_nothing_else(self) -> None:
        url = self.url()
        mine, theirs = self.open(url), self.open(url)
        for name in ("engine/1", "engine/10"):
            mine.announce(name, b"here", 30)
        mine.withdraw("engine/1")
        mine.withdraw("was never there")
        assert dict(theirs.entries()) == {"engine/10": b"here"}
        mine.announce("engine/1", b"again", 30)
        assert dict(theirs.entries()) == {"engine/10": b"here", "engine/1": b"again"}

    @law("DIR-2", timeout_s=90)
    def test_an_entry_stays_while_it_is_renewed_and_goes_when_its_lease_has_ended(self) -> None:
        url = self.url()
        mine, theirs = self.open(url), self.open(url)
        mine.announce("left", b"alone", self.lease_s)
        other = self.open(url)
        until = time.monotonic() + 2 * self.lease_s + self.late_s
        while time.monotonic() < until:
            other.announce("kept", b"alive", self.lease_s)
            assert theirs.entries().get("kept") == b"alive"
            time.sleep(self.lease_s / 5)
        assert dict(theirs.entries()) == {"kept": b"alive"}
        mine.announce("left", b"again", 30)
        assert theirs.entries()["left"] == b"again"

    @law("DIR-2", needs="other_processes", timeout_s=90)
    def test_a_killed_process_has_left_when_its_lease_has_ended(self) -> None:
        url = self.url()
        here = self.open(url)
        peer = self.start(_holding, self.suite_ref(), url, self.lease_s)
        assert peer.recv() == "announced"
        assert dict(here.entries()) == {"engine/0": b"mine"}
        peer.kill()
        waits.until(lambda: not here.entries(), self.lease_s + 2 * self.late_s, "the end of the lease")

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = in_forked_child(held)
        url = self.url()
        mine = self.open(url)
        mine.announce("engine/0", b"mine", 30)
        assert not (more := more_than(before)), f"a forked child holds {more}"
        mine.announce("engine/0", b"still", 30)
        assert dict(mine.entries()) == {"engine/0": b"still"}

    @law("DIR-3")
    def test_every_call_ends_in_time_at_a_service_that_is_stopped(self) -> None:
        url = self.url()
        mine = self.open(url)
        mine.announce("engine/0", b"mine", 30)
        with contextlib.ExitStack() as stopped:
            stopped.callback(self.stop())
            for call in (
                lambda: mine.announce("engine/0", b"mine", 30),
                mine.entries,
                lambda: mine.withdraw("engine/0"),
                self.open(url).entries,
            ):
                began = time.monotonic()
                with pytest.raises(Exception, match=r".") as raised:
                    call()
                assert time.monotonic() - began < self.timeout_s + _PROMPT_S
                assert not isinstance(raised.value, _MISTAKES), f"a mistake of the program: {raised.value!r}"
        waits.until(lambda: waits.Call(mine.entries).end().error is None, 10, "an answer after the stop")

    @law("DIR-3")
    def test_making_a_directory_does_not_wait_for_the_service(self) -> None:
        url = self.url()
        with contextlib.ExitStack() as stopped:
            stopped.callback(self.stop())
            began = time.monotonic()
            self.open(url)
            assert time.monotonic() - began < _PROMPT_S

    @law("DIR-4")
    def test_an_invalid_address_is_refused_when_a_directory_is_made(self) -> None:
        wrong = re.sub(r"^([a-z0-9-]+://[^/]*):\d+", r"\1:99999", self.url())
        if ":99999" not in wrong:
            pytest.skip("the URL has no port")
        with pytest.raises(ConfigError, match=r"99999|65535"):
            self.open(wrong)
