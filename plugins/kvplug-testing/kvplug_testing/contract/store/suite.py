"""The base of the store suite: places, ends of stores in this process and in others, and hooks for faults."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import attrs
import pytest

from kvplug import Config, UnsupportedError
from kvplug.kit import (
    PURPOSE,
    ControlPeers,
    ExecutedStore,
    Kind,
    LinkSettings,
    ResolvedConfig,
    StoreServer,
    option_fields,
)
from kvplug.transport import BlockingStore, Credentials, PageFormat, PageSeal, Store
from kvplug_testing import waits
from kvplug_testing.contract import base
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.store.calls import kept
from kvplug_testing.contract.store.pages import MIB, Batch, batch

SOON_S = 0.3
"""The timeout of a call that must not succeed."""

_numbers = itertools.count(1)
_shared: dict[type, bool] = {}
"""Whether the stores of a suite are shared, by ``is_shared``."""


@attrs.define(kw_only=True)
class Place:
    """One set of pages, and how ends of it are opened."""

    options: dict[str, Any]
    buffer_size: int
    secret: bytes | None = None
    timeout_s: float | None = None
    """The context's ``timeout_s``; ``None``: the suite's."""
    address: str = ""
    """Where the first end serves; empty if it does not."""
    first: Store | None = None
    """The first end, in the process that opened it."""
    server: StoreServer | None = None
    """What serves it there."""
    name: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    """Of this place alone."""

    @property
    def seal(self) -> PageSeal:
        return PageSeal(secret=self.secret)

    @property
    def plain(self) -> dict[str, Any]:
        """Plain values for another process."""
        return attrs.asdict(attrs.evolve(self, first=None, server=None), recurse=False)


class StoreSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.STORE
    _named_by: ClassVar[str] = "store"
    store: ClassVar[str] = ""
    """Name of an installed store."""
    place_option: ClassVar[str] = "path"
    """The option that names the place of the pages: each test sets it to a new folder. Not used if
    :attr:`options` has it, or the store has no such option."""
    budget_option: ClassVar[str] = "size"
    """The option that bounds the bytes of all pages. If the store has no such option, the context's
    ``buffer_size`` bounds them."""
    budget_bytes: ClassVar[int] = MIB
    """The budget of the tests that fill it. Raise it for a store with a large overhead."""
    reached_by: ClassVar[str] = ""
    """How another end reaches the same pages: by ``"options"``, since it is opened with the same ones, or by
    a ``"link"`` to the first end, which serves it. Empty: by a link if the store has a client, else by
    options if it is shared, else not at all."""
    pipes: ClassVar[str] = "auto"
    """The pipe transport of links."""
    use_granularity_s: ClassVar[float] = 1.2
    """How far apart, in seconds, two uses must be for the later one to count as later."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: the timeout of a call that gives none."""

    def make_store(self, context: Store.Context) -> Store | BlockingStore:
        """The store's factory, called. Override it for a store that is not installed."""
        return self.installed("make_store").load_factory()(context)  # type: ignore[no-any-return]

    def make_client(self, context: Store.Context, link: Store.Link) -> Store:
        """The maker of the store's clients, called. Override it for a store that is not installed."""
        return self.installed("make_client").load_client()(context, link)  # type: ignore[no-any-return]

    # -- places and ends -----------------------------------------------------------------------

    def place(self, budget_bytes: int = 256 * MIB, *, secret: bytes | None = None) -> Place:
        """A new place without pages."""
        known = option_fields(self._takes) if self._takes is not None else {}
        options: dict[str, Any] = {}
        if self.place_option in known and self.place_option not in self.options:
            folder = tempfile.TemporaryDirectory(prefix="kvplug-", ignore_cleanup_errors=True)
            self.later(folder.cleanup)
            options[self.place_option] = folder.name
        if self.budget_option in known:
            options[self.budget_option] = budget_bytes
        return Place(options=options, buffer_size=budget_bytes, secret=secret)

    def context(self, place: Place) -> Store.Context:
        """The argument of the factory."""
        return Store.Context(
            options=self.made_options(**place.options),
            credentials=Credentials(),
            seal=place.seal,
            buffer_size=place.buffer_size,
            timeout_s=self.timeout_s if place.timeout_s is None else place.timeout_s,
            connect=self._connect,
        )

    def open(self, place: Place) -> Store:
        """An end that is opened by options, aborted at the end of the test."""
        context = self.context(place)
        made = self.make_store(context)
        if isinstance(made, BlockingStore):
            made = ExecutedStore(made, name=self.called, seal=context.seal, timeout_s=context.timeout_s)
        assert isinstance(made, Store), f"the factory made {made!r}, which is not a Store"
        self.later(made.abort)
        place.first = place.first or made
        return made

    def other(self, place: Place) -> Store:
        """Another end of the place. Skips the test if there can be none."""
        if self.one_end:
            pytest.skip(self.one_end)
        if not self.by_link:
            return self.open(place)
        self.make_reachable(place)
        link = self._connect(place.address, waits.patience_s)
        self.later(link.close)
        made = self.make_client(self.context(place), link)
        assert isinstance(made, Store), f"the maker of clients made {made!r}, which is not a Store"
        self.later(made.abort)
        return made

    def hold(self, *args: Any, **given: Any) -> Store:
        """The first end of a new place; arguments as of :meth:`place`."""
        return self.open(self.place(*args, **given))

    @pytest.fixture(name="end", params=["first", "other"])
    def _end(self, request: pytest.FixtureRequest) -> str:
        """Runs a test at the end that was opened first, and at another one that reaches the same pages."""
        which: str = request.param
        return which

    def first_and(self, end: str, *args: Any, **given: Any) -> tuple[Store, Store]:
        """The first end of a new place, and the tested one: the first itself, or another."""
        place = self.place(*args, **given)
        first = self.open(place)
        return first, first if end == "first" else self.other(place)

    def with_pages(
        self, end: str, count: int = 3, form: PageFormat | None = None, **given: Any
    ) -> tuple[Store, Store, Batch]:
        """As :meth:`first_and`, and pages that the first end has kept."""
        first, store = self.first_and(end, **given)
        pages = self.batch(first, count, form)
        kept(first, pages)
        return first, store, pages

    @property
    def other_processes(self) -> str:
        return super().other_processes or (self._missing_pipe if self.by_link else "")

    @property
    def _resolved(self) -> ResolvedConfig:
        return ResolvedConfig(Config(transport=self.pipes, timeout_s=self.timeout_s), base._registry())

    @property
    def _missing_pipe(self) -> str:
        """Why no link can be opened here; empty if it can."""
        return self._resolved.explain_missing_pipe() or ""

    @property
    def one_end(self) -> str:
        """Why a place has only one end here; empty if it can have others."""
        if self.by_link:
            return self._missing_pipe
        if type(self) not in _shared:
            with self.scope():
                _shared[type(self)] = bool(self.reached_by) or self.hold().is_shared
        return "" if _shared[type(self)] else f"{self.called} serves no peers, and is not shared"

    @property
    def by_link(self) -> bool:
        """Whether other ends reach the first one over a link."""
        overridden = type(self).make_client is not StoreSuite.make_client
        has_client = overridden or bool(self.spec is not None and self.spec.client)
        return self.reached_by == "link" or (not self.reached_by and has_client)

    def make_reachable(self, place: Place) -> None:
        """Serve the first end, if other ends reach the place by a link. It ends with the scope."""
        if not self.by_link or place.address:
            return
        assert place.first is not None, "the first end of the place is opened first"
        address = f"unix:@kvplug-judged-{os.getpid()}-{next(_numbers)}"
        place.server = StoreServer(place.first, self._links, address)
        self.later(place.server.close)
        place.address = place.server.contact

    @property
    def _links(self) -> Any:
        return LinkSettings(resolved=self._resolved)

    def _connect(self, address: str, timeout: float | None) -> Store.Link:
        made = ControlPeers(self._links, connect=address)
        return made.connect(0, PURPOSE, timeout=timeout, retry=False)

    # -- behind the store's back ---------------------------------------------------------------

    def read_raw(self, store: Store, key: bytes) -> bytes | None:
        """The bytes that the store keeps under a key, header included; ``None`` if there are none.

        The default calls ``read`` of a blocking store. Override it for others; otherwise the tests with
        wrong pages are skipped.
        """
        inner = self.inner(store)
        length = inner.read(key, ())
        if length is None:
            return None
        page = bytearray(length)
        inner.read(key, (memoryview(page),))
        return bytes(page)

    def write_raw(self, store: Store, key: bytes, page: bytes | None) -> None:
        """Make the store keep these bytes under a key instead of what it keeps; ``None`` removes them.

        The default calls ``remove`` and ``write`` of a blocking store. Override it for others.
        """
        inner = self.inner(store)
        try:
            inner.remove([key])
        except UnsupportedError:
            pytest.skip(f"{self.called} cannot remove pages, and does not override write_raw()")
        if page is not None:
            assert inner.write(key, (memoryview(page),)), "a few bytes found no room"

    @contextlib.contextmanager
    def holding_up(self, store: Store) -> Iterator[None]:
        """While the block runs, the store does not answer: its process is stopped, or its disk hangs.

        The default holds up the calls of a blocking store. Override it for others; otherwise the tests of
        that are skipped.
        """
        go_on = threading.Event()
        with self._each_call(store, partial(go_on.wait, 60)), ExitStack() as stack:
            stack.callback(go_on.set)
            yield

    @contextlib.contextmanager
    def going_away(self, store: Store) -> Iterator[None]:
        """While the block runs, the store is gone: its process is killed, its host not reachable.

        The default makes the calls of a blocking store fail. Override it for others; otherwise the tests of
        that are skipped.
        """
        gone = ConnectionError("the suite makes every call of the store fail")
        with self._each_call(store, mock.Mock(side_effect=gone)):
            yield

    def _each_call(self, store: Store, do: Callable[[], object]) -> contextlib.AbstractContextManager[Any]:
        inner = self.inner(store)

        def call(name: str, *args: Any) -> Any:
            do()
            return getattr(type(inner), name)(inner, *args)

        calls: dict[str, Any] = {name: partial(call, name) for name in ("has", "read", "write", "remove")}
        return mock.patch.multiple(inner, **calls)  # type: ignore[no-any-return]

    def inner(self, store: Store) -> BlockingStore:
        """The blocking store inside. Skips the test if there is none."""
        if isinstance(store, ExecutedStore):
            return store._store
        pytest.skip(f"{self.called} is not a blocking store, and does not override the suite's method")

    # -- what a store can do -------------------------------------------------------------------

    def can(self, store: Store, name: str) -> bool:
        """Whether the store overrides a method that stores may leave as it is."""
        if isinstance(store, ExecutedStore) and hasattr(BlockingStore, name):
            return getattr(type(store._store), name) is not getattr(BlockingStore, name)
        return getattr(type(store), name) is not getattr(Store, name)

    def must(self, store: Store, name: str) -> None:
        """Skip the test if the store does not override that method."""
        if not self.can(store, name):
            pytest.skip(f"{self.called} does not override `{name}`")

    def batch(self, store: Store, count: int, form: Any = None, **given: Any) -> Batch:
        """Pages that fit the store, under keys of their own."""
        return batch(count, form, seal=store.seal, **given)
