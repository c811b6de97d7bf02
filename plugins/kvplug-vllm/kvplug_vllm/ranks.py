"""Ranks of data parallelism, each of which is an engine of its own."""

from __future__ import annotations

import logging

from kvplug import Config
from kvplug.engine import Role

_log = logging.getLogger(__name__)


def log_address_of(rank: int, config: Config) -> None:
    """Log where data-parallel rank ``rank`` is found, or that it loads from one rank of its producer only.

    vLLM gives a request to any rank, at both servers, and the numbers of ranks may differ. So a consumer has
    to name each rank of its producer. An engine cannot check this: in a model without experts it knows
    its rank, but not how many there are.
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
            'data-parallel rank %d has no "peers" in its extra config, so it looks for one rank of the'
            " producer only, at %s; name the address of each rank of the producer there",
            rank,
            address,
        )
