"""Choose methods that together cover every kind of part: a property of a kind need not be run on each method.

A kind is a method of `Select`, `Local`, `Trigger` or `Merge` that a part overrides, or a class of `raafl.core` or `raafl.parts`
that a part is one of. The other methods run in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.core.algorithm import Algorithm, Merge, Select, Trigger
from raafl.core.local import Local

BASES = {"select": Select, "local": Local, "trigger": Trigger, "merge": Merge}


def kinds(algorithm: Algorithm, parts: Iterable[str] = BASES) -> set[str]:
    """Return the kinds of ``parts`` that an algorithm has, as "merge.receive" or "merge:Wrapped"."""
    found = set()
    for part in parts:
        base = BASES[part]
        own = type(getattr(algorithm, part))
        names = [name for name in dir(base) if name == "__call__" or not name.startswith("_")]
        found |= {f"{part}.{name}" for name in names if getattr(own, name) is not getattr(base, name)}
        shared = ("raafl.core.", "raafl.parts.")
        found |= {f"{part}:{kind.__name__}" for kind in own.__mro__ if kind.__module__.startswith(shared)}
    return found


def covering(algorithms: Mapping[str, Algorithm], parts: Iterable[str] = BASES) -> list[str]:
    """Return names of few algorithms that have every kind of ``parts``, by greedy choice; ties go to the first."""
    of = {name: kinds(algorithm, parts) for name, algorithm in algorithms.items()}
    missing, chosen = set().union(*of.values()), []
    while missing:
        best = max(of, key=lambda name: len(of[name] & missing))
        missing -= of[best]
        chosen.append(best)
    return chosen


def each_method(
    algorithms: Mapping[str, Algorithm] | None = None,
    also: Iterable[str] = (),
    but: Iterable[str] = (),
    parts: Sequence[str] = tuple(BASES),
) -> list[Any]:
    """Return a test parameter for each method: its name, marked `long` outside the covering set.

    `algorithms`: algorithms by name; None = all registered ones with their defaults. `also`: names that are never long.
    `but`: names to leave out. `parts`: parts (select, local, trigger, merge) of which all kinds are covered.
    """
    algorithms = {name: make() for name, make in ALGORITHMS.items()} if algorithms is None else algorithms
    algorithms = {name: algorithm for name, algorithm in algorithms.items() if name not in but}
    return long_except(algorithms, *covering(algorithms, parts), *also)


def long_except(names: Iterable[str], *quick: str) -> list[Any]:
    """Return a parameter for each name, marked `long` unless it is one of ``quick``."""
    names = list(names)
    assert set(quick) <= set(names), f"no parameters: {set(quick) - set(names)}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]
