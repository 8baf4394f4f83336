"""Run steps on an isolated copy of the model: no Trainer, submodule outputs recorded, a user's caches hidden."""

from __future__ import annotations

import functools
import gc
import math
import site
import sys
import sysconfig
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raafl.module_hooks import begin, move_batch
from raafl.submodel.flat import is_merged, reals
from raafl.submodel.nested_batch import batch_tensors

Note = Callable[[str, list[Tensor]], None]
"""Callback ``note(path, tensors)`` with the outputs of the module at this path."""


@contextmanager
def unfused() -> Iterator[None]:
    """Return a context in which recurrent layers run step by step, and attention in eval mode operation by operation.

    Torch's fused kernels would hide these operations.
    """
    before = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch.backends.mha.set_fastpath_enabled(before[1])


def settle(module: nn.Module) -> None:
    """Prepare a copy of a module for training without a Trainer: ignore logging, make gradients dense.

    Sparse gradients cannot be traced. Modes stay as they are: a part in eval mode may return something else in train mode.
    """
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
        for name in ("log", "log_dict"):
            if hasattr(type(part), name):
                part.__dict__[name] = _ignore


def _ignore(*args: object, **kwargs: object) -> None:
    return None


def watch_outputs(module: nn.Module, note: Note) -> list[Any]:
    """Call ``note`` with the outputs of all modules that the training step calls directly; return the hooks' handles."""
    depth = [0]

    def begin(layer: nn.Module, args: object) -> None:
        depth[0] += 1

    def end(path: str) -> object:
        def noted(layer: nn.Module, args: object, answer: object) -> None:
            depth[0] -= 1
            if depth[0] == 0:
                note(path, list(_tensors_given(answer)))

        return noted

    handles: list[Any] = []
    for path, layer in module.named_modules():
        handles += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end(path))]
    return handles


def _tensors_given(answer: object) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, and in mappings, lists and dataclasses there."""
    for one in tree_leaves(dict(answer) if isinstance(answer, Mapping) else answer):
        if isinstance(one, Tensor):
            yield one
        elif is_dataclass(one) and not isinstance(one, type):
            yield from _tensors_given([getattr(one, field.name, None) for field in fields(one)])


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the values of a tensor inside of `torch.func` (vmap, grad), with all its batch dimensions; others unchanged.

    A tensor of vmap cannot be read once vmap has ended.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def loss_of(module: Any, batch: Any) -> Any:
    """Run a training step and the Lightning hooks before it; return its loss, or None if it skips the batch."""
    device = next((tensor.device for tensor in batch_tensors(batch)), torch.device("cpu"))
    batch = move_batch(module, batch, device, lambda batch, device: batch)
    begin(module, batch)
    answer = module.training_step(batch, 0)
    # some steps skip their first batch by returning None
    answer = module.training_step(batch, 1) if answer is None else answer
    return answer["loss"] if isinstance(answer, Mapping) else answer


def call(module: nn.Module, batch: Any) -> Any:
    """Run a forward pass on a batch; if the batch is a list, on its first tensor."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch[0] if isinstance(batch, list | tuple) else batch)


