"""What the tests of pipes share: endpoints, connected pairs, clogged pairs, and ends in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from kvplug.context import PipeContext
from kvplug.errors import TimeoutError
from kvplug.pipe import Pipe, PipeEndpoint, Transfer
from kvplug.spec import Kind
from kvplug.testing import peers
from kvplug.testing.contract import base
from kvplug.testing.contract.base import Call, Contract, judged_by
from kvplug.trust.credentials import Credentials

MIB = 1 << 20
LIMIT = 2 * MIB
"""``max_in_flight_bytes`` of pairs whose room is judged."""

Ends = tuple[Pipe, Pipe]


class PipeSuite(Contract):
    """What is judged, and how its ends are made. The class attributes are an author's to set."""

    kind: ClassVar[Kind] = Kind.PIPE
    limit_option: ClassVar[str] = "max_in_flight_bytes"
    """The option that bounds what is unsent (law PIPE-2). Empty where there is none: the tests of the bound
    are skipped then."""
    beyond_limit_bytes: ClassVar[int] = 4 * MIB
    """What the operating system or the device may hold besides, with the receiver stopped (law PIPE-3)."""
    timeout_s: ClassVar[float] = 20.0
    """What the context says where a call says nothing."""

    def make_endpoint(self, context: PipeContext) -> PipeEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.spec.load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def context(self, **options: Any) -> PipeContext:
        return PipeContext(
            options=self.made_options(**options), credentials=Credentials(), timeout_s=self.timeout_s
        )

    def endpoint(self, **options: Any) -> PipeEndpoint:
        return self.make_endpoint(self.context(**options))

    def pair(self, **options: Any) -> Ends:
        """Two connected pipes of this process, aborted when the test is over."""
        end = self.endpoint(**options)
        listener = end.listen()
        connecting = Call(lambda: end.connect(listener.contact))
        try:
            accepted = listener.accept(timeout=base.patience_s)
            self.later(accepted.abort)
            connected = connecting.result()
            self.later(connected.abort)
        finally:
            listener.close()
        return connected, accepted

    def limited_pair(self, limit: int = LIMIT) -> Ends:
        """A pair that may have ``limit`` bytes unsent."""
        return self.pair(**self.limited(limit))

    def limited(self, limit: int = LIMIT) -> dict[str, int]:
        """The option that says so."""
        return {self.limit_option: limit}

    @property
    def a_limit(self) -> str:
        """For ``needs``."""
        return (
            ""
            if self.limit_option
            else f"{self.called} has no option that bounds what is unsent (limit_option)"
        )

    # -- ends in other processes ---------------------------------------------------------------

    def far(self, what: Callable[..., Any], *args: Any, **options: Any) -> tuple[Pipe, peers.Peer]:
        """A pipe whose other end is in a child process, which runs ``what(parent, pipe, *args)``.

        ``what`` is a function of a file's top level. ``options`` are the transport's, at both ends.
        """
        listener = self.endpoint(**options).listen()
        try:
            where = f"{what.__module__}:{what.__qualname__}"
            child = self.start(_far_end, self.recipe(), options, listener.contact, where, list(args))
            pipe = listener.accept(timeout=base.patience_s)
        finally:
            listener.close()
        self.later(pipe.abort)
        return pipe, child

    def warm_up(self) -> None:
        """torch's own threads are made by its first large operation, and stay."""
        import torch

        torch.ones(1 << 20).add_(1)


def _far_end(
    parent: peers.Parent,
    recipe: dict[str, Any],
    options: dict[str, Any],
    contact: str,
    where: str,
    args: list[Any],
) -> Any:
    """In the child: connect, run the function, and end politely."""
    import importlib

    module, _, name = where.rpartition(":")
    what = getattr(importlib.import_module(module), name)
    with judged_by(recipe).endpoint(**options).connect(contact) as pipe:
        return what(parent, pipe, *args)


def fill(pipe: Pipe, nbytes: int = MIB // 4, timeout: float = 0.2) -> list[Transfer]:
    """Clog a pipe: send until there is no room. Returns the transfers of what was accepted."""
    import torch

    transfers: list[Transfer] = []
    while True:
        message = torch.full((nbytes,), len(transfers) % 251, dtype=torch.uint8)
        try:
            transfers.append(pipe.send_tensor(message, timeout=timeout))
        except TimeoutError:
            return transfers
        if sum(transfer.nbytes for transfer in transfers) > 1 << 30:
            pytest.fail("a gigabyte was taken, and nobody has received anything: the pipe has no bound")
