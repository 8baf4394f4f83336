"""Count what a real task of a method costs, by torch's FLOP counter and allocator, beside what raafl predicts for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from model_zoo import CNN, LLaMA, ResNet
from raafl.algorithms import ALGORITHMS
from raafl.compression.plan import CompressionPlan
from raafl.core.algorithm import Algorithm, Training
from raafl.core.coordinator import Coordinator
from raafl.core.options import Compress
from raafl.core.state import GlobalState
from raafl.core.types import Assign, Assignment, ClientInfo, Joined, Limits
from raafl.data.federated import ClientData
from raafl.devices.profiles import Profile
from raafl.local.context import ALONE
from raafl.local.train import LocalTrainer
from raafl.parts.select.units import leading
from raafl.rules import Rules
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.cost import Cost

BATCH = 8
_aten = torch.ops.aten


def _formula(operation: Any) -> Callable[..., Any]:
    """Register torch's formula for a GPU kernel also for the CPU kernel, which older versions of torch do not count."""

    def count(*args: Any, **kwargs: Any) -> Any:
        return flop_registry[operation](*args, **kwargs)

    count._get_raw = True  # type: ignore[attr-defined]  # it takes tensors, as the registry's own do
    return count


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _formula(_aten._scaled_dot_product_flash_attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _formula(
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of FLOPs, with a processor's attention, which older versions of torch do not count."""
    return FlopCounterMode(
        display=False, custom_mapping={k: v for k, v in _ATTENTION.items() if k not in flop_registry}
    )


def _images(channels: int, size: int) -> list[torch.Tensor]:
    return [torch.randn(BATCH, channels, size, size), torch.arange(BATCH) % 10]


def _tokens(vocabulary: int, length: int) -> list[torch.Tensor]:
    words = torch.randint(0, vocabulary, (BATCH, length))
    return [words, words]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[torch.Tensor]]]] = {
    "cnn": (lambda: CNN(3, 16, (16, 32), (48, 32), 10), lambda: _images(3, 16)),
    "resnet": (ResNet, lambda: _images(3, 32)),  # with batch statistics
    "llama": (lambda: LLaMA("nano", vocab_size=1000), lambda: _tokens(1000, 32)),  # with exits after its blocks
}
"""A model and a batch of its data, by name."""


OPTIONS: dict[str, dict[str, Any]] = {
    "depth_fl": {"depths": 1.0},
    "fjord": {"distil": True},
    "scale_fl": {"depths": 1.0, "widths": 1.0},
    "split_fed": {"client_layers": 2},
}
"""Arguments with which one client has all of a method's work."""

NO_CASE = {
    ("ada_vit", "cnn", 0.25): "it trains the whole model: a decision head reads all channels of the layer before",
}
"""Cases that a method refuses, with the reason."""

CASES = [
    (name, model, share)
    for name in ALGORITHMS
    for model in MODELS
    for share in (1.0, 0.25)
    if (name, model, share) not in NO_CASE
]
"""Method, model, and the share of each axis that a task has."""


@dataclass(frozen=True)
class Counted:
    """Cost of a task as predicted (`said`), and as counted.

    `flops_per_sample`: counted FLOPs per sample and step. `peak_bytes`: most bytes that the task has allocated at once,
    with the received values.
    """

    said: Cost
    flops_per_sample: float
    peak_bytes: int

    @property
    def ratios(self) -> tuple[float, float]:
        """Predicted FLOPs and bytes, each divided by the counted ones."""
        return self.said.flops_per_sample / self.flops_per_sample, self.said.peak_bytes / self.peak_bytes


class _Silent:
    """Stand-in for the server of a split task: it answers with zeros, since only the client's side is counted."""

    def ask(self, meta: Any, tensors: Any, answer: Any) -> FlatTensors:
        FlatTensors.from_named(tensors)
        return FlatTensors.zeros(answer)


