"""Run operations on the meta device, each form of one once.

There torch works out most results in Python, which takes ten times as long as to make them, and the blocks of a model are
alike: a result whose operation and arguments are as before is made anew in the form that it had then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 8192
"""Forms remembered; then all are forgotten."""
_PLAIN = (Tensor, nn.Parameter)
_META = torch.device("meta")
_EMPTY = torch.ops.aten.empty_strided.default  # called so, no mode of torch's functions sees it

_known: dict[Any, Any] = {}
"""By operation, default type and form of the arguments: the form of the result. Any thread may add to it."""


class _OfItsOwn(Exception):
    """An argument or a result of which more than the form matters."""


def result_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an ATen operation, or make its result where an equal one has run and nothing of it but its form matters."""
    if not _is_functional(func):
        return func(*args, **kwargs)
    try:
        before: list[Tensor] = []
        key = func, torch.get_default_dtype(), _form(args, before), _form(tuple(kwargs.items()), before)
        known = _known.get(key)
    except (_OfItsOwn, TypeError):  # or not hashable
        return func(*args, **kwargs)
    if known is not None:
        return _made(known)
    result = func(*args, **kwargs)
    if before:  # else it may be a result on another device
        _remember(key, result, before)
    return result


def _remember(key: Any, result: Any, before: list[Tensor]) -> None:
    """Note the form of a result whose tensors have each a storage of their own, of the size that one of the form has."""
    after: list[Tensor] = []
    again: list[Tensor] = []
    try:
        form = _form(result, after)
    except _OfItsOwn:
        return
    _form(_made(form), again)
    storages = [{tensor.untyped_storage()._cdata for tensor in tensors} for tensors in (before, after)]
    is_fresh = after and len(storages[1]) == len(after) and storages[0].isdisjoint(storages[1])
    if is_fresh and list(_sizes(after)) == list(_sizes(again)):
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = form


def _sizes(tensors: list[Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().nbytes() for tensor in tensors)


@cache
def _is_functional(func: Any) -> bool:
    """Check whether an operation changes none of its arguments and gives no view of them."""
    return all(one.alias_info is None for one in (*func._schema.arguments, *func._schema.returns))


def _form(item: Any, tensors: list[Tensor]) -> Any:
    """Return the form of an argument or a result, hashable where its values are, and add its tensors to ``tensors``."""
    if isinstance(item, Tensor):
        if not item.is_meta or type(item) not in _PLAIN or item.is_complex() or item.layout != torch.strided:
            raise _OfItsOwn
        tensors.append(item)
        return Tensor, item.shape, item.stride(), item.dtype
    if isinstance(item, list | tuple):
        return (type(item), *(_form(part, tensors) for part in item))
    return type(item), item  # 1, 1.0 and True are equal, and promote to different types


def _made(form: Any) -> Any:
    kind, *rest = form
    if kind is Tensor:
        size, stride, dtype = rest
        return _EMPTY(size, stride, dtype=dtype, device=_META)
    return kind(map(_made, rest)) if issubclass(kind, list | tuple) else rest[0]
