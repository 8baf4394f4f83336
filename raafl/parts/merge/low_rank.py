"""Merge LoRA adapters of unequal rank by their products: HetLoRA, FLoRA, FlexLoRA, raFLoRA and FedEx-LoRA.

A client of rank r_i trains ``W + s B_i A_i``, where s is the adapter's scaling. The clients' average change is the mean of
B_i A_i, which is not ``mean(B_i) mean(A_i)``. Each merge here wraps the algorithm's own, a `Mean` or `Deltas`, which weights
updates and merges all other parameters; then it sets the adapters, layer by layer::

    M' = M + sum_i c_i (B_i A_i - M_i),    c_i = w_i a_i / sum_n w_n,    M = B A of the global model.

M_i is the value that update i is compared with:

- in a `Mean` (FedAvg, FedAsync), M: ranks that a client lacks count as zeros, as in the papers, and a round with a_i = 1
  ends exactly at the mean of B_i A_i; FedAsync's ``M' = (1 - a) M + a B_i A_i``.
- in `Deltas` (FedBuff), the values that the client received: of its starting version, and of its ranks only.
- if the merge changes the base W (FedEx-LoRA, FLoRA) and the update is stale, also the values that the client received: part of
  them is in W by now, and would count twice. Ranks that it lacks still count as zeros in a `Mean`. So FedAsync mixes in the
  change against the client's starting version, and does not undo later merges.

For this the server stores A and B of each version from which a client still works. Additional memory: A and B of all updates of
a merge.

Shapes: B is (out, rank), A is (rank, in), M = B A is (out, in). Sums of n factors are stacked as (out, n) and (n, in), where n
counts the ranks of all terms, so that no product of shape (out, in) is formed unless the base changes.

HetLoRA also prunes the ranks that a client does not need (Cho et al. 2024, arXiv:2401.06432). Of a client's r ranks the last
ones, from ``k = max(1, floor(share r))`` on, are held down by a loss, summed over its adapters::

    penalty * tail,    tail = sum_layers ||B[:, k:]||_F ||A[k:]||_F

If the tail is smaller after a task than it was in the values that the client received, it has k ranks from its next task on.
The server compares: the select notes the tail of what it sends, the merge the tail of what comes back.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from raafl.core.algorithm import Hook, SelectContext, Task
from raafl.core.hooks import RunHooks
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import ClientInfo, Update, Work, derive_seed
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import WrappedSelect
from raafl.submodel import Axis, Spec, Submodels
from raafl.submodel.lora import LoraPair, pairs_of

_TINY = 1e-30
"""Smallest norm for weights by norm: if all norms are 0, as before any training, the algorithm's own weights count."""

Term = tuple[Tensor, list[int], Tensor, Tensor]
"""A product that is added to M: coefficient and index of each of its ranks, B (out, ranks), A (ranks, in)."""


def pairs(submodels: Submodels) -> tuple[LoraPair, ...]:
    """Return the LoRA adapters of all linear layers, each with the names of A, B and the base weight; cached."""
    return submodels.cached("lora pairs", "", lambda: pairs_of(submodels.module)[0])


Factors = tuple[Tensor, Tensor]
"""B and A of an adapter."""

Sent = tuple[list[int], Tensor, Tensor, Factors | None]
"""A client's adapter: which ranks, its B and A, and those that it started from, None where they are the model's."""


@dataclass(slots=True)
class _AdapterUpdate:
    """Weight and staleness factor of an update, with its LoRA adapters by the name of their matrix A."""

    weight: float
    factor: float
    pairs: dict[str, Sent]


