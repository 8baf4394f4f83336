"""Represent Python objects in config.yaml by placeholders, and replace these when the run is read again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from raafl.core.algorithm import Algorithm
from raafl.data.partition import Partition
from raafl.errors import BadInput
from raafl.lean_import import import_lightning

import_lightning()
from lightning import LightningDataModule, LightningModule  # noqa: E402

_here: dict[str, Any] = {}


@contextmanager
def objects(**given: object) -> Iterator[None]:
    """Return a context in which a config can refer to these Python objects, which a YAML file cannot contain.

    The config names a placeholder (`Module`, `Data`, `algorithm`, `partition`) for each object. Within the context, a
    call of the placeholder returns the object.
    """
    before = dict(_here)
    _here.update(given)
    try:
        yield
    finally:
        _here.clear()
        _here.update(before)


def _take(what: str, given: str) -> Any:
    return _here[what] if what in _here else _missing(what, given)


def _missing(what: str, given: str) -> NoReturn:
    raise BadInput(
        f"this run's {what} was a Python object, {given}: continue the run in Python, with "
        "raafl.Federation(...).replay(RUN, module, data), or .simulate(module, data, resume=RUN)"
    )


class Module(LightningModule):
    """Placeholder in a config for a model that the user passed as a Python object; creating it returns that model."""

    def __new__(
        cls, given: str, settings: dict[str, Any] | None = None, weights: str | None = None, shown: str = ""
    ) -> Any:
        """Return the given model; the arguments are those of `__init__`.

        Raises:
            BadInput: no model was given, or its initial weights differ.
        """
        module = _take("module", given)()
        if weights is not None and (found := digest(_here["unwrap"](module))) != weights:
            raise BadInput(
                f"the module's initial weights have digest {found}, but those of the run had {weights}: call "
                "torch.manual_seed before the module is made, or give a function that makes it, which the run's "
                "seed controls"
            )
        return module

    def __init__(
        self, given: str, settings: dict[str, Any] | None = None, weights: str | None = None, shown: str = ""
    ) -> None:
        """Describe the model in the config; never called.

        Args:
            given: its class or factory.
            settings: its hyper-parameters, and how it is trained.
            weights: digest of its initial values; None = drawn from the run's seed.
            shown: its printed form.
        """


class Data(LightningDataModule):
    """Placeholder in a config for data that the user passed as a Python object; creating it returns these data."""

    def __new__(cls, given: str, settings: dict[str, Any] | None = None, shown: str = "") -> Any:
        """Return the given data module; raises `BadInput` if there is none."""
        return _take("data", given)()

    def __init__(self, given: str, settings: dict[str, Any] | None = None, shown: str = "") -> None:
        """Describe the data in config.yaml; `__new__` returns another class, so this is never called."""


def algorithm(given: str, parts: dict[str, str] | None = None, shown: str = "") -> Algorithm:
    """Return the algorithm that the user passed as a Python object; raise `BadInput` if there is none.

    Args:
        given: name of the object, shown if there is none in this process.
        parts: class names of the algorithm's five parts; ignored here, it informs readers of the config file.
        shown: printed form of the algorithm; ignored here, it informs readers of the config file.
    """
    found: Algorithm = _take("algorithm", given)
    return found


def partition(given: str, shown: str = "") -> Partition:
    """Return the data partition that the user passed as a Python object; raise `BadInput` if there is none."""
    found: Partition = _take("partition", given)
    return found


def digest(module: nn.Module) -> str:
    """Return a digest of a module's parameters and persistent buffers, 16 hex digits long."""
    sha = hashlib.sha256()
    # not `state_dict`, which a module may override; a tied parameter counts under each of its names, as there
    state = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        names = part._buffers.keys() - part._non_persistent_buffers_set
        state |= {dot + name: tensor for name in names if (tensor := part._buffers[name]) is not None}
    for name, tensor in sorted((name.replace("_orig_mod.", ""), tensor) for name, tensor in state.items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
