"""Add federated LoRA to an algorithm: one of the published ways to merge adapters, and what clients do for it.

`with_lora` implements the option ``lora`` of FedAvg, FedBuff and FedAsync. Six methods merge products B A
(`raafl.parts.merge.low_rank`). Two others train one factor at a time, so that the mean of the factor gives the mean of the
products, and need no merge of their own:

- ``ffa``: FFA-LoRA (Sun et al. 2024, arXiv:2403.12313). A keeps its initial values and is never sent; ``sum_i c_i B_i A_i`` is
  exact. By coverage each rank is the mean over the clients that have it. Since A is the same in all versions, a stale B
  keeps its meaning.
- ``rolora``: RoLoRA (Chen et al. 2025, arXiv:2502.01755). B trains from even versions, A from odd ones; in rounds all
  clients share the other factor, and the mean is exact. Asynchronously it is block coordinate descent with stale blocks: a B
  trained with an older A is mixed in by its staleness, together with the new A, and is no longer exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from raafl.core.algorithm import Algorithm, Hook, Local, Select, SelectContext, Task
from raafl.core.local import Traits
from raafl.core.types import ClientInfo, Work
from raafl.errors import BadInput, nearest, refuse_unused
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.low_rank import (
    FedEx,
    FlexLoRA,
    FLoRA,
    HetLoRA,
    LoraMemory,
    LowRank,
    Penalised,
    PrunedRanks,
    RaFLoRA,
    pairs,
)
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import WrappedSelect
from raafl.submodel.lora import LoraPair, pairs_of

LoRAMerge = Literal["hetlora", "hetlora_paper", "flora", "flexlora", "raflora", "fedex", "ffa", "rolora"]
"""Names of the methods that merge adapters."""

MERGES: dict[str, type[LowRank]] = {
    "hetlora": HetLoRA,
    "hetlora_paper": HetLoRA,
    "flora": FLoRA,
    "flexlora": FlexLoRA,
    "raflora": RaFLoRA,
    "fedex": FedEx,
}


def with_lora(
    algorithm: Algorithm, lora: LoRAMerge | None, prune_share: float | None = None, prune_penalty: float = 0.0
) -> Algorithm:
    """Return ``algorithm`` with a published method for merging LoRA adapters.

    `lora`: name of the method; None = average the matrices A and B separately, rank by rank.
    `prune_share`: share of its ranks that a client keeps when its ranks are pruned (`raafl.parts.merge.low_rank`), for
    hetlora; None = no pruning.

    Raises:
        BadInput: ``lora`` is unknown, or the algorithm's merge is not a mean; or ranks are to be pruned by a method
            other than hetlora.
    """
    _check_pruning(lora, prune_share, prune_penalty)
    if lora is None:
        return algorithm
    if lora not in get_args(LoRAMerge):
        raise BadInput(f"lora is '{lora}': {nearest(lora, get_args(LoRAMerge))}")
    old, merge, select = algorithm.local, algorithm.merge, algorithm.select
    local = Adapted(lora, prox=old.prox, rescale=old.rescale, masked=old.masked)
    if lora in MERGES:
        if not isinstance(merge, Mean | Deltas):
            raise BadInput(
                f"lora is '{lora}', which merges products B A by weighted means, but the server's optimizer steps A "
                "and B separately: leave server_optimizer out, or use ffa or rolora"
            )
        merge = MERGES[lora](merge)
        if isinstance(merge, HetLoRA):
            merge = replace(merge, norm_alone=lora == "hetlora_paper", prune_share=prune_share)
        if prune_share is not None:
            local = PrunedAdapted(
                lora, prune_share, prune_penalty, prox=old.prox, rescale=old.rescale, masked=old.masked
            )
            select = PrunedRanks(select, pairs, prune_share)
        select = Starting(select) if merge.is_relative else select
    elif lora == "rolora":
        select = Alternating(select)
    return replace(algorithm, local=local, merge=merge, select=select)


def _check_pruning(lora: str | None, share: float | None, penalty: float) -> None:
    if share is None:
        refuse_unused("prune_ranks is not given", prune_penalty=(penalty, 0.0))
        return
    if lora not in ("hetlora", "hetlora_paper"):
        raise BadInput(
            f"prune_ranks is {share}, but lora is {lora!r}: give lora hetlora or hetlora_paper, which prune ranks"
        )
    if not 0 < share < 1:
        raise BadInput(f"prune_ranks is {share}: give the share of its ranks that a client keeps, above 0 and below 1")
    if not 0 <= penalty < math.inf:
        raise BadInput(f"prune_penalty is {penalty}: give a weight of 0 or more")


@dataclass(frozen=True)
class Adapted(Local):
    """Local training of LoRA adapters."""

    lora: LoRAMerge  # name of the method that merges the adapters

    def prepare(self, module: Any) -> Any:
        """Prepare the model in place: freeze A for the method "ffa", and mark base weights that the merge changes.

        Raises:
            BadInput: the model has no adapters, has adapters on layers that are not linear, or its base weights cannot
                change.
        """
        module = super().prepare(module)
        adapters, others = pairs_of(module)
        if others:
            raise BadInput(
                f"lora is '{self.lora}', which merges plain adapters of linear layers, but '{others[0]}' has "
                "another kind of adapter: leave it out of target_modules, or leave lora out of the algorithm"
            )
        if not adapters:
            raise BadInput(
                f"lora is '{self.lora}', but the model has no LoRA layers: give it some (model.lora), or leave lora "
                "out of the algorithm"
            )
        names = [name for pair in adapters for name in (pair.a, pair.b)]
        if self.lora in MERGES and any(module.get_parameter(name).is_complex() for name in names):
            raise BadInput(
                f"lora is '{self.lora}', which needs real numbers, but the adapter '{names[0]}' is complex: leave lora "
                "out of the algorithm"
            )
        if self.lora == "ffa":
            for pair in adapters:
                module.get_parameter(pair.a).requires_grad_(False)
        elif self.lora in MERGES and MERGES[self.lora].moves_base:
            if bases := getattr(module, "submodel_bases", ()):
                raise BadInput(
                    f"lora is '{self.lora}', which changes the base weights, but clients have these in several "
                    f"precisions, {', '.join(bases)}: use flexlora or raflora, or give the base one precision"
                )
            for pair in adapters:
                _check_base(module, pair, self.lora)
            module.submodel_sent = frozenset(pair.base for pair in adapters)
        return module

    def __str__(self) -> str:
        return super().__str__() + (", A frozen" if self.lora == "ffa" else "")


@dataclass(frozen=True)
class PrunedAdapted(Adapted):
    """Local training of LoRA adapters with a loss that shrinks the ranks to be pruned."""

    share: float = 1.0  # share of the ranks that pruning would keep, and that the loss does not penalise
    penalty: float = 0.0  # weight of the penalty on all other ranks

    @property
    def traits(self) -> Traits:
        """Abilities and needs of this local training; see `Traits`."""
        return replace(super().traits, captures=())

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds to the loss a penalty on the ranks to be pruned."""
        return Penalised(task, self.share, self.penalty)