def draw_(name: str, value: Tensor, noise: Tensor) -> None:
    """Set a parameter to values like those of freshly initialised layers.

    `noise`: standard normal numbers in the shape of ``value``.
    """
    if value.dim() > 1:
        value.copy_(noise / math.sqrt(max(value.numel() // max(len(value), 1), 1)))
    else:
        value.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))


def noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers in the shape of ``value``; for complex values, in both parts.

    `value`: tensor whose shape is used.
    """
    noise = torch.randn(reals(value).shape, generator=generator)
    return torch.view_as_complex(noise) if value.is_complex() else noise


def draw(module: nn.Module, seed: int) -> None:
    """Set all parameters to random values like those of freshly initialised layers, no two equal; integers become 0."""
    generator = torch.Generator().manual_seed(7 + seed)
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        if is_merged(value.dtype):
            draw_(name, value, noise_like(value, generator))
        else:
            value.zero_()


def user_frame(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, as ``file.py:line``."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if is_theirs(frame.tb_frame.f_code.co_filename):
            place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def is_theirs(file: str) -> bool:
    """Check whether a file is the user's code, that is, neither torch's nor this package's."""
    return "/torch/" not in file and "/raafl/submodel/" not in file and not file.startswith("<")


def one_line(error: BaseException) -> str:
    """Format an error of the user's code as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# Hide what a user's code has cached while its steps are followed, measured and proven, and remove what these steps
# cache.
#
# What is found about a model must not depend on what ran before in the process. And a followed step computes tensors
# without values, which must not get into later training by a cache.

_CACHED = functools._lru_cache_wrapper
_TABLES = (dict, OrderedDict, defaultdict)
_NOT_THEIRS = frozenset(
    {"torch", "raafl", "numpy", "sympy", "lightning", "torchmetrics", "jsonargparse", *sys.stdlib_module_names}
)
"""Packages whose caches are left alone, even if parts of the model are from them."""


@dataclass
class Hidden:
    """Outcome of hiding what is cached, for a context of `uncached`."""

    # whether any cache was hidden, so that code which fails may need it, as a dict of constant tensors
    any: bool = False


@contextmanager
def uncached(module: nn.Module, *, is_cold: bool = True) -> Iterator[Hidden]:
    """Return a context that leaves no entry in the caches of the user's code, and in which these hold no tensors at first.

    The caches are functions with `functools.lru_cache`, which are emptied; and dictionaries in modules and classes, from which
    entries are taken that have tensors, and a key that is or contains an integer. At the end these are there again.
    """
    spaces = list(_namespaces(module))
    functions = {*_functions_with_a_cache(), *(x for space in spaces for x in space.values() if type(x) is _CACHED)}
    tables = {id(x): x for space in spaces for x in space.values() if type(x) in _TABLES}.values()
    before = [(table, dict(table)) for table in tables]
    hidden = Hidden()
    if is_cold:
        for function in functions:
            if _caches_tensors(function):
                function.cache_clear()
                hidden.any = True
        for table, entries in before:
            for key in [key for key, value in entries.items() if _has_sizes(key) and _has_tensors([value])]:
                del table[key]
                hidden.any = True
    misses = {function: function.cache_info().misses for function in functions}
    try:
        yield hidden
    finally:
        for function in {*_functions_with_a_cache(), *functions}:
            if function.cache_info().misses != misses.get(function, 0):
                function.cache_clear()
        for table, entries in before:
            _restore_(table, entries)


def _restore_(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Restore a dict's entries; of those added since, keep the ones without tensors or sizes of the run, such as plugins."""
    new = {key: value for key, value in table.items() if key not in entries}
    if new or len(table) != len(entries) or any(table[key] is not value for key, value in entries.items()):
        table.clear()
        table.update(entries)
        table.update({key: value for key, value in new.items() if not _has_sizes(key) and not _has_tensors([value])})


_known: tuple[int, weakref.WeakSet[Any], list[ModuleType]] = 0, weakref.WeakSet(), []


def _functions_with_a_cache() -> list[Any]:
    return list(_up_to_date()[1])


def _up_to_date() -> tuple[int, weakref.WeakSet[Any], list[ModuleType]]:
    """Return the number of imported modules, the user's cached functions, and the user's Python modules."""
    global _known
    if _known[0] != len(sys.modules):
        modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType) and _is_theirs(one)]
        functions = (x for x in gc.get_objects() if type(x) is _CACHED and _top(x.__module__) not in _NOT_THEIRS)
        _known = len(sys.modules), weakref.WeakSet(functions), modules
    return _known


def _is_theirs(module: ModuleType) -> bool:
    """Check whether a Python module is the user's: neither installed nor of raafl or torch."""
    file, name = getattr(module, "__file__", None), module.__name__
    return name == "__main__" or (
        file is not None and _top(name) not in _NOT_THEIRS and not file.startswith(_INSTALLED)
    )


def _top(name: str | None) -> str:
    """Return the top-level package of a module's name."""
    return (name or "").partition(".")[0]


_INSTALLED = tuple({*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))})


def _namespaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of the user's Python modules, of the model's modules, and of the classes in them."""
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    named = [sys.modules[name] for name in names if name in sys.modules and _top(name) not in _NOT_THEIRS]
    for one in {id(one): one for one in (*_up_to_date()[2], *named)}.values():
        space = dict(vars(one))
        yield space
        for kind in space.values():
            if isinstance(kind, type) and kind.__module__ == one.__name__:
                yield dict(vars(kind))


_without_tensors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions in whose caches no tensor was found, and how often they had been computed by then."""


def _caches_tensors(function: Any) -> bool:
    """Check whether a cached function's results contain tensors."""
    info = function.cache_info()
    if not info.currsize or _without_tensors.get(function) == info.misses:
        return False
    # an unbounded cache refers to a dict of results, a bounded one to each result
    refers_to = gc.get_referents(function)
    if any(_has_tensors(one.values() if type(one) is dict else (one,)) for one in refers_to):
        return True
    _without_tensors[function] = info.misses
    return False


def _has_tensors(values: Iterable[Any]) -> bool:
    """Check whether any value is a tensor, or a list, tuple or dict with one."""
    for value in values:
        if isinstance(value, Tensor):
            return True
        parts = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
        if any(isinstance(part, Tensor) for part in parts):
            return True
    return False


def _has_sizes(key: object) -> bool:
    """Check whether a dict's key is an integer or a tuple with one, as in caches keyed by sizes."""
    if isinstance(key, tuple):
        return any(map(_has_sizes, key))
    return isinstance(key, int) and not isinstance(key, bool)
