"""Decide for each input which heads, sublayers and units to use (AdaViT, Meng et al. 2022).

`Adaptive.prepare` gives a model small decision heads, which are parameters like any other. A policy lies in the module whose
input it reads, as ``usage_policy``, and acts by forward hooks: what is decided against is computed, and multiplied by 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from raafl.core.algorithm import Hook, Local, Task
from raafl.core.types import Warn
from raafl.errors import BadInput, fraction, positive
from raafl.submodel import Axis, Member, Submodels
from raafl.submodel.lora import is_lora

NAME = "usage_policy"
_SURE = 0.99  # the most that a gate is open at the start, so that it can learn to close
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class UsagePolicy(nn.Module):
    """Policy network: a linear layer with a gate for each of its logits decides which units and sublayers a sample uses.

    While training, gates are drawn by Gumbel-softmax over open and closed, hard forward, and backward as the soft ones
    (straight-through); else a gate is open where its logit is above 0.

    Attributes:
        gates: of the last input, shape (batch, units + sublayers), 0 or 1.
        used: gates of every input since `clear`, while training.
    """

    is_beside_axes = True

    def __init__(
        self, width: int, units: int, sublayers: int, targets: tuple[float, float], temperature: float,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Initialise the gates at the target usage.

        ``targets`` is the usage that is aimed at, of units and of sublayers, whose gates come last; ``dtype`` that of features.
        """
        super().__init__()
        self.units, self.sublayers, self.temperature = units, sublayers, temperature
        self.linear = nn.Linear(width, units + sublayers, dtype=dtype)
        with torch.no_grad():
            nn.init.normal_(self.linear.weight, std=0.02)
            for part, target in zip((slice(None, units), slice(units, None)), targets, strict=True):
                share = min(target, _SURE)
                self.linear.bias[part] = math.log(share / (1 - share))
        self.gates: Tensor | None = None
        self.used: list[Tensor] = []

    def forward(self, features: Tensor) -> Tensor:
        """Return the gates of ``features``, shape (batch, width), in their type."""
        logits = self.linear(features).float()
        if self.training:
            uniform = torch.rand_like(logits).clamp_(1e-7, 1 - 1e-7)
            noise = uniform.log() - (-uniform).log1p()  # the difference of two Gumbel variables
            soft = torch.sigmoid((logits + noise) / self.temperature)
            gates = (soft > 0.5).float() + (soft - soft.detach())
            self.used.append(gates)
        else:
            gates = (logits > 0).float()
        self.gates = gates.to(features.dtype)
        return self.gates

    def clear(self) -> None:
        """Discard the recorded decisions."""
        self.gates, self.used = None, []

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the recorded decisions from copies."""
        return {**self.__dict__, "gates": None, "used": []}

    def of(self, place: int, x: Tensor, batch_dim: int) -> Tensor:
        """Return gate ``place``, shaped to multiply ``x``, whose batch is dimension ``batch_dim``."""
        gates = self._known(x, batch_dim)[:, place]
        return gates.to(x.dtype).view([len(gates) if dim == batch_dim else 1 for dim in range(x.dim())])

    def of_units(self, x: Tensor, batch_dim: int, dim: int) -> Tensor:
        """Return the gates of all units, shaped to multiply ``x``, whose dimension ``dim`` consists of the units."""
        gates, dim = self._known(x, batch_dim)[:, : self.units], dim % x.dim()
        gates = gates.repeat_interleave(x.shape[dim] // self.units, 1).to(x.dtype)
        return gates.view([x.shape[place] if place in (batch_dim, dim) else 1 for place in range(x.dim())])

    def _known(self, x: Tensor, batch_dim: int) -> Tensor:
        if self.gates is None or x.shape[batch_dim] != len(self.gates):
            raise BadInput(
                f"ada_vit: a layer of shape {tuple(x.shape)} does not see the samples that its policy decided for: "
                "the model mixes batch and positions inside a block; use another algorithm for it"
            )
        return self.gates


# Hooks are objects, so that a copy of the model has its own policy in them.


@dataclass
class _Decide:
    is_beside_axes: ClassVar = True  # the axes are those of the model without its gates
    policy: UsagePolicy
    features: Callable[[Tensor], Tensor]

    def __call__(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.policy(self.features(x))


@dataclass
class _GateUnits:
    is_beside_axes: ClassVar = True  # the axes are those of the model without its gates
    policy: UsagePolicy
    batch_dim: int
    dim: int

    def __call__(self, layer: nn.Module, args: Any) -> object:
        return (args[0] * self.policy.of_units(args[0], self.batch_dim, self.dim), *args[1:])


@dataclass
class _GateSublayer:
    is_beside_axes: ClassVar = True  # the axes are those of the model without its gates
    policy: UsagePolicy
    place: int
    batch_dim: int

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> object:
        x = output[0] if isinstance(output, tuple) else output
        gated = x * self.policy.of(self.place, x, self.batch_dim)
        return (gated, *output[1:]) if isinstance(output, tuple) else gated


def _first_position(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[:, 0]


def _first_position_last(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[0]


def _mean_pixel(x: Tensor) -> Tensor:
    return x.flatten(2).mean(2)


# ---- where the policies go ----


@dataclass(frozen=True)
class Adaptive(Local):
    """Training with decision heads and a loss on their usage.

    The loss is the module's own plus ``weight * sum_k (usage_k - target_k)^2`` with k in heads (or units) and blocks, where
    usage_k is the mean of the gates of that kind over samples and blocks.

    Attributes:
        heads: target of the heads; where the model has no attention, of the groups of units.
        blocks: target of the sublayers (attention, feed-forward part) of blocks.
        weight: of the usage loss.
        temperature: of Gumbel-softmax.
        units: the most groups of units of a layer outside blocks.
    """

    heads: float = 0.7
    blocks: float = 0.7
    weight: float = 2.0
    temperature: float = 5.0
    units: int = 8

    def __post_init__(self) -> None:
        for name in ("heads", "blocks"):
            fraction(name, getattr(self, name))
        for name in ("weight", "temperature", "units"):
            positive(name, getattr(self, name))

    def prepare(self, module: Any) -> Any:
        """Give each block its policy; without blocks, each layer whose units only one other layer reads; none beside LoRA."""
        if _has_lora(module):  # the only axes are ranks then: what reads them is neither a head nor a sublayer
            return module
        axes = list(Submodels(module).axes.values())
        blocks = [(path, part) for path, part in module.named_modules() if any(a.name == f"{path}.heads" for a in axes)]
        if blocks:
            for path, block in blocks:
                self._gate_block(path, block, [axis for axis in axes if axis.name.startswith(f"{path}.")])
        else:
            for axis in axes:
                self._gate_units(module, axis)
        return module

    def _gate_block(self, path: str, block: nn.Module, axes: list[Axis]) -> None:
        ffn = [axis for axis in axes if axis.name == f"{path}.ffn"]
        attentions = [axis for axis in axes if axis not in ffn]
        readers = [(axis, *_reader(block, path, axis)) for axis in (*attentions, *ffn)]
        found = [(axis, layer, member) for axis, layer, member in readers if layer is not None and member is not None]
        if not found:
            return
        # heads of the first attention that lets them be seen; a block with another one decides on that as a whole
        seen = next((axis for axis, layer, _ in found if axis not in ffn and isinstance(layer, nn.Linear)), None)
        heads = 0 if seen is None else seen.size
        inner = [layer for _, layer, _ in found if isinstance(layer, nn.MultiheadAttention)]
        batch_dim = 0 if all(layer.batch_first for layer in inner) else 1
        policy = self._policy(block, _width(found[-1][1]), heads, len(found))
        features = _first_position if batch_dim == 0 else _first_position_last
        block.register_forward_pre_hook(_Decide(policy, features), with_kwargs=True)
        for place, (axis, layer, _) in enumerate(found):
            layer.register_forward_hook(_GateSublayer(policy, heads + place, batch_dim))
            if axis is seen:
                layer.register_forward_pre_hook(_GateUnits(policy, batch_dim, -1))

    def _gate_units(self, module: nn.Module, axis: Axis) -> None:
        made: list[Any] = [module.get_submodule(m.name.rpartition(".")[0]) for m in _weights(axis, 0)]
        made = [layer for layer in made if isinstance(layer, (nn.Linear, *_CONVOLUTIONS))]
        read = [(module.get_submodule(m.name.rpartition(".")[0]), m) for m in _weights(axis, 1)]
        if len(made) != 1 or len(read) != 1 or axis.size < 2 or NAME in made[0]._modules:
            return
        (maker,), ((reader, _),) = made, read
        if not isinstance(reader, (nn.Linear, *_CONVOLUTIONS)) or getattr(maker, "groups", 1) != 1:
            return
        number = max(n for n in range(1, min(axis.size, self.units) + 1) if axis.size % n == 0)
        is_linear = isinstance(maker, nn.Linear)
        policy = self._policy(maker, maker.weight.shape[1], number, 0)
        features = _first_position if is_linear else _mean_pixel
        maker.register_forward_pre_hook(_Decide(policy, features), with_kwargs=True)
        reader.register_forward_pre_hook(_GateUnits(policy, 0, -1 if isinstance(reader, nn.Linear) else 1))

    def _policy(self, host: nn.Module, width: int, units: int, sublayers: int) -> UsagePolicy:
        if hasattr(host, NAME):
            raise BadInput(f"{type(host).__name__} has '{NAME}' already: ada_vit adds a part of this name; rename it")
        dtypes = [parameter.dtype for parameter in host.parameters()]
        if any(dtype.is_complex for dtype in dtypes):
            raise BadInput(
                f"{type(host).__name__} has complex weights, and ada_vit decides on real features: use another algorithm"
            )
        floating = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
        policy = UsagePolicy(width, units, sublayers, (self.heads, self.blocks), self.temperature, floating)
        host.add_module(NAME, policy)
        return policy

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds the usage loss."""
        return UsageLoss(task, self)

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a note on which layers are gated, if any."""
        policies = list(_policies(submodels.module))
        if _has_lora(submodels.module):
            return [Warn("ada_vit decides on nothing in a model with LoRA adapters: it is plain averaging of these")]
        if not policies:
            return [
                Warn("ada_vit finds neither blocks nor hidden units to decide on in this model: it is plain averaging")
            ]
        units, sublayers = (sum(getattr(policy, kind) for policy in policies) for kind in ("units", "sublayers"))
        what = f"{units} heads and {sublayers} sublayers of blocks" if sublayers else f"{units} groups of hidden units"
        return [
            f"ada_vit decides on {what} for each sample; training computes all of them: it costs the whole model and "
            f"{sum(p.numel() for policy in policies for p in policy.parameters())} parameters more"
        ]

    def __str__(self) -> str:
        words = f"usage policies by input, heads {self.heads:g}, blocks {self.blocks:g}, weight {self.weight:g}"
        return f"{super().__str__()}, {words}"


def _has_lora(module: nn.Module) -> bool:
    return any(is_lora(part) for part in module.modules())


def _weights(axis: Axis, dim: int) -> list[Member]:
    return [member for member in axis.members if member.dim == dim and member.name.endswith("weight")]


def _reader(block: nn.Module, path: str, axis: Axis) -> tuple[Any, Member | None]:
    """Return the layer in ``block`` that reads all units of the axis: a linear one, or an attention that hides it."""
    for member in _weights(axis, 1):
        where = member.name.removeprefix(f"{path}.").rpartition(".")[0]
        around = block.get_submodule(where.rpartition(".")[0])
        if isinstance(around, nn.MultiheadAttention):  # it uses its layers' tensors and does not call them
            return around, member
        layer = block.get_submodule(where)
        if isinstance(layer, nn.Linear):
            return layer, member
    return None, None


def _width(layer: Any) -> int:
    """Return the output width of a block's last layer, equal to the block's input width."""
    return int(layer.embed_dim if isinstance(layer, nn.MultiheadAttention) else layer.weight.shape[0])


def _policies(module: nn.Module) -> Iterator[UsagePolicy]:
    return (part for part in module.modules() if isinstance(part, UsagePolicy))


# ---- while training ----


def usage_loss(policies: list[UsagePolicy], heads: float, blocks: float) -> Tensor | None:
    """Return ``sum_k (usage_k - target_k)^2`` of what was decided since `UsagePolicy.clear`; None where nothing was."""
    units = [gates[:, : policy.units].flatten() for policy in policies for gates in policy.used if policy.units]
    layers = [gates[:, policy.units :].flatten() for policy in policies for gates in policy.used if policy.sublayers]
    kinds = [(found, target) for found, target in ((units, heads), (layers, blocks)) if found]
    if not kinds:
        return None
    losses = [(torch.cat(found).mean() - target).square() for found, target in kinds]
    return torch.stack(losses).sum()


class UsageLoss(Hook):
    """Hook that adds the usage loss to the module's loss."""

    def __init__(self, task: Task, local: Adaptive) -> None:
        super().__init__(task)
        self.local, self.policies = local, list(_policies(task.module))
        must_train(task, [policy.linear.weight for policy in self.policies], "ada_vit", NAME)

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the module's loss plus the usage loss."""
        for policy in self.policies:
            policy.clear()
        loss = super().loss(batch, index)
        usage = usage_loss(self.policies, self.local.heads, self.local.blocks)
        return loss if usage is None else loss + self.local.weight * usage

    def close(self) -> None:
        """Discard the recorded decisions."""
        for policy in self.policies:
            policy.clear()


def must_train(task: Task, parameters: Iterable[Tensor], who: str, name: str) -> None:
    """Raise `BadInput` unless the task's optimiser has all of ``parameters`` that are to be trained."""
    known = {id(parameter) for group in task.optimizer.param_groups for parameter in group["params"]}
    if any(parameter.requires_grad and id(parameter) not in known for parameter in parameters):
        raise BadInput(
            f"{who} adds '{name}' to the model, but {type(task.module).__name__}.configure_optimizers leaves it out: give "
            "the optimizer all of self.parameters()"
        )
