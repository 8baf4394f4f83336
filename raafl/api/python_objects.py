"""Name in config.yaml the Python objects that a run was given, and load them when the run is read again."""

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
def objects(**given: Any) -> Iterator[None]:
    """Within this context the stand-ins stand for these.

    Args:
        given: ``module`` and ``data``, which are makers; ``unwrap``, which undoes what the first has added; ``algorithm``
            and ``partition``.
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
        f"this run was started in Python, which gave its {what}, {given}: go on with it there, by "
        "raafl.Federation(...).replay(RUN, module, data), or .simulate(module, data, resume=RUN)"
    )


class Module(LightningModule):
    """Stands for the model."""

    def __new__(
        cls, given: str, settings: dict[str, Any] | None = None, weights: str | None = None, shown: str = ""
    ) -> Any:
        """Return the model that was given; arguments as in `__init__`.

        Raises:
            BadInput: none was, or it has other weights to begin with.
        """
        module = _take("module", given)()
        if weights is not None and (found := digest(_here["unwrap"](module))) != weights:
            raise BadInput(
                f"the module's initial weights have digest {found}, those of the run had {weights}: give the same, by "
                "torch.manual_seed before it is made, or give a function that makes it, which the run's seed decides"
            )
        return module

    def __init__(
        self, given: str, settings: dict[str, Any] | None = None, weights: str | None = None, shown: str = ""
    ) -> None:
        """Say what it was; never called.

        Args:
            given: its class, or what makes it.
            settings: its hyper-parameters, and how it is trained.
            weights: digest of its initial values; None = the run's seed decides them.
            shown: what it looks like.
        """


class Data(LightningDataModule):
    """Stands for the data."""

    def __new__(cls, given: str, settings: dict[str, Any] | None = None, shown: str = "") -> Any:
        """Return the data module that was given, or raise `BadInput`."""
        return _take("data", given)()

    def __init__(self, given: str, settings: dict[str, Any] | None = None, shown: str = "") -> None:
        """Say what it was; never called."""


def algorithm(given: str, parts: dict[str, str] | None = None, shown: str = "") -> Algorithm:
    """Return the algorithm that was given, or raise `BadInput`."""
    found: Algorithm = _take("algorithm", given)
    return found


def partition(given: str, shown: str = "") -> Partition:
    """Return the partition that was given, or raise `BadInput`."""
    found: Partition = _take("partition", given)
    return found


def digest(module: nn.Module) -> str:
    """Return 16 hexadecimal digits that stand for a module's parameters and persistent buffers."""
    sha = hashlib.sha256()
    # as if not compiled
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in module.state_dict().items()}
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, torch.Tensor):
            sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
