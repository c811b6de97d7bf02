"""The tokens of one forward pass, packed one after another, and the slot of each."""

from __future__ import annotations

import attrs

from kvplug_transformers.engine.step import Step


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """The requests of a step, in the order in which their tokens are packed."""

    query_lens: tuple[int, ...]
    """Tokens of each request in this pass."""
    seq_lens: tuple[int, ...]
    """Tokens of each request once this pass is done."""
    block_tables: tuple[tuple[int, ...], ...]
    """Blocks of each request, in token order."""
    positions: tuple[int, ...]
    """The position of each token in its request."""
    slot_mapping: tuple[int, ...]
    """``block_id * block_size + offset`` of each token."""

    @classmethod
    def of(cls, step: Step, block_size: int) -> Batch:
        """Lay out the tokens that a step computes."""
        lens = [(one.num_computed_tokens, one.num_scheduled_tokens) for one in step.output.scheduled]
        placed = [
            (position, table[position // block_size] * block_size + position % block_size)
            for (computed, new), table in zip(lens, step.block_tables, strict=True)
            for position in range(computed, computed + new)
        ]
        return cls(
            query_lens=tuple(new for _, new in lens),
            seq_lens=tuple(computed + new for computed, new in lens),
            block_tables=step.block_tables,
            positions=tuple(position for position, _ in placed),
            slot_mapping=tuple(slot for _, slot in placed),
        )
