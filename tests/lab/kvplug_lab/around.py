"""A pipe and a message queue that wrap another one and change nothing: for tests of wrappers in the core."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class AroundOptions:
    """Options of the pipe and of the queue "around"."""

    inner: str = option("auto", help="The one that is wrapped.")
    mark: str = option(help="Something that has no default.")


def around(context: Any) -> Any:
    """The factory of both specs: what is made is the inner endpoint."""
    return context.make_inner()
