"""Seed, save and restore the global random generators of Python, NumPy and torch; and private streams of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch


@contextmanager
def undisturbed(gpus: Iterable[int] = (), seed: int | None = None) -> Iterator[None]:
    """Return a context that restores the state of all random generators at its end; ``seed`` seeds them at its start."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(list(gpus)):
            if seed is not None:
                seeded(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seeded(seed: int) -> None:
    """Seed the CPU generators of torch, NumPy and Python; cheaper than `torch.manual_seed` on a machine without GPUs."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is this thread's current GPU; for a CPU it has no effect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed every random generator that a module or data set may use, on the CPU and on a GPU in use."""
    seeded(seed)
    if device.type == "cuda":
        with current(device):
            torch.cuda.manual_seed(seed)


def generators(device: torch.device | None = None) -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and torch's generators on the CPU, and of that of ``device`` if it is a GPU."""
    cuda = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda


def same_generators(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Check whether two results of `generators` are equal."""
    numpys = all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    cudas = one[3] is None or torch.equal(one[3], other[3])
    return one[0] == other[0] and numpys and torch.equal(one[2], other[2]) and cudas


def owned_generators(*owners: object) -> list[Any]:
    """Return the random generators that objects hold in attributes, also of their parts: transforms, closures, wrapped sets.

    The generators of the whole process are left out. Long sequences, such as samples, are not searched.
    """
    of_functions = (getattr(function, "__self__", None) for function in (np.random.rand, random.random))
    shared = {id(generator) for generator in (torch.default_generator, *of_functions)}
    found: list[Any] = []
    waiting, seen = [(owner, 0) for owner in owners], set[int]()
    while waiting and len(seen) < _MOST_SEARCHED:
        one, depth = waiting.pop(0)
        if id(one) in seen or id(one) in shared:
            continue
        seen.add(id(one))
        if isinstance(one, _GENERATORS):
            found.append(one)
        elif depth < _DEEPEST:
            waiting += [(part, depth + 1) for part in _parts_of(one)]
    return found


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_SEARCHED, _DEEPEST, _LONGEST = 2000, 8, 64


def _parts_of(one: Any) -> list[Any]:
    if isinstance(one, (torch.Tensor, np.ndarray, type, ModuleType, str, bytes)):
        return []
    if isinstance(one, Mapping):
        return list(one.values()) if len(one) <= _LONGEST else []
    if isinstance(one, (list, tuple, set)):
        return list(one) if len(one) <= _LONGEST else []
    if isinstance(one, FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
        return [*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    if isinstance(one, MethodType):
        return [one.__self__]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    return list(getattr(one, "__dict__", {}).values())


def reseed(owned: Iterable[Any]) -> None:
    """Seed generators anew, each by a number drawn from torch's generator of the whole process."""
    for generator in owned:
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(seed).state
        else:
            generator.seed(seed % 2**32)


class RngStream:
    """A private RNG stream: inside, Python, NumPy and torch use its state; on exit the previous global state is restored.

    Generators belong to the whole process, so only one stream is in use at a time; other threads wait.
    """

    _in_use = threading.RLock()

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device, self._inside = device, False
        self._own: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()
        with self:
            seed_everything(seed, device)
        self._first: tuple[Any, ...] | None = self._own

    @property
    def has_drawn(self) -> bool:
        """Whether random numbers have been drawn from this stream; to be asked outside of it."""
        assert self._first is not None and self._own is not None
        return not same_generators(self._first, self._own)

    def __enter__(self) -> None:
        """Save the global random state, and set that of this stream."""
        # no stream is used within another; if this thread has the lock, an interrupt has kept it from being released
        with suppress(RuntimeError):  # raised once this thread does not have it
            while True:
                self._in_use.release()
        self._in_use.acquire()
        try:
            self._outer = self._states()
            if self._own is not None:
                self._set(self._own)
            self._inside = True
        except BaseException:  # a GPU that failed raises here; without a release other threads would wait forever
            self._in_use.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Save this stream's random state, and restore the global one."""
        try:
            self._inside = False
            self._own = self._states()
        finally:
            try:
                self._set(self._outer)
            finally:
                self._in_use.release()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which other streams may be used, for example while this thread waits.

        It has no effect if this stream is not in use.
        """
        if not self._inside:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _states(self) -> tuple[Any, ...]:
        return generators(self._device)

    def _set(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)
