"""Hide what a user's code has cached while its steps are followed, measured and proven, and remove what these steps cache.

What is found about a model must not depend on what ran before in the same process. And a followed step computes tensors without
values, which must not get into later training through a cache.
"""

from __future__ import annotations

import functools
import gc
import site
import sys
import sysconfig
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_CACHED = functools._lru_cache_wrapper
_TABLES = (dict, OrderedDict, defaultdict)
_NOT_THEIRS = frozenset(
    {"torch", "raafl", "numpy", "sympy", "lightning", "torchmetrics", "jsonargparse", *sys.stdlib_module_names}
)
"""Packages whose caches are left alone, even if parts of the model are from them."""


@dataclass
class Hidden:
    """Outcome of hiding what is cached, for a context of `uncached`."""

    # whether any cache was hidden; code that fails without it may need it, such as a dictionary of constant tensors
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
    """Restore a dictionary's entries; new ones without tensors or sizes stay, such as registered plugins."""
    new = {key: value for key, value in table.items() if key not in entries}
    if new or len(table) != len(entries) or any(table[key] is not value for key, value in entries.items()):
        table.clear()
        table.update(entries)
        table.update({key: value for key, value in new.items() if not _has_sizes(key) and not _has_tensors([value])})


_known: tuple[int, weakref.WeakSet[Any], list[ModuleType]] = 0, weakref.WeakSet(), []


def _functions_with_a_cache() -> list[Any]:
    return list(_up_to_date()[1])


def _up_to_date() -> tuple[int, weakref.WeakSet[Any], list[ModuleType]]:
    """Return the user's cached functions and modules; scan all objects again only if modules were imported since."""
    global _known
    if _known[0] != len(sys.modules):
        modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType) and _is_theirs(one)]
        functions = (x for x in gc.get_objects() if type(x) is _CACHED and _top(x.__module__) not in _NOT_THEIRS)
        _known = len(sys.modules), weakref.WeakSet(functions), modules
    return _known


def _is_theirs(module: ModuleType) -> bool:
    """Check whether a Python module is the user's own, that is, not installed."""
    file, name = getattr(module, "__file__", None), module.__name__
    return name == "__main__" or (
        file is not None and _top(name) not in _NOT_THEIRS and not file.startswith(_INSTALLED)
    )


def _top(name: str | None) -> str:
    """Return the top-level package in a module's name."""
    return (name or "").partition(".")[0]


_INSTALLED = tuple({*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))})


def _namespaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attribute dictionaries of the user's Python modules, of the model's modules, and of their classes."""
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
    """Check whether results in the cache of a function are, or contain, tensors."""
    info = function.cache_info()
    if not info.currsize or _without_tensors.get(function) == info.misses:
        return False
    # an unbounded cache refers to one dictionary of results, a bounded one to the results themselves
    refers_to = gc.get_referents(function)
    if any(_has_tensors(one.values() if type(one) is dict else (one,)) for one in refers_to):
        return True
    _without_tensors[function] = info.misses
    return False


def _has_tensors(values: Iterable[Any]) -> bool:
    """Check whether any of the values is a tensor, or a list, tuple or dictionary that contains one."""
    for value in values:
        if isinstance(value, Tensor):
            return True
        parts = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
        if any(isinstance(part, Tensor) for part in parts):
            return True
    return False


def _has_sizes(key: object) -> bool:
    """Check whether a dictionary's key is or contains an integer, as in a cache keyed by sizes."""
    if isinstance(key, tuple):
        return any(map(_has_sizes, key))
    return isinstance(key, int) and not isinstance(key, bool)
