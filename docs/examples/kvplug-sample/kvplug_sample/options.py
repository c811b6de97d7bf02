"""The options of the pipe "sample"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class SampleOptions:
    """Options of the pipe "sample"."""

    max_in_flight_bytes: int = option(
        default=64 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Unsent bytes that send_tensor queues before it blocks. One larger message passes alone.",
    )