@dataclass
class LoraMemory(MergeMemory):
    """Server state of merges of LoRA adapters."""

    key = "lora"
    # by client: versions of the model from which its unanswered tasks started, two where it trains while it sends
    at_work: dict[int, list[int]] = field(default_factory=dict)
    # by version and name of A: adapters of earlier versions, kept while a client works from them
    starts: dict[int, dict[str, Factors]] = field(default_factory=dict)
    # in the order of `GlobalState.waiting`: each waiting update's adapters by the name of A
    updates: list[dict[str, Sent]] = field(default_factory=list)
    # by name of A: singular values after the latest merge
    spectra: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> LoraMemory:
        """Restore the state; earlier versions had weight and factor beside each update's pairs, and one version for a client."""
        updates = [one["pairs"] if {"weight", "pairs"} <= one.keys() else one for one in data.get("updates", [])]
        of_clients = data.get("at_work", {}).items()
        at_work = {client: own if isinstance(own, list) else [own] for client, own in of_clients}
        return super().from_plain({**data, "updates": updates, "at_work": at_work})

    def begin(self, client: int, version: int) -> None:
        """Record the version from which a client's next task starts; of its tasks before, only the last can be unanswered."""
        self.at_work[client] = [*self.at_work.get(client, [])[-1:], version]

    def end(self, client: int, version: int) -> None:
        """Forget a client's first task that started from ``version``, which is answered, and those before it."""
        own = self.at_work.pop(client, [])
        if left := own[own.index(version) + 1 :] if version in own else own:
            self.at_work[client] = left


@dataclass(frozen=True)
class LowRank(Wrapped):
    """Base class of the methods that merge LoRA adapters: a wrapped mean merges everything else."""

    inner: Mean | Deltas  # the algorithm's own merge, which averages all other tensors
    by_client: ClassVar[bool] = True
    # whether each rank's weights are normalised over the clients that have this rank
    by_rank: ClassVar[bool] = False
    # whether the merge changes the weights under the adapters, which clients must then receive
    moves_base: ClassVar[bool] = False

    @property
    def is_relative(self) -> bool:
        """Whether a late update is compared with the values that its client received, instead of the current model."""
        return self.moves_base or self.sends == "delta"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store a copy of the client's adapters, and pass the update to the wrapped mean."""
        memory = state.memory.of(LoraMemory)
        memory.end(update.client, state.version - staleness)
        selections = state.submodels.selections(state.submodels.normal(spec))
        adapters: dict[str, Sent] = {}
        starts = memory.starts[state.version - staleness] if self.is_relative and staleness else None
        for pair in pairs(state.submodels):
            if pair.a not in update.tensors or pair.b not in update.tensors:
                continue  # the submodel of this update lacks the block of the adapter, or freezes it
            runs = selections.get(pair.a, {}).get(0, ((0, len(state.values[pair.a])),))
            ranks = [rank for run in runs for rank in range(*run)]
            start = None if starts is None else _cut(starts[pair.a], ranks)
            b, a = update.tensors[pair.b], update.tensors[pair.a]
            if self.sends == "delta":
                received = start or _cut((state.values[pair.b], state.values[pair.a]), ranks)
                b, a = received[0] + b, received[1] + a
            adapters[pair.a] = (ranks, b.clone(), a.clone(), start)
        memory.updates.append(adapters)
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped mean, then set each layer's A and B by `fold`."""
        memory = state.memory.of(LoraMemory)
        adapters, updates, memory.updates = pairs(state.submodels), self._weighed(state, memory.updates), []
        old = {pair.a: (state.values[pair.b].clone(), state.values[pair.a].clone()) for pair in adapters}
        working = set(chain.from_iterable(memory.at_work.values()))
        starts = memory.starts
        if self.is_relative and state.version in working:
            starts[state.version] = old
        for version in starts.keys() - working:
            del starts[version]
        super().apply(state)
        for pair in adapters:
            with_pair = [(update, update.pairs[pair.a]) for update in updates if pair.a in update.pairs]
            if with_pair:
                self.fold(state, pair, old[pair.a], *self._terms(with_pair, len(old[pair.a][1])))

    def _weighed(self, state: GlobalState, received: Sequence[dict[str, Sent]]) -> list[_AdapterUpdate]:
        """Return the adapters of each update to be merged, with the update's weight and staleness factor."""
        weighed = []
        for item, adapters in zip(state.waiting, received, strict=True):
            weight, factor = self.inner.weigh(item.update, item.staleness)
            weighed.append(_AdapterUpdate(self.update_weight(weight, adapters), factor, adapters))
        return weighed

    def update_weight(self, weight: float, adapters: Mapping[str, Any]) -> float:
        """Return an update's weight in the mean of adapters, one for all layers; `weight_of` then adapts it to each layer."""
        return weight

    def weight_of(self, weight: float, b: Tensor, a: Tensor) -> float:
        """Return the weight of an update's adapter for one layer.

        `b`: matrix B, shape (out, rank).
        `a`: matrix A, shape (rank, in).
        """
        return weight

    def _terms(self, updates: Sequence[tuple[_AdapterUpdate, Sent]], rank: int) -> tuple[Tensor, list[Term]]:
        """Return the share of each present rank that remains after the merge, (rank,), and the products to be added."""
        # float64 on the CPU: the numbers are few, and their difference from 1 decides whether a rank vanishes exactly
        weights = torch.zeros(len(updates), rank, dtype=torch.float64)
        for row, (update, (ranks, b, a, _)) in zip(weights, updates, strict=True):
            row[ranks if self.by_rank else slice(None)] = self.weight_of(update.weight, b, a)
        factors = torch.tensor([update.factor for update, _ in updates], dtype=torch.float64)
        shares = weights * factors[:, None] / weights.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
        keep, terms = torch.ones(rank, dtype=torch.float64), list[Term]()
        for share, (_, (ranks, b, a, start)) in zip(shares, updates, strict=True):
            terms.append((share[ranks], ranks, b, a))
            if start is None:
                keep[ranks] -= share[ranks]
            else:
                terms.append((-share[ranks], ranks, *start))
            if self.sends == "values":
                share[ranks] = 0.0
                keep -= share
        return keep, terms

    @abstractmethod
    def fold(
        self, state: GlobalState, pair: LoraPair, old: tuple[Tensor, Tensor], keep: Tensor, terms: list[Term]
    ) -> None:
        """Merge the adapters of one layer: set its A, B and base weight, in place.

        `old`: B, shape (out, rank), and A, shape (rank, in), before the merge.
        `keep`: share of each rank's old values that stays in the result, from 0 to 1, shape (rank,).
        """