@dataclass
class Setting:
    """A method on a model with one client, and that client's task.

    `model`: name of a model in `MODELS`. `rules`: rules by which the cost is predicted.
    """

    algorithm: Algorithm
    model: str
    rules: Rules

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        make, batch = MODELS[self.model]
        self.rows, module = batch(), make()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.module = self.algorithm.local.prepare(module)
        self.submodels = self._submodels()
        self.state = GlobalState(self.submodels, self.submodels.state(self.module))
        self.training = Training(num_epochs=None, num_steps=2, batch_size=BATCH)
        self.coordinator = Coordinator(
            self.algorithm,
            self.state,
            Limits(),
            training=self.training,
            batch_size=BATCH,
            plan=self._plan(),
            rules=self.rules,
        )

    def _submodels(self) -> Submodels:
        return Submodels(self.module, self.rows)

    def _plan(self) -> CompressionPlan | None:
        """Return the compression plan if bundles travel beside the model, else None; compressors work only after a task."""
        local = self.algorithm.local
        has_more = local.exchange(self.submodels) is None and local.payload(self.submodels).has_bundles
        return CompressionPlan.of(self.submodels, Compress(), self.algorithm.merge.sends, local) if has_more else None

    def first_task(self) -> Assignment:
        """Return the first task that the method assigns to the client."""
        client = ClientInfo(1, BATCH, Profile(flops_per_s=1e9))
        actions = self.coordinator.handle(Joined(client), 0.0)
        return next(action.assignment for action in actions if isinstance(action, Assign))

    def cut(self, task: Assignment, share: float) -> Assignment:
        """Return the task with its submodel reduced to ``share`` of the units of each axis."""
        return replace(task, spec=replace(task.spec, kept=leading(self.submodels.axes, share).kept))

    def counted(self, task: Assignment) -> Counted:
        """Run the task twice: under torch's FLOP counter, and under its memory profiler."""
        said = self.coordinator.fleet.cost(task.spec, task.extra)
        # two steps suffice: FedCompass's first task has a hundred, and no later step costs more than the second
        if task.num_steps is not None:
            task = replace(task, num_steps=min(task.num_steps, 2))
        data = ClientData(TensorDataset(*self.rows), torch.arange(BATCH), batch_size=BATCH)
        counter = flop_counter()
        trainer, received = self._trainer(task)
        with counter:
            update = trainer.run(task, received, data, self._context)
        # a new trainer: memory that is allocated once for all tasks counts as this task's
        trainer, received = self._trainer(task)
        gc.collect()  # otherwise garbage of earlier tasks, freed during this one, would be subtracted
        gc.disable()
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                trainer.run(task, received, data, self._context)
        finally:
            gc.enable()
        notes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        num_bytes = max(accumulate(notes)) + received.num_bytes
        # the client stores a resident payload between tasks, so it is not the task's memory
        if trainer.payload.is_resident:
            num_bytes += received.num_bytes
        return Counted(said, counter.get_total_flops() / update.num_steps / BATCH, num_bytes)

    @property
    def _context(self) -> Any:
        return replace(ALONE, link=_Silent())

    def _trainer(self, task: Assignment) -> tuple[LocalTrainer, FlatTensors]:
        """Return a new trainer, and the values that it receives for a task."""
        submodels = self._submodels()
        _ = submodels.axes  # finds the axes now, outside the task
        exchange = self.algorithm.local.exchange(submodels, task.extra)
        submodels = submodels if exchange is None else exchange.client
        trainer = LocalTrainer(submodels, self.algorithm.local, self.algorithm.merge.sends, self.training, pools=True)
        received = FlatTensors.zeros(trainer.payload.layout(task.spec, "sent"))
        values, bundles = trainer.payload.split(received, task.spec, "sent")
        whole = (
            self.state.values
            if exchange is None
            else FlatTensors.from_named(
                {name: self.state.values[name] for name in submodels.layout().by_name}, submodels.layout()
            )
        )
        submodels.plan(task.spec, "present").gather(whole, out=values)
        if exchange is None:
            self.algorithm.merge.personalize(self.state, 1, task.spec, values, bundles)
        return trainer, received


def case(name: str, model: str, share: float) -> tuple[Setting, Assignment]:
    """Return one of `CASES`, with its task."""
    options = OPTIONS.get(name, {})
    if name == "split_fed":  # without submodels; the client's half is made smaller or larger instead
        options = {"client_layers": 4} if share == 1 else {"share": share}
        if model == "llama":  # with the embedding alone, a client computes no products, and torch counts none
            options = {"client_layers": 16} if share == 1 else {"share": 2 * share}
    if (name, model) == ("fjord", "llama"):  # fjord distils from one row of logits per sample
        options = {"distil": False}
    setting = Setting(ALGORITHMS[name](**options), model, Rules())
    task = setting.first_task()
    return setting, task if share == 1 or name == "split_fed" else setting.cut(task, share)


def whole(spec: Spec) -> Spec:
    """Return ``spec`` with all blocks and units, and the same trained parameters."""
    return Spec(trained=spec.trained)
