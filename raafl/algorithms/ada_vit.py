"""AdaViT (Meng et al., "AdaViT: Adaptive Vision Transformers for Efficient Image Recognition", CVPR 2022).

Co-S2P compares with AdaViT trained on each client under FedAvg. Each block has a decision head, a linear layer on the class
token of its input, ``m = W Z``, which decides for each image which heads and which of the two sublayers (attention, feed-forward
part) to use. During training decisions are drawn by Gumbel-softmax, hard in the forward pass and soft in the backward pass; in
evaluation a part is used if ``m > 0``. The decision heads are trained with the model, by the task's loss and

    L_usage = (1/D_h sum M^h - gamma_h)^2 + (1/D_b sum M^b - gamma_b)^2,

which compares the usage of all heads (D_h) and sublayers (D_b) in a batch with the targets ``heads`` and ``blocks``. A part that
is not used adds nothing: a head's output is 0 before the layer that joins heads, a sublayer's 0 before the residual addition.

Here the decision heads are parameters of the model that are sent and averaged like the rest.

Choices that the paper leaves open, and deviations from it:
- The paper's third policy, over patches, is left out: layers would have to run on different patches for each image.
- The pretrained start, distillation from it, and the code's entropy and diversity terms are left out.
- At the start gates are open as often as the targets say.
- No computation is saved: everything is computed and multiplied by 0 or 1, in training and in evaluation. A client's cost is
  that of the whole model and the decision heads.
- torch's own attention (`nn.MultiheadAttention`) exposes no heads to a hook: in it only sublayers are decided on.
- In other models the first position of the input takes the place of the class token. Without blocks, heads are groups of
  units (or channels) of each hidden layer that exactly one other layer reads, decided on by the layer's input, averaged over
  pixels for images. A model with neither is trained plainly, and so is one with LoRA adapters, whose only axes are ranks; a
  warning says so.
- The loss reported during training includes the usage loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    Full,
    Hook,
    Local,
    Mean,
    Sample,
    Submodels,
    Task,
    fraction,
    positive,
)
from raafl.core.types import Warn
from raafl.submodel import Axis, Member
from raafl.submodel.lora import is_lora


def ada_vit(
    heads: float = 0.7,
    blocks: float = 0.7,
    weight: float = 2.0,
    temperature: float = 5.0,
    units: int = 8,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return AdaViT, trained by FedAvg: the model learns which attention heads and sublayers each image needs.

    Args:
        heads: target share of the attention heads that an image uses (gamma_h), in (0, 1].
        blocks: target share of the sublayers that an image uses (gamma_b), in (0, 1].
        weight: weight of the loss that pulls the used shares to their targets.
        temperature: temperature of Gumbel-softmax, by which heads and sublayers are drawn in training.
        units: largest number of groups into which the neurons of a hidden layer are divided, in a model without
            transformer blocks; a group is used or skipped as a whole.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    return Algorithm(
        name="ada_vit",
        paper="Meng et al. 2022",
        sample=Sample(cohort, concurrency),
        select=Full(),
        local=Adaptive(heads, blocks, weight, temperature, units),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )


# Decide for each input which heads, sublayers and units to use (AdaViT, Meng et al. 2022).
#
# `Adaptive.prepare` adds small decision heads to a model, which are parameters like any other. A policy is a submodule, named
# ``usage_policy``, of the module whose input it reads. It acts through forward hooks: outputs that it switches off are computed,
# and multiplied by 0.

NAME = "usage_policy"
_SURE = 0.99
"""Largest initial probability of an open gate: at 1 its logit would be infinite."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class UsagePolicy(nn.Module):
    """Small policy network: a linear layer that decides which units and sublayers each sample uses.

    Each output is a gate, 0 or 1, that multiplies a unit or a sublayer. Training draws the gates by Gumbel-softmax and
    uses the gradient of the soft gates (straight-through). Evaluation opens a gate if its logit is above 0.

    Attributes:
        gates: gates of the last input, shape (batch, units + sublayers), 0 or 1; None before the first input.
        used: gates of all training inputs since the last call of `clear`.
    """

    is_beside_axes = True

    def __init__(
        self,
        width: int,
        units: int,
        sublayers: int,
        targets: tuple[float, float],
        temperature: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialise the gates to the target usage.

        Args:
            width: features of the input.
            units: number of gates for heads or groups of units; these come first.
            sublayers: number of gates for sublayers.
            targets: target usage of units and of sublayers, each in (0, 1].
            temperature: temperature of Gumbel-softmax.
            dtype: dtype of the layer; None = torch's default.
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
        """Compute the gates (0 or 1 for each unit and sublayer) of ``features``, shape (batch, width), in the same dtype."""
        # float32: in half precision the noise and the sigmoid would round a gate's gradient to 0
        logits = self.linear(features).float()
        if self.training:
            uniform = torch.rand_like(logits).clamp_(1e-7, 1 - 1e-7)
            noise = uniform.log() - (-uniform).log1p()  # logistic noise: the difference of two Gumbel variables
            soft = torch.sigmoid((logits + noise) / self.temperature)
            # straight-through: the forward pass uses the hard gate, the backward pass the gradient of the soft gate
            gates = (soft > 0.5).float() + (soft - soft.detach())
            self.used.append(gates)
        else:
            gates = (logits > 0).float()
        self.gates = gates.to(features.dtype)
        return self.gates

    def clear(self) -> None:
        """Delete the gates that training has recorded."""
        self.gates, self.used = None, []

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recorded gates out of copies, since their autograd graph cannot be copied."""
        return {**self.__dict__, "gates": None, "used": []}

    def gate_for(self, gate: int, x: Tensor, batch_dim: int) -> Tensor:
        """Return one gate (1 = used, 0 = not) for each sample of the last input, in a shape that broadcasts over ``x``.

        Args:
            gate: index of the gate.
            x: output of the gated layer.
            batch_dim: dimension of the batch in ``x``.
        """
        gates = self._known(x, batch_dim)[:, gate]
        return gates.to(x.dtype).view([len(gates) if dim == batch_dim else 1 for dim in range(x.dim())])

    def unit_gates(self, x: Tensor, batch_dim: int, dim: int) -> Tensor:
        """Return the gates (1 = used, 0 = not) of all heads or groups of neurons, in a shape that broadcasts over ``x``.

        If a unit has several elements in ``x``, each of them gets the unit's gate. In a submodel whose elements are no
        multiple of the gates, elements share the gates as evenly as they can.

        Args:
            x: activations that contain the units' outputs.
            batch_dim: dimension of the batch in ``x``.
            dim: dimension of ``x`` along which the units lie, each with equally many consecutive elements.
        """
        gates, dim = self._known(x, batch_dim)[:, : self.units], dim % x.dim()
        times, rest = divmod(x.shape[dim], self.units)
        if rest:
            gates = gates.index_select(1, torch.arange(x.shape[dim], device=gates.device) * self.units // x.shape[dim])
        else:
            gates = gates.repeat_interleave(times, 1)
        gates = gates.to(x.dtype)
        return gates.view([x.shape[i] if i in (batch_dim, dim) else 1 for i in range(x.dim())])

    def _known(self, x: Tensor, batch_dim: int) -> Tensor:
        if self.gates is None or x.shape[batch_dim] != len(self.gates):
            raise BadInput(
                f"ada_vit: a layer of shape {tuple(x.shape)} does not have the batch size that the policy network of its block "
                "has seen, probably since the model reshapes batches inside the block: use another algorithm"
            )
        return self.gates


# Hooks are objects, not closures, so that in a copied model (deepcopy) they refer to the copy's policy.


@dataclass
class _Decide:
    is_beside_axes: ClassVar = True  # the search for axes ignores gates, since a gate belongs to no axis
    policy: UsagePolicy
    features: Callable[[Tensor], Tensor]

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.policy(self.features(x))


@dataclass
class _GateUnits:
    is_beside_axes: ClassVar = True  # the search for axes ignores gates, since a gate belongs to no axis
    policy: UsagePolicy
    batch_dim: int
    dim: int

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...]) -> object:
        return (args[0] * self.policy.unit_gates(args[0], self.batch_dim, self.dim), *args[1:])


@dataclass
class _GateSublayer:
    is_beside_axes: ClassVar = True  # the search for axes ignores gates, since a gate belongs to no axis
    policy: UsagePolicy
    gate: int
    batch_dim: int

    def __call__(self, layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        x = output[0] if isinstance(output, tuple) else output
        gated = x * self.policy.gate_for(self.gate, x, self.batch_dim)
        return (gated, *output[1:]) if isinstance(output, tuple) else gated


def _first_position(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[:, 0]


def _first_position_last(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[0]


def _mean_pixel(x: Tensor) -> Tensor:
    return x.flatten(2).mean(2)


# ---- add policies to a model ----


@dataclass(frozen=True)
class Adaptive(Local):
    """Local training with policy networks, which choose the heads and sublayers that each sample uses.

    A term is added to the module's loss: ``weight * sum_k (usage_k - target_k)^2``. It pulls the used share of each
    kind k, heads (or units) and blocks, to its target. usage_k is the share in use, averaged over samples and blocks.

    Attributes:
        heads: target share of the heads in use or, in a model without attention, of groups of units.
        blocks: target share of the sublayers in use (attention and feed-forward parts of blocks).
        weight: weight of the added term.
        temperature: temperature of Gumbel-softmax.
        units: largest number of groups of units in a layer outside of blocks.
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

    def prepare(self, module: nn.Module) -> nn.Module:
        """Add to each transformer block a policy network, which decides what each sample uses.

        In a model without blocks, add one to each linear or convolutional layer whose output goes to one other layer only.

        A model with LoRA adapters is returned unchanged.
        """
        if _has_lora(module):  # LoRA's only axes are ranks, and gates need axes of heads or hidden units
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
        gated = [(axis, layer, member) for axis, layer, member in readers if layer is not None and member is not None]
        if not gated:
            return
        # the first attention layer that calls a linear output layer gets a gate for each head; other attentions get one
        # gate each
        exposed = next((axis for axis, layer, _ in gated if axis not in ffn and isinstance(layer, nn.Linear)), None)
        heads = 0 if exposed is None else exposed.size
        inner = [layer for _, layer, _ in gated if isinstance(layer, nn.MultiheadAttention)]
        batch_dim = 0 if all(layer.batch_first for layer in inner) else 1
        policy = self._policy(block, _width(gated[-1][1]), heads, len(gated))
        features = _first_position if batch_dim == 0 else _first_position_last
        block.register_forward_pre_hook(_Decide(policy, features), with_kwargs=True)
        for number, (axis, layer, _) in enumerate(gated):
            layer.register_forward_hook(_GateSublayer(policy, heads + number, batch_dim))
            if axis is exposed:
                layer.register_forward_pre_hook(_GateUnits(policy, batch_dim, -1))

    def _gate_units(self, module: nn.Module, axis: Axis) -> None:
        makers: list[Any] = [module.get_submodule(m.name.rpartition(".")[0]) for m in _weights(axis, 0)]
        makers = [layer for layer in makers if isinstance(layer, (nn.Linear, *_CONVOLUTIONS))]
        readers = [(module.get_submodule(m.name.rpartition(".")[0]), m) for m in _weights(axis, 1)]
        if len(makers) != 1 or len(readers) != 1 or axis.size < 2 or NAME in makers[0]._modules:
            return
        (maker,), ((reader, _),) = makers, readers
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
            raise BadInput(
                f"{type(host).__name__} has an attribute '{NAME}', the name of the module that ada_vit adds: rename your attribute"
            )
        dtypes = [parameter.dtype for parameter in host.parameters()]
        if any(dtype.is_complex for dtype in dtypes):
            raise BadInput(
                f"{type(host).__name__} has complex weights, but ada_vit works with real ones only: use another algorithm"
            )
        floating = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
        policy = UsagePolicy(width, units, sublayers, (self.heads, self.blocks), self.temperature, floating)
        host.add_module(NAME, policy)
        return policy

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds a loss term, which pulls the used share of heads and of sublayers to its target."""
        return _UsageLoss(task, self)

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a message for the user: how many heads, sublayers or groups of units can be skipped, or that none can."""
        policies = list(_policies(submodels.module))
        if _has_lora(submodels.module):
            return [Warn("ada_vit has no effect in a model with LoRA adapters, which are averaged as usual")]
        if not policies:
            return [
                Warn("ada_vit finds neither blocks nor hidden units to choose among in this model: it has no effect")
            ]
        units, sublayers = (sum(getattr(policy, kind) for policy in policies) for kind in ("units", "sublayers"))
        what = f"{units} heads and {sublayers} sublayers of blocks" if sublayers else f"{units} groups of hidden units"
        return [
            f"ada_vit chooses among {what} for each sample, but training computes all of them: it costs as much as "
            f"the whole model, and {sum(p.numel() for policy in policies for p in policy.parameters())} more "
            "parameters"
        ]

    def __str__(self) -> str:
        words = f"usage policies by input, heads {self.heads:g}, blocks {self.blocks:g}, weight {self.weight:g}"
        return f"{super().__str__()}, {words}"


def _has_lora(module: nn.Module) -> bool:
    return any(is_lora(part) for part in module.modules())


def _weights(axis: Axis, dim: int) -> list[Member]:
    return [member for member in axis.members if member.dim == dim and member.name.endswith("weight")]


def _reader(block: nn.Module, path: str, axis: Axis) -> tuple[Any, Member | None]:
    """Return the layer in ``block`` that takes all units of ``axis`` as inputs, and its weight; (None, None) if there is none.

    The layer is a `nn.Linear`, or an `nn.MultiheadAttention` whose output projection takes the units as inputs.
    """
    for member in _weights(axis, 1):
        where = member.name.removeprefix(f"{path}.").rpartition(".")[0]
        around = block.get_submodule(where.rpartition(".")[0])
        # nn.MultiheadAttention reads its output layer's weight without calling the layer, so a hook on the layer would
        # never run
        if isinstance(around, nn.MultiheadAttention):
            return around, member
        layer = block.get_submodule(where)
        if isinstance(layer, nn.Linear):
            return layer, member
    return None, None


def _width(layer: Any) -> int:
    """Return the number of output features of a block's last layer, which is also the block's number of input features."""
    return int(layer.embed_dim if isinstance(layer, nn.MultiheadAttention) else layer.weight.shape[0])


def _policies(module: nn.Module) -> Iterator[UsagePolicy]:
    return (part for part in module.modules() if isinstance(part, UsagePolicy))


# ---- train the policies ----


def usage_loss(policies: list[UsagePolicy], heads: float, blocks: float) -> Tensor | None:
    """Return the penalty for using more or fewer heads and sublayers than intended; None if no gate was recorded.

    It is the sum of the squared differences between used and target share, over the gates of one training step.

    Args:
        policies: all policies of the model.
        heads: target share of the heads, or of the groups of units, in use.
        blocks: target share of the sublayers in use.
    """
    units = [gates[:, : policy.units].flatten() for policy in policies for gates in policy.used if policy.units]
    layers = [gates[:, policy.units :].flatten() for policy in policies for gates in policy.used if policy.sublayers]
    kinds = [(gates, target) for gates, target in ((units, heads), (layers, blocks)) if gates]
    if not kinds:
        return None
    losses = [(torch.cat(gates).mean() - target).square() for gates, target in kinds]
    return torch.stack(losses).sum()


class _UsageLoss(Hook):
    """Training hook that adds AdaViT's usage loss, a penalty on the distance from the target shares of heads and sublayers."""

    def __init__(self, task: Task, local: Adaptive) -> None:
        super().__init__(task)
        self.local, self.policies = local, list(_policies(task.module))
        must_train(task, [policy.linear.weight for policy in self.policies], "ada_vit", NAME)

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the module's loss plus the penalty for using more or fewer heads and sublayers than the targets."""
        for policy in self.policies:
            policy.clear()
        loss = super().loss(batch, index)
        usage = usage_loss(self.policies, self.local.heads, self.local.blocks)
        return loss if usage is None else loss + self.local.weight * usage

    def close(self) -> None:
        """Delete the gate values that this task has recorded."""
        for policy in self.policies:
            policy.clear()


def must_train(task: Task, parameters: Iterable[Tensor], who: str, name: str) -> None:
    """Raise an error unless the task's optimizer updates all trainable ones among the given ``parameters``.

    Args:
        task: task whose optimizer is checked.
        parameters: parameters that the method has added to the model.
        who: name of the method, shown in the error.
        name: name of the added part, shown in the error.

    Raises:
        BadInput: the module's ``configure_optimizers`` leaves out one of the parameters.
    """
    optimized = {id(parameter) for group in task.optimizer.param_groups for parameter in group["params"]}
    if any(parameter.requires_grad and id(parameter) not in optimized for parameter in parameters):
        raise BadInput(
            f"{who} adds '{name}' to the model, but {type(task.module).__name__}.configure_optimizers leaves it out: give "
            "the optimizer all of self.parameters()"
        )