@dataclass(frozen=True)
class HetLoRA(LowRank):
    """HetLoRA (Cho et al. 2024, arXiv:2401.06432): averages A and B separately, weighted by the norm ``||B_i A_i||_F``.

    Matrices of lower rank are padded with zeros. The result is not exactly the mean of the products. By default the
    norm is computed for each layer and multiplies the algorithm's own weight; if all norms are 0, that weight counts
    alone. Late updates count less, as for other values. The weight of an update that is merged alone has no effect.

    Attributes:
        norm_alone: whether to weight updates only by the norm over all layers together, as the paper does; False = by
            the layer's norm and the algorithm's own weight.
        prune_share: share of its ranks that a client keeps when its ranks are pruned (`raafl.parts.merge.low_rank`); None
            = no pruning.
    """

    norm_alone: bool = False
    prune_share: float | None = None

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Decide whether the client's ranks are pruned, if pruning is on, and store its adapters."""
        if self.prune_share is not None:
            prune_if_shrunk(state, update, pairs(state.submodels), self.prune_share)
        super().receive(state, update, spec, staleness)

    def update_weight(self, weight: float, adapters: Mapping[str, Any]) -> float:
        """Return the norm of the products B A over all layers if `norm_alone` is true, else ``weight``."""
        if not self.norm_alone:
            return weight
        return math.sqrt(math.fsum(_squared_norm(b, a) for _, b, a, _ in adapters.values())) + _TINY

    def weight_of(self, weight: float, b: Tensor, a: Tensor) -> float:
        """Return the update's weight times ``||B A||_F`` of this layer; with `norm_alone` just the update's weight."""
        return weight if self.norm_alone else weight * (math.sqrt(_squared_norm(b, a)) + _TINY)

    def fold(
        self, state: GlobalState, pair: LoraPair, old: tuple[Tensor, Tensor], keep: Tensor, terms: list[Term]
    ) -> None:
        """Set the layer's A and B to the weighted means of the clients' A and B."""
        for (name, dim), before in zip(((pair.b, 1), (pair.a, 0)), old, strict=True):
            new = before.movedim(dim, 0) * keep.to(before)[:, None]
            for share, ranks, *factors in terms:
                new[ranks] += factors[dim == 0].movedim(dim, 0) * share.to(before)[:, None]
            state.values[name].copy_(new.movedim(0, dim))


