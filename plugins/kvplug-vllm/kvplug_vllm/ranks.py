"""Data-parallel ranks. Each is a separate engine, and vLLM gives a request to any of them."""

from __future__ import annotations

import logging

from kvplug import Config
from kvplug.engine import Role

_log = logging.getLogger(__name__)


def log_address_of(rank: int, config: Config) -> None:
    """Log the address of data-parallel rank ``rank``, or that it loads from one rank of its producer only.

    The numbers of ranks of two servers may differ. So a consumer must name each rank of its producer. An
    engine cannot check this: for a model without experts it knows its rank, but not the number of ranks.
    """
    if not rank:
        return
    address = config.control_address()
    if config.role is not Role.CONSUMER:
        _log.info(
            'data-parallel rank %d listens at %s; consumers name each rank in "peers" of their extra config',
            rank,
            address,
        )
    elif not config.peers:
        _log.warning(
            'data-parallel rank %d has no "peers" in its extra config, so it connects to only one rank of the'
            " producer, at %s; list the addresses of all its ranks there",
            rank,
            address,
        )
