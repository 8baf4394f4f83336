"""Cache results that every small run computes again (data, axes, proofs, costs), which saves half of its CPU time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from raafl.config.parse import load_experiment, make_parser
from raafl.submodel.find import discover
from raafl.submodel.nested_batch import tensors_in
from raafl.submodel.prove import proof
from raafl.submodel.spec import Spec
from raafl.submodel.submodels import Submodels

_OF_THE_ZOO: dict[Any, Any] = {}
_COST, _REFUTED, _DISCOVER = Submodels._cost, proof.refuted, discover.discover_axes


def cache_inputs() -> None:
    """Cache the digits and the entry points of installed packages for as long as this process lives."""
    from lightning.fabric.utilities import registry

    from raafl.data import readers

    registry.entry_points = cache(registry.entry_points)
    digits = cache(readers.read_digits)
    readers.read_digits = lambda: tuple(tensor.clone() for tensor in digits())


@cache
def warm_up() -> None:
    """Build all parsers and simulate a task before forking, which saves forked commands two thirds of their start."""
    from raafl.runtime.run import simulate

    for command in ("fit", "serve", "join"):
        make_parser(command)
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    small = ("--train.num_epochs=null", "--train.num_steps=1", "--max_updates=1", "--progress=quiet")
    with tempfile.TemporaryDirectory() as folder, reuse_findings():
        simulate(load_experiment(quickstart, *small, f"--output={folder}/run"))


@contextmanager
def reuse_findings() -> Iterator[None]:
    """Cache axes, proofs and predicted costs for all runs within the block, also in processes forked from it.

    For models of the tests' zoo they are found once for all tests, as such a model follows from its arguments and
    parameters. How they are found is tested in tests/submodel.
    """
    if Submodels._cost is not _COST:  # the context was entered twice
        yield
        return
    own: dict[Any, Any] = {}

    def once(key: tuple[Any, ...], module: nn.Module, batch: Any, find: Callable[[], Any]) -> Any:
        known = _OF_THE_ZOO if type(module).__module__.startswith("model_zoo.") else own
        tensors = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
        example = repr([(tuple(x.shape), x.dtype) for x in tensors_in(batch)])
        key = (*key, type(module), tensors, repr(module), repr(getattr(module, "hparams", "")), example)
        if key not in known:
            known[key] = find()
        return known[key]

    def of(submodels: Submodels) -> tuple[Any, ...]:
        sent = frozenset(
            getattr(submodels.module, "submodel_sent", ())
        )  # frozen weights that a method sends all the same
        return (
            type(submodels),
            submodels.base is None,
            submodels.batch_norm,
            submodels.rules,
            tuple(submodels.axes),
            sent,
        )

    def predicted(submodels: Submodels, spec: Spec, batch_size: int) -> Any:
        key = ("cost", *of(submodels), spec, batch_size)
        return once(key, submodels.module, submodels.example_batch, lambda: _COST(submodels, spec, batch_size))

    def refuted(submodels: Submodels, module: nn.Module, batch: Any, **options: Any) -> Any:
        key = ("refuted", *of(submodels), *options.items())
        return once(key, module, batch, lambda: _REFUTED(submodels, module, batch, **options))

    def discover_axes(module: nn.Module, batch: Any, *more: Any, **options: Any) -> Any:
        return once(("axes", *options.items()), module, batch, lambda: _DISCOVER(module, batch, *more, **options))

    Submodels._cost, proof.refuted, discover.discover_axes = predicted, refuted, discover_axes
    try:
        yield
    finally:
        Submodels._cost, proof.refuted, discover.discover_axes = _COST, _REFUTED, _DISCOVER
