"""Copy a module's structure with other tensors in place of its own, and name its batch norms' statistics."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
        # each module has a dozen dicts of hooks, mostly empty: to copy them would take half of deepcopy's time
        memo |= {id(x): type(x)() for x in vars(part).values() if type(x) in (dict, OrderedDict, set) and not x}
        # deepcopy refuses a tensor that a hook computes before each forward pass, such as the weight of
        # `nn.utils.weight_norm`
        memo |= {id(x): x.detach() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf}
    small = _deep_copy(module, memo)
    for part in small.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is sentinel:
                part.__dict__[attribute] = None
    attach(small)
    return small


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module with deepcopy's ``memo``; objects that cannot be copied are shared with the copy."""
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # copying a user's object may raise any error
        own = {id(x): x for x in (*module.modules(), *module.parameters(), *module.buffers())} | memo
        shared = {id(x): x for part in module.modules() for x in _uncopyable(vars(part), own)}
        if not shared:
            raise
        return copy.deepcopy(module, {**shared, **memo})


def _uncopyable(thing: object, own: dict[int, Any]) -> Iterator[Any]:
    """Yield the objects within ``thing`` that deepcopy refuses; ``own`` maps ids to the module's parts, which it copies."""
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
    # empty_like on the meta device imports sympy, which takes 0.3 s of a client's start
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


BatchNorm = Literal["merged", "static"]


def norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield path and layer of each batch norm with running statistics."""
    for path, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            yield path, part


def statistics_of(module: nn.Module) -> list[tuple[str, str]]:
    """Return the names of running mean and running variance of each batch norm in ``module``."""
    return [_statistics_at(path) for path, _ in norms(module)]


def counts_in_eval_mode(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return path and counter of batches of each batch norm in eval mode: torch adds to it as it changes the statistics."""
    fixed = [(path, norm) for path, norm in norms(module) if not norm.training]
    return [(path, norm.num_batches_tracked) for path, norm in fixed if norm.num_batches_tracked is not None]


def _statistics_at(path: str) -> tuple[str, str]:
    return (f"{path}.running_mean", f"{path}.running_var") if path else ("running_mean", "running_var")


def still_buffers(
    module: nn.Module, trains: Collection[str], buffers: Collection[str], *, static: bool, frozen: bool
) -> set[str]:
    """Return the names of the buffers that clients do not send back, since training does not change them.

    These are running statistics that are static (see `keep_static`) or of a batch norm in eval mode, and the buffers of layers
    whose parameters are all frozen.
    """
    paths = [path for path, norm in norms(module) if static or not norm.training]
    still = {name for path in paths for name in _statistics_at(path)}
    if frozen:
        own: dict[str, bool] = {}
        for name, _ in module.named_parameters():
            path = name.rpartition(".")[0]
            own[path] = own.get(path, False) or name in trains
        still |= {name for name in buffers if own.get(name.rpartition(".")[0]) is False}
    return still