def _check_base(module: nn.Module, pair: LoraPair, lora: str) -> None:
    """Raise `BadInput` unless ``B A`` can be added to the weight under an adapter: it must be floating-point and unshared."""
    base = module.get_parameter(pair.base)
    shape = [module.get_parameter(pair.b).shape[0], module.get_parameter(pair.a).shape[1]]
    if not base.is_floating_point() or list(base.shape) != (shape[::-1] if pair.transposed else shape):
        raise BadInput(
            f"lora is '{lora}', which changes the weight '{pair.base}', but that is quantised ({base.dtype}): use flexlora or "
            "raflora, or load the model in bf16"
        )
    if sum(base is other for _, other in module.named_parameters(remove_duplicate=False)) > 1:
        raise BadInput(
            f"lora is '{lora}', which changes the weight '{pair.base}', but another layer shares that weight: use flexlora or "
            "raflora, or leave this layer out of target_modules"
        )


@dataclass(frozen=True)
class Starting(WrappedSelect):
    """Wrapper of a select part (choice of submodels) that records from which version of the model each client starts."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped selector's work, and record the version of the model from which the client starts."""
        work = super().__call__(client, fleet)
        fleet.state.memory.of(LoraMemory).begin(client.id, fleet.state.version)
        return work

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the recorded starting version of the lost client."""
        fleet.state.memory.of(LoraMemory).at_work.pop(client.id, None)
        super().on_loss(client, fleet)


@dataclass(frozen=True)
class Alternating(WrappedSelect):
    """Wrapper of a select part (choice of submodels): only B trains in even versions of the model, only A in odd ones."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped selector's work with A or B of each adapter frozen, in turn by version."""
        work, submodels = super().__call__(client, fleet), fleet.state.submodels
        frozen = {pair.b if fleet.state.version % 2 else pair.a for pair in pairs(submodels)}
        names = (entry.name for entry in submodels.layout(work.spec, "trained").entries)
        trained = tuple(name for name in names if name in submodels.parameter_names and name not in frozen)
        return replace(work, spec=replace(work.spec, trained=trained))

    def below(self) -> Select:
        """Return what the wrapped part returns, since clients train the factors that were sent; see `Select.below`."""
        return self.inner.below()

    def __str__(self) -> str:
        return f"{super().__str__()}, of adapters B or A in turn"