class FedEx(LowRank):
    """FedEx-LoRA (Singhal et al. 2025, arXiv:2410.09432): averages A and B, and adds the error of this to the base weight.

    With M' the exact mean of the clients' products B A, and B' and A' the averaged matrices, the base weight becomes
    ``W' = W + s (M' - B' A')``. So ``W' + s B' A'`` is exact; s is the adapters' scaling. The paper sends clients this
    correction as factors. Here clients store nothing and may have missed rounds, so they receive the whole W of each
    adapted layer. A late update counts as a change from the W, B and A with which its client started.
    """

    moves_base = True

    def fold(
        self, state: GlobalState, pair: LoraPair, old: tuple[Tensor, Tensor], keep: Tensor, terms: list[Term]
    ) -> None:
        """Add to the base weight the error of averaging B and A: the mean of the products minus the product of the means."""
        left, right = _stacked(old, keep, terms)
        _add_to_base(state, pair, left @ right - state.values[pair.b].to(left) @ state.values[pair.a].to(left))


class FLoRA(LowRank):
    """FLoRA (Wang et al. 2024, arXiv:2409.05976): adds the weighted products of all clients' adapters to the base weight.

    With c_i the weight of client i, the sum is a product of stacked matrices: ``sum_i c_i B_i A_i = [c_i B_i ...]
    [A_i; ...]``. Clients then start with new adapters, B = 0 and a random A. Since B starts at 0, ``B_i A_i`` is a
    client's whole change, so a late one is added to the current base weight W like any other. The paper sends the
    stacked matrices to clients that store W; here a client receives the whole W of each adapted layer.
    """

    moves_base = True

    def fold(
        self, state: GlobalState, pair: LoraPair, old: tuple[Tensor, Tensor], keep: Tensor, terms: list[Term]
    ) -> None:
        """Add the clients' products B A to the layer's base weight, and reset the adapter to B = 0 and a new random A."""
        left, right = _stacked(old, keep, terms)
        _add_to_base(state, pair, left @ right)
        state.memory.of(LoraMemory).spectra[pair.a] = (_svd(left, right)[1] * pair.scaling).tolist()
        a = state.values[pair.a]
        generator = torch.Generator().manual_seed(derive_seed("flora", state.version, pair.a))
        a.copy_(torch.empty(a.shape).uniform_(-1.0, 1.0, generator=generator) / math.sqrt(a.shape[1]))
        state.values[pair.b].zero_()


class FlexLoRA(LowRank):
    """FlexLoRA (Bai et al. 2024, arXiv:2402.11505): averages the products B A, and splits the mean into B and A again by SVD.

    With the mean M' = U S V^T, ``B' = U S`` and ``A' = V^T``, truncated to the model's rank, largest singular values
    first. So the first ranks, which a client of lower rank receives, are the best approximation of that rank. A rank
    whose singular value is 0 keeps a nonzero A, so that it can train. The base weight stays. With FedAsync, client i's
    update gives ``M' = (1 - a) M + a B_i A_i``: M is the model's product B A, and a falls with the update's staleness.
    """

    def fold(
        self, state: GlobalState, pair: LoraPair, old: tuple[Tensor, Tensor], keep: Tensor, terms: list[Term]
    ) -> None:
        """Set B and A to the factors of the mean product's SVD, truncated to the model's rank."""
        u, s, v = _svd(*_stacked(old, keep, terms))
        a, b = state.values[pair.a], state.values[pair.b]
        num = min(len(a), len(s))
        b.zero_()[:, :num].copy_(u[:, :num] * s[:num])
        a[:num].copy_(v[:num])


