"""Mixture of experts: tokens to their experts and back, and preparing a model's expert layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvplug.errors import ConfigError, TensorMismatchError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.memory.room import check_room
from kvplug.transport.communicator.all2all import DEFAULT_BACKEND, MANAGERS, All2AllManager
from kvplug.transport.communicator.calls import check_same, row_bytes, tokens_of
from kvplug.transport.communicator.checked_calls import CheckedCalls
from kvplug.transport.communicator.tokens import TokenSplit, width_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.transport.context import CommunicatorContext


class MoE(CheckedCalls):
    """The calls before and after the layers of a mixture of experts."""

    all2all_managers: ClassVar[Mapping[str, type[All2AllManager]]] = MANAGERS
    """The managers by the value of ``all2all_backend``. A transport may add its own."""

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.all2all_manager: All2AllManager | None = None
        """What exchanges experts' tokens; ``None`` unless ``use_all2all``."""
        """The manager that dispatch and combine use; ``None``: they return their arguments unchanged."""
        self._split: TokenSplit | None = None
        self._width = 1
        if self.use_all2all:
            self._width = width_of(self.world_size, context.data_parallel_size)
            self.all2all_manager = self._manager(self.all2all_backend or DEFAULT_BACKEND)

    def _manager(self, name: str) -> All2AllManager:
        found = self.all2all_managers.get(name)
        if found is None:
            known = ", ".join(sorted(self.all2all_managers))
            raise ConfigError(f"all2all_backend={name!r} is none that {type(self).__name__} knows: {known}")
        return found(self)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> tuple[Any, ...]:
        """Send tokens to their experts: returns the three tensors, and ``extra_tensors`` if given, with the
        rows of all ranks.

        A tensor has a row for each token; ranks may have different numbers of tokens, or none. The ranks of
        one data-parallel rank have the same tokens, which are sent once; with ``is_sequence_parallel`` each
        rank has its own. Without an all-to-all manager the arguments are returned unchanged.

        Raises:
            TensorMismatchError: tensors without a row for each token, or ranks whose tensors differ in dtype
                or in the shape of a row.
            The rest as the collectives.
        """
        return self._dispatch(
            "dispatch", [hidden_states, topk_weights, topk_ids], is_sequence_parallel, extra_tensors, timeout
        )

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> tuple[Any, ...]:
        """``dispatch`` before experts are chosen: for the router's logits. Raises as ``dispatch``."""
        return self._dispatch(
            "dispatch_router_logits",
            [hidden_states, router_logits],
            is_sequence_parallel,
            extra_tensors,
            timeout,
        )

    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Return the experts' results to the tokens' ranks: this rank's rows of the sum over all ranks.

        ``hidden_states`` has a row for each token that the last dispatch returned: zeros for tokens that no
        expert of this rank processed. The sum is complete: no rank has to add anything. Without an all-to-all
        manager the argument is returned unchanged.

        Raises:
            TensorMismatchError: the number of rows differs from the dispatch, or nothing was dispatched, or
                with another ``is_sequence_parallel``.
            The rest as the collectives.
        """
        if self.all2all_manager is None:
            self._check_usable()
            return hidden_states
        split = self._split

        def check() -> dict[str, Any]:
            said = self._said(hidden_states, summing=True, dim=0)
            if split is None:
                raise TensorMismatchError("combine takes back what was dispatched, and nothing was")
            if hidden_states.shape[0] != split.total:
                rows = hidden_states.shape[0]
                raise TensorMismatchError(f"{split.total} tokens were dispatched, and {rows} rows come back")
            self._check_way(split, is_sequence_parallel)
            return {**said, "is_sequence_parallel": bool(is_sequence_parallel)}

        with self._call("combine", timeout, check) as deadline:
            if self.world_size > 1:
                assert split is not None
                hidden_states = self.all2all_manager.combine(hidden_states, split, deadline)
            self._split = None
        return hidden_states

    def prepare_communication_buffer_for_model(self, model: Any) -> None:
        """Call this once after a model was loaded: if this communicator serves experts, it calls the method
        ``prepare_communication_buffer(communicator)`` of each module that has one.

        Raises:
            ClosedError, TransportError: as the law says.
            Whatever a module raises.
        """
        self._check_usable()
        if self.is_ep_communicator:
            for module in model.modules():
                prepare = getattr(module, "prepare_communication_buffer", None)
                if callable(prepare):
                    prepare(self)

    # -- beneath -------------------------------------------------------------------------------

    def _dispatch(
        self,
        name: str,
        tensors: list[Tensor],
        is_sequence_parallel: bool,
        extra_tensors: list[Tensor] | None,
        timeout: Timeout,
    ) -> tuple[Any, ...]:
        found = [*tensors, *(extra_tensors or ())]
        if self.all2all_manager is None:
            self._check_usable()
        else:
            with self._attempt(timeout) as deadline:
                counts: list[int] = []
                check = lambda: self._tokens_said(found, is_sequence_parallel)  # noqa: E731
                with self._agreed(
                    name, check, lambda call: self._compare(call, deadline), always=True
                ) as calls:
                    counts = [tokens_of(rank, call) for rank, call in enumerate(calls)]
                    check_same(name, [{**call, "tokens": "as each has"} for call in calls])
                width = 1 if is_sequence_parallel else self._width
                split = TokenSplit.of(counts, width if self.world_size > 1 else 1)
                self._check_room(found, split.total)
                if self.world_size > 1:
                    found = self.all2all_manager.dispatch(found, split, deadline)
                self._split = split
        if extra_tensors is None:
            return tuple(found)
        return (*found[: len(tensors)], found[len(tensors) :])

    def _tokens_said(self, tensors: Sequence[Tensor], is_sequence_parallel: bool) -> dict[str, Any]:
        said = [self._said(tensor, dim=0) for tensor in tensors]
        counts = [tensor.shape[0] for tensor in tensors]
        if len(set(counts)) > 1:
            raise TensorMismatchError(f"tensors with a row for each token are wanted, and they have {counts}")
        rows = [f"{each['dtype']} {each['shape'][1:]}" for each in said]
        return {
            "rows": rows,
            "tokens": counts[0],
            "is_sequence_parallel": bool(is_sequence_parallel),
            "all2all_backend": self.all2all_backend or DEFAULT_BACKEND,
            "data_parallel_size": self.context.data_parallel_size,
        }

    def _check_room(self, tensors: Sequence[Tensor], total: int) -> None:
        """Raises CapacityError: there cannot be so many rows as all ranks together have announced."""
        if self.device.partition(":")[0] == "cpu":  # the memory of others is never promised in excess
            for tensor in tensors:
                check_room(total * row_bytes(tensor), f"a tensor with the {total} tokens of all ranks")

    def _check_way(self, split: TokenSplit, is_sequence_parallel: bool) -> None:
        if self._width > 1 and split.shared is bool(is_sequence_parallel):
            raise TensorMismatchError(
                f"is_sequence_parallel={is_sequence_parallel} was given to combine, and not to dispatch"
                if is_sequence_parallel
                else "is_sequence_parallel=True was given to dispatch, and not to combine"
            )
