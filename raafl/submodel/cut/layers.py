"""Copy a module's structure with other tensors in place of its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raafl.submodel.spec import Runs


def computed_by(hook: object) -> str | None:
    """Return the name of the tensor that a hook of `torch.nn.utils` recomputes before each forward pass; None = there is none.

    Such hooks are those of `weight_norm`, `spectral_norm` and `prune`.
    """
    name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
    return name if type(hook).__module__.startswith("torch.nn.utils.") else None


_ATTACHED = ("_trainer", "_fabric")
"""Attributes that link a LightningModule to its runner; a small copy has another runner, so they are not copied."""


def copy_structure(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module, except for the tensors in ``memo`` and the Trainer to which a LightningModule is attached.

    Attributes, or items in lists, tuples and dictionaries, that `copy.deepcopy` refuses are shared with the copy.
    """
    from raafl.trainer_stand_in import attach

    sentinel = object()
    for part in module.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is not None:
                memo[id(part.__dict__[attribute])] = sentinel
        # a module has a dozen dictionaries of hooks, nearly always empty: copying them would take half of deepcopy's time
        memo |= {id(x): type(x)() for x in vars(part).values() if type(x) in (dict, OrderedDict, set) and not x}
        # deepcopy refuses tensors that a hook computes before each forward pass, such as the weight of `nn.utils.weight_norm`
        memo |= {id(x): x.detach() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf}
    small = _deep_copy(module, memo)
    for part in small.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is sentinel:
                part.__dict__[attribute] = None
    attach(small)
    return small


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module with the ``memo`` of `copy.deepcopy`; objects that cannot be copied are shared."""
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # objects in a user's module may raise anything
        own = {id(x): x for x in (*module.modules(), *module.parameters(), *module.buffers())} | memo
        shared = {id(x): x for part in module.modules() for x in _uncopyable(vars(part), own)}
        if not shared:
            raise
        return copy.deepcopy(module, {**shared, **memo})


def _uncopyable(thing: object, own: dict[int, Any]) -> Iterator[Any]:
    """Yield objects in ``thing`` that `copy.deepcopy` refuses; ``own``: the module's parts by id, which it copies."""
    if id(thing) in own:
        return
    try:
        copy.deepcopy(thing, dict(own))
    except Exception:
        members = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        inner = [x for member in members for x in _uncopyable(member, own)]
        yield from inner or [thing]


def remade(module: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with new tensors: each parameter and buffer is replaced by the result of a function."""
    memo: dict[int, Any] = {id(p): nn.Parameter(parameter(p), p.requires_grad) for p in module.parameters()}
    memo |= {id(b): buffer(b) for b in module.buffers()}
    return copy_structure(module, memo)


def without_values(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, where tensors have no values. Non-persistent buffers are shared with the original."""
    persistent = {id(buffer) for buffer in persistent_buffers(module).values()}
    return remade(module, on_meta, lambda x: on_meta(x) if id(x) in persistent else x)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on the meta device, without values."""
    # empty_like would import sympy to answer on the meta device: 0.3 s of a client's start
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state dict, each once, by name."""
    transient = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in transient}


def select(tensor: Tensor, selection: Mapping[int, Runs]) -> Tensor:
    """Return a copy of the elements of a tensor that ``selection`` keeps."""
    for dim, runs in selection.items():
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return tensor