class RaFLoRA(FlexLoRA):
    """raFLoRA (Wu et al. 2026, arXiv:2602.13486): FlexLoRA in which each rank is averaged only over the clients that have it.

    ``M' = M + sum_k sum_{i has k} w_i s_i / (sum_{j has k} w_j) (M_ik - M_k)``: M = B A of the model, M_k is rank k's
    part of it, M_ik that of client i's product, w_i the client's weight, s_i its staleness factor. Few clients have the
    upper ranks, and FlexLoRA's weights would shrink these in every merge ("rank collapse"). A rank that no client has
    stays unchanged.
    """

    by_rank = True


class RankEnergy(RunHooks):
    """Observer that adds the energy of the global adapters' ranks to the metrics of each version."""

    def __init__(self, run: Any) -> None:
        """Take the run as an argument, as every observer must; it is not used."""

    def figures(self, state: GlobalState) -> dict[str, float]:
        """Return the shares of the energy; see `rank_energy`."""
        return rank_energy(state)


def rank_energy(state: GlobalState) -> dict[str, float]:
    """Return the share of the global adapters' energy (squared singular values of the scaled B A) in each range of ranks.

    Returns:
        share of the energy by range of ranks: ``rank_energy/1``, ``2``, ``3-4``, ``5-8`` and so on up to the model's
            rank. All are 0 while B is 0; there are none for a model without adapters. For FLoRA, whose merges reset the
            adapters, the shares are those of the latest merged sum; its rank may be higher, so that they add up to less
            than 1.
    """
    adapters, spectra = pairs(state.submodels), state.memory.of(LoraMemory).spectra
    if not adapters:
        return {}
    squares = []
    for pair in adapters:
        b, a = state.values[pair.b], state.values[pair.a]
        values = spectra.get(pair.a) or (_svd(*_stacked((b, a), torch.ones(len(a)), []))[1] * pair.scaling).tolist()
        squares.append([value**2 for value in values])
    total, most = math.fsum(map(math.fsum, squares)), max(len(state.values[pair.a]) for pair in adapters)
    shares, start = {}, 0
    while start < most:
        stop = min(max(2 * start, 1), most)
        name = f"{stop}" if stop == start + 1 else f"{start + 1}-{stop}"
        shares[f"rank_energy/{name}"] = math.fsum(v for of_adapter in squares for v in of_adapter[start:stop]) / (
            total or 1.0
        )
        start = stop
    return shares


def _squared_norm(b: Tensor, a: Tensor) -> float:
    """Return ``||B A||_F^2`` as ``sum (B^T B) * (A A^T)``, whose matrices have the size rank x rank."""
    return max(((b.double().T @ b.double()) * (a.double() @ a.double().T)).sum().item(), 0.0)


def _cut(factors: Sequence[Tensor], ranks: list[int]) -> tuple[Tensor, Tensor]:
    return factors[0][:, ranks], factors[1][ranks]


