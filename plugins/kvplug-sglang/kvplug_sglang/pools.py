"""SGLang's pools in host memory, and the memory of their pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug import ConfigError
from kvplug.engine import FlatPage

if TYPE_CHECKING:
    from torch import Tensor


class HostPool:
    """One pool of pages in host memory.

    A page has consecutive tokens of all layers. Depending on the pool's layout it has one or several pieces:
    keys and values, or those of each layer.
    """

    def __init__(self, pool: Any, name: str) -> None:
        """Raises ConfigError: the pool does not provide the addresses of its pages."""
        self.pool = pool
        self.name = name
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        """Rows of the pool in a page, which may have more of SGLang's tokens."""
        self._held = [each for each in vars(pool).values() if _is_memory(each)]
        """Its memory. The reference keeps it mapped during a copy even if the pool is destroyed."""
        self.sizes = self._find_sizes()

    @property
    def has_memory(self) -> bool:
        """Whether it has its own pages: some models' anchor is only a count."""
        return getattr(self.pool, "kv_buffer", self) is not None

    @property
    def has_heads(self) -> bool:
        """Whether a tensor-parallel rank has some of the heads."""
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        return isinstance(self.pool, MHATokenToKVPoolHost)

    def pages(self, keys: Sequence[bytes], indices: Tensor) -> list[FlatPage]:
        """The pages whose rows have these indices, :attr:`page_size` for each key.

        Raises:
            ValueError: the number of indices is wrong.
        """
        if len(indices) != len(keys) * self.page_size:
            raise ValueError(
                f"{len(keys)} pages of {self.page_size} rows in the pool {self.name!r}, and"
                f" {len(indices)} indices"
            )
        if not keys:
            return []
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        pieces = [self._piece(*each) for each in zip(addresses, sizes, strict=True)]
        step = len(pieces) // len(keys)
        return [
            FlatPage(key=key, view=pieces[at], more=pieces[at + 1 : at + step])
            for key, at in zip(keys, range(0, len(pieces), step), strict=True)
        ]

    def _piece(self, address: int, nbytes: int) -> memoryview:
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        memory.held = self._held  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def _find_sizes(self) -> tuple[int, ...]:
        """The lengths of a page's pieces in bytes."""
        if not self.has_memory:
            return ()
        import torch

        try:
            _, sizes = self.pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (AttributeError, NotImplementedError, ValueError) as e:
            raise ConfigError(
                f"kvplug-sglang cannot keep the pages of {type(self.pool).__name__} in the layout"
                f" {getattr(self.pool, 'layout', 'unknown')!r}: {e}. Try"
                " --hicache-mem-layout page_first_direct with --hicache-io-backend direct"
            ) from e
        return tuple(sizes)


def _is_memory(value: Any) -> bool:
    import torch

    if isinstance(value, list | tuple):
        return bool(value) and _is_memory(value[0])
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
