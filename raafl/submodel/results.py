"""Run operations on the meta device, computing each distinct form of an operation once.

On the meta device torch computes most results in Python, which takes ten times as long as creating them, and the blocks of a model
are alike: a result whose operation and arguments occurred before is created in the form it had then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raafl.submodel.nested_batch import tensors_in

_MOST = 8192
"""Largest number of cached forms; then the cache is emptied."""
_PLAIN = (Tensor, nn.Parameter)
_META = torch.device("meta")
# the overload is called directly, so that no torch-function mode intercepts it
_EMPTY = torch.ops.aten.empty_strided.default
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer
_PAGE = 4096
GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
"""Products of rows with the matrices of experts to which they are dealt out; None = torch has none."""


@dataclass(slots=True)
class CachedResult:
    """Cached outcome of an operation on the meta device (on tensors without values), used again for equal arguments."""

    key: Any  # key of the entry: the operation, the default dtype, and shapes and dtypes of the arguments
    result: Any = None  # shapes and dtypes of the result; None = unknown, or the key does not determine them
    cost: Any = None  # FLOPs and bytes of the operation; None = unknown

    def remember(self) -> None:
        """Store this entry in the cache, for later calls with equal arguments."""
        if len(_known) >= _MOST:
            _known.clear()
        _known[self.key] = self


_known: dict[Any, CachedResult] = {}
"""Results by key; any thread may add entries."""


class _OfItsOwn(Exception):
    """Raised for an argument or result that a cache key cannot describe, such as a tensor with values."""


def result_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return the result of an operation on tensors without values (on the meta device), from a cache if possible.

    An earlier call whose arguments had the same shapes and dtypes has the same result, so the operation need not run.
    """
    return run(func, args, kwargs, cached_result(func, args, kwargs) if _is_functional(func) else None)


def cached_result(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CachedResult | None:
    """Return the cache entry of an operation's call, new if need be; None if shapes and dtypes do not determine its result."""
    tensors: list[Tensor] = []
    try:
        # else reading any attribute of a tensor would go through all active modes
        with torch._C.DisableTorchFunction():
            forms = _form(args, tensors), _form(tuple(kwargs.items()), tensors)
        if not tensors:  # without tensors among the arguments the device is unknown
            return None
        first: dict[int, int] = {}
        same = tuple([first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])
        key = func, torch.get_default_dtype(), *forms, same
        return _known.get(key) or CachedResult(key)
    except (_OfItsOwn, TypeError):  # TypeError: an argument is not hashable
        return None


def run(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], form: CachedResult | None
) -> object:
    """Run an operation, or create its result from the cache entry ``form`` if that has the result's shapes.

    `form`: cache entry from `cached_result`; None = run the operation.
    """
    if form is not None and form.result is not None:
        return _made(form.result)
    own = _made_here(func._overloadpacket, args)
    result = func(*args, **kwargs) if own is None else own(*args, **kwargs)
    if form is not None and _is_functional(func):
        form.result = _fresh(result, tensors_in((args, kwargs)))
        if form.result is not None:
            form.remember()
    return result


def _made_here(packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return raafl's function for results that torch's meta device cannot create completely; None = use torch's."""
    if packet is _RECURRENT and args[0].is_meta:
        return _recurrent
    if packet is GROUPED and args[0].is_meta and args[0].dtype in (torch.float32, torch.float16):
        return _grouped
    return None


def _recurrent(x: Tensor, *args: object) -> tuple[Tensor, ...]:
    """Create the results of oneDNN's LSTM over ``x``, (positions, batch, inputs), with the workspace for the backward pass.

    Its size follows torch 2: gates twice, six arrays of states as wide as the wider of inputs and hidden units, one of cells,
    rows padded to 64 bytes, and more where rows would share the same cache lines, and some memory pages.
    """
    y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(x, *args)
    num, batch, hidden = *x.shape[:2], h.shape[-1]
    values = 2 * num * _row(4 * hidden) + (num + 1) * (6 * _row(max(x.shape[-1], hidden)) + _row(hidden))
    return y, h, c, x.new_empty(4 * batch * values + 4 * _PAGE, dtype=torch.uint8)


def _row(width: int) -> int:
    padded = -(-width // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
    """Create the result of grouped products; torch's meta device accepts only bfloat16, a CPU other dtypes, too."""
    shape = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim():
        groups = left.shape[0] if offs is None else offs.shape[0]
        return left.new_empty((groups, *shape))
    return left.new_empty(shape)


def _fresh(result: object, before: list[Tensor]) -> tuple[Any, ...] | None:
    """Return the shapes and dtypes of a result that `_made` can recreate, with a new storage per tensor; else None."""
    after: list[Tensor] = []
    again: list[Tensor] = []
    try:
        form = _form(result, after)
    except _OfItsOwn:
        return None
    _form(_made(form), again)
    storages = [{tensor.untyped_storage()._cdata for tensor in tensors} for tensors in (before, after)]
    is_fresh = after and len(storages[1]) == len(after) and storages[0].isdisjoint(storages[1])
    return form if is_fresh and list(_sizes(after)) == list(_sizes(again)) else None


def _sizes(tensors: list[Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().nbytes() for tensor in tensors)


@cache
def _is_functional(func: torch._ops.OpOverload) -> bool:
    """Check whether an operation changes none of its arguments and gives no view of them."""
    return all(one.alias_info is None for one in (*func._schema.arguments, *func._schema.returns))


def _form(item: object, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Describe an argument or result as a nested tuple of types, shapes and dtypes; append its tensors to ``tensors``."""
    kind = type(item)
    if kind in _PLAIN and isinstance(item, Tensor):
        if not item.is_meta or item.dtype.is_complex or item.layout != torch.strided:
            raise _OfItsOwn
        tensors.append(item)
        return Tensor, item.shape, item.stride(), item.dtype
    if isinstance(item, list | tuple):
        return (kind, *[_form(part, tensors) for part in item])
    if issubclass(kind, Tensor):
        raise _OfItsOwn
    return kind, item  # with the type: 1, 1.0 and True are equal, but promote to different dtypes


def _made(form: tuple[Any, ...]) -> object:
    kind, *rest = form
    if kind is Tensor:
        size, stride, dtype = rest
        return _EMPTY(size, stride, dtype=dtype, device=_META)
    return kind(map(_made, rest)) if issubclass(kind, list | tuple) else rest[0]
