"""Tensors of the simulated device: each stands before one in CPU memory, and queues what is done with it.

torch has a place for devices from outside (``PrivateUse1``); here Python serves it. Operations that write
into tensors are queued, and so are copies. Views are made at once. All other operations run at once, after
everything that the thread's stream was given: they make no new orders possible, and hide none between
streams.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kvplug_testing.simulated import registered, streams

NAME: Final = "simulated"
_UNSET: Final = 0xA5
"""In every byte of memory that nothing was written to."""
_TAKES_INDICES: Final = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
"""Operations that take indices on the CPU, as on a GPU."""

_library: Any = None


class SimulatedTensor(torch.Tensor):  # type: ignore[misc]  # torch is not checked
    """A tensor of the simulated device."""

    _memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> SimulatedTensor:
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )
        made._memory = memory
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<simulated {self.dtype} {list(self.shape)}>"

    def data_ptr(self) -> int:
        """Where its memory is, for a transport that reads and writes by address, as a network card does."""
        return int(self._memory.data_ptr())

    def untyped_storage(self) -> Any:
        """The storage of that memory, which is the CPU's."""
        return self._memory.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.no_grad():
            return _dispatched(func, args, kwargs or {})


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, schema = func._schema.name, func._schema
    if name in ("aten::_to_copy", "aten::clone"):
        return _to_copy(*args, **kwargs)
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    _check_devices(name, args, kwargs)
    plain, plain_kwargs = pytree.tree_map(_memory_of, args), pytree.tree_map(_memory_of, kwargs)
    if "device" in plain_kwargs:
        plain_kwargs["device"] = "cpu"
    written = [
        kwargs.get(argument.name, args[at] if at < len(args) else None)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        streams.current_stream().queue(lambda: func(*plain, **plain_kwargs))
        return (written[0] if len(schema.returns) == 1 else tuple(written)) if schema.returns else None
    is_view = any(each.alias_info is not None for each in schema.returns)
    is_new = name.startswith(("aten::new_empty", "aten::empty"))
    if not (is_view or is_new):
        streams.current_stream().synchronize()
    found = func(*plain, **plain_kwargs)
    if is_new:
        _unset(found)
    return pytree.tree_map(_wrapped, found)


def _memory_of(value: Any) -> Any:
    return value._memory if isinstance(value, SimulatedTensor) else value


def _wrapped(value: Any) -> Any:
    return SimulatedTensor(value) if isinstance(value, torch.Tensor) else value


def _check_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in pytree.tree_leaves((args, kwargs)):
        is_plain = isinstance(each, torch.Tensor) and not isinstance(each, SimulatedTensor)
        if is_plain and each.dim() and name not in _TAKES_INDICES:
            raise RuntimeError(f"{name} takes tensors of one device, not of {each.device} and {DEVICE}")


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies of memory of the CPU may be late only if the caller allows that (``non_blocking``)."""
    stream = streams.current_stream()
    here, there = _memory_of(target), _memory_of(source)
    if target.device == source.device or non_blocking:
        stream.queue(lambda: here.copy_(there))
    elif isinstance(target, SimulatedTensor):
        taken = there.clone()
        stream.queue(lambda: here.copy_(taken))
    else:
        stream.synchronize()
        here.copy_(there)
    return target


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    kept = memory_format or torch.preserve_format
    made = _unset(torch.empty_like(_memory_of(source), dtype=dtype, memory_format=kept))
    target = made if device is not None and device.type == "cpu" else SimulatedTensor(made)
    return _copy(target, source, non_blocking)


def _unset(memory: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
    raw.fill_(_UNSET)
    return memory


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    return SimulatedTensor(_unset(torch.empty(size, dtype=dtype, memory_format=memory_format)))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return SimulatedTensor(_unset(torch.empty_strided(size, stride, dtype=dtype)))


_MODULE: Final = SimpleNamespace(
    Stream=streams.Stream,
    Event=streams.Event,
    current_stream=streams.current_stream,
    default_stream=streams.default_stream,
    stream=streams.on_stream,
    synchronize=streams.synchronize,
    cudart=lambda: registered,
    device=lambda device: contextlib.nullcontext(),
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
)
"""What ``torch.get_device_module("simulated")`` gives."""


def register() -> None:
    """Make torch know the device, in this process. Idempotent."""
    global _library
    if _library is not None:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_MODULE)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("_copy_from", lambda source, target, late=False: _copy(target, source, late), "PrivateUse1")


DEVICE: Final = torch.device("privateuseone:0")
"""Once the device is known, torch prints it as ``simulated:0``."""