def _stacked(old: tuple[Tensor, Tensor], keep: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Return the merged matrix as a product of (out, n) and (n, in), in single precision or wider."""
    b, a = old
    dtype = torch.promote_types(b.dtype, torch.float32)
    left = [b.to(dtype) * keep.to(b.device, dtype), *(b.to(dtype) * c.to(b.device, dtype) for c, _, b, _ in terms)]
    return torch.cat(left, 1), torch.cat([a, *(a for *_, a in terms)]).to(dtype)


def _svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V^T of the product of (out, n) and (n, in), which is never formed, as n is small."""
    (q, r), (p, t) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    core = r @ t.T
    # LAPACK raises or never returns on such input: a diverged model becomes NaN instead, which the run detects
    if not core.isfinite().all():
        return q * math.nan, core.diagonal() * math.nan, p.T * math.nan
    u, s, v = torch.linalg.svd(core, full_matrices=False)
    return q @ u, s, v @ p.T


def _add_to_base(state: GlobalState, pair: LoraPair, product: Tensor) -> None:
    state.values[pair.base].add_((product.T if pair.transposed else product) * pair.scaling)


@dataclass
class RankMemory(MergeMemory):
    """Record of the clients whose LoRA ranks were pruned."""

    key = "lora ranks"
    # by client: how often its ranks were pruned
    pruned: dict[int, int] = field(default_factory=dict)
    # by client: norm of the ranks to be pruned next, in the values that it received
    tails: dict[int, float] = field(default_factory=dict)


def kept(num_ranks: int, share: float) -> int:
    """Return the number k of ranks that remain when a client's ranks are pruned once."""
    return max(1, int(share * num_ranks))


def tail(adapters: Iterable[tuple[Tensor, Tensor]], share: float) -> Tensor:
    """Return the size of the ranks that pruning would remove: the sum over layers of ``||B[:, k:]|| ||A[k:]||``, a scalar.

    Pruning keeps the first k ranks of a layer (`kept`).
    """
    norms = []
    for b, a in adapters:
        k = kept(len(a), share)
        if k < len(a):
            norms.append(torch.linalg.vector_norm(b[:, k:]) * torch.linalg.vector_norm(a[k:]))
    return torch.stack(norms).sum() if norms else torch.zeros(())


class Penalised(Hook):
    """Hook that adds to the loss a penalty on the last LoRA ranks, which shrinks them until they can be pruned."""

    def __init__(self, task: Task, share: float, penalty: float) -> None:
        """Find the adapters of the task's module, on whose last ranks the loss puts a penalty."""
        super().__init__(task)
        self._share, self._penalty = share, penalty
        module = task.module
        self._adapters = [(module.get_parameter(p.b), module.get_parameter(p.a)) for p in pairs_of(module)[0]]

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the module's loss plus the penalty on the last LoRA ranks."""
        return super().loss(batch, index) + self._penalty * tail(self._adapters, self._share)


@dataclass(frozen=True)
class PrunedRanks(WrappedSelect):
    """Wrapper of a select part (choice of submodels) that gives a client only the first LoRA ranks, fewer after each pruning."""

    adapters: Callable[[Submodels], tuple[LoraPair, ...]]  # function that finds the LoRA adapters of a model
    share: float  # share of its ranks that a client keeps in each pruning

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped selector's work on the ranks that the client still has; record the norm of those pruned next."""
        work, state = super().__call__(client, fleet), fleet.state
        memory = state.memory.of(RankMemory)
        chosen, sent = dict(work.spec.kept), []
        # of a window of blocks only these come back, and with them alone the tail can be compared
        trained = state.submodels.layout(work.spec, "trained").by_name if fleet.rules.counts_trained_ranks else None
        for pair in self.adapters(state.submodels):
            name = _axis_of(pair, state)
            if name is None:
                continue
            ranks = list(chosen.get(name) or range(len(state.values[pair.a])))
            for _ in range(memory.pruned.get(client.id, 0)):
                ranks = ranks[: kept(len(ranks), self.share)]
            if len(ranks) < len(state.values[pair.a]):
                chosen[name] = tuple(ranks)
            if trained is None or (pair.a in trained and pair.b in trained):
                sent.append((state.values[pair.b][:, ranks], state.values[pair.a][ranks]))
        memory.tails[client.id] = float(tail(sent, self.share))
        return replace(work, spec=replace(work.spec, kept=tuple(chosen.items())))

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of pruning for this client id, since a newly joined client may have other data."""
        fleet.state.memory.of(RankMemory).pruned.pop(client.id, None)
        super().on_join(client, fleet)


def _axis_of(pair: LoraPair, state: GlobalState) -> str | None:
    """Return the name of the axis of an adapter's ranks; None if there is none."""
    for name, axis in state.submodels.axes.items():
        if isinstance(axis, Axis) and any(member.name == pair.a and member.dim == 0 for member in axis.members):
            return name
    return None


def prune_if_shrunk(state: GlobalState, update: Update, pairs: Iterable[LoraPair], share: float) -> None:
    """Let a client have fewer LoRA ranks from its next task on if training has shrunk its last ranks (`tail`)."""
    memory = state.memory.of(RankMemory)
    if update.client not in memory.tails:
        return
    own = [(update.tensors[p.b], update.tensors[p.a]) for p in pairs if p.a in update.tensors and p.b in update.tensors]
    if float(tail(own, share)) < memory.tails.pop(update.client):
        memory.pruned[update.client] = memory.pruned.get(update.client, 0) + 1
