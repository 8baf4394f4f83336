"""SplitFed V1 (Thapa et al., "SplitFed: When Federated Learning Meets Split Learning", AAAI 2022).

The model is cut in two: ``W = [W^C ; W^S]``. In each round every client k trains its copy ``W^C_k`` of the lower part, and the
main server trains, for every client separately and in parallel, a copy ``W^S_k`` of the upper part. For each batch
(Algorithms 1, 2)

1. the client computes the activation ``A_k = f(W^C_k, X_k)`` and sends it with the labels ``Y_k``;
2. the server computes the loss and the gradients of ``W^S_k`` and ``A_k``, and sends the latter, ``dA_k``, back;
3. the client computes the gradients of ``W^C_k`` from ``dA_k``. Each side makes its own optimizer's step.

At the end of the round the fed server averages the ``W^C_k``, the main server the ``W^S_k``, both weighted by ``n_k / n``. That is
FedAvg of the whole model on the same batches, bit for bit if training draws no random numbers. The work is placed differently:
the client's memory, computation and transferred parameters are those of its part, and every sample's activation and its gradient
are transferred as well.

Choices that the paper leaves open, and deviations from it:

- Both servers are one here: rank 0 receives the ``W^C_k``, holds the ``W^S_k``, and merges them as one update.
- Place of the cut: the paper cuts LeNet-5 and AlexNet after their second layer, ResNet-18 after its third; so the default is at
  most two layers with parameters. A cut is possible wherever a single value leads from the layers below to those above, in any
  model (`raafl.algorithms.split_fed.cut`). A model without such a place (tied embeddings, a block that is used repeatedly) is
  trained whole by the clients, as in FedAvg, and a warning says so at the start.
- The user's `training_step` runs on both sides, up to the cut and from the cut on. The server's half draws random numbers
  (dropout) from a stream of its own; a draw that must agree on both sides, such as a mixup of inputs and labels, would differ.
- The server sees the activations, and the labels in clear. The paper's differential privacy at the client (PixelDP) is not
  implemented.
- The time of a task, simulated, predicted or emulated, is the client's computation and link: the latency counts once each way for
  the task, and once more each way for every batch. The server's computation for its half counts as 0.
- Gradient clipping by the norm over all parameters (`fabric.gradient_clip_val`) is refused, since neither side knows that norm.
- V2, where one upper part learns from the clients one after the other, is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils._pytree import tree_flatten

from raafl.algorithm import (
    FULL,
    Algorithm,
    AllReported,
    BadInput,
    ClientInfo,
    Cost,
    Hook,
    Local,
    Mean,
    Sample,
    Select,
    SelectContext,
    Spec,
    Submodels,
    Task,
    Traits,
    Work,
    fraction,
    positive,
)
from raafl.algorithms.split_fed.cut import Cut, Half, cuts_of
from raafl.algorithms.split_fed.exchange import KEY, BothHook, Halves, LowerHook, UpperHook, halves
from raafl.core.algorithm import Training
from raafl.core.own_steps import followed_cost
from raafl.core.types import Warn
from raafl.data.epochs import batches_of_epoch, samples_of
from raafl.module_hooks import TASK_HOOKS

CLIENT_LAYERS = 2
"""Default of `client_layers`."""


def split_fed(
    client_layers: int | None = None,
    share: float | None = None,
    cut: str | None = None,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return SplitFed V1: each client trains the lower layers, and the server trains the upper ones together with it.

    Args:
        client_layers: largest number of layers with parameters in the client's part W^C, counted from the input; the
            part reaches at least to the first possible cut. None = 2, unless share or cut is given.
        share: share of the model's parameters that the client's part W^C should have, as nearly as possible.
        cut: path of the module whose output is sent to the server, such as layers.2; it ends the client's part W^C.
        by_samples: whether to weight clients by their numbers of samples |D_n| (n_k in Algorithm 1); False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    if client_layers is None and share is None and cut is None:
        client_layers = CLIENT_LAYERS
    return Algorithm(
        name="split_fed",
        paper="Thapa et al. 2022",
        sample=Sample(cohort, concurrency),
        select=Halved(),
        local=Split(client_layers, share, cut),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )


@dataclass(frozen=True)
class Split(Local):
    """Local training with the lower layers on the client and the upper ones on the server.

    Exactly one of the attributes is given; it sets where the model is cut.

    Attributes:
        client_layers: largest number of layers with parameters in the client's part, counted from the input.
        share: share of the model's parameters that the client's part should have, as nearly as possible.
        cut: path of the module whose output is sent to the server; it ends the client's part.
    """

    client_layers: int | None = 2
    share: float | None = None
    cut: str | None = None

    def __post_init__(self) -> None:
        positive("client_layers", self.client_layers, optional=True)
        if self.share is not None:
            fraction("share", self.share)
        given = {name: getattr(self, name) for name in ("client_layers", "share", "cut")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            words = " and ".join(f"{name} is {value}" for name, value in given.items()) or "no cut is given"
            raise BadInput(f"{words}: give exactly one of client_layers, share and cut")

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(
            super().traits,
            leaves_out=frozenset(TASK_HOOKS),  # such hooks would run in both halves, or in only one
            supports_data_parallel=False,  # a client's batches go to the server one by one
        )

    def problems(self, precision: str, gradient_clip_val: float | None) -> list[str]:
        """Return an error message for each setting that split_fed cannot support: gradient clipping and 16-bit loss scaling.

        Both need the gradients of the whole model, but each side only has those of its half.
        """
        problems = []
        if gradient_clip_val is not None:
            problems.append(
                f"fabric.gradient_clip_val is {gradient_clip_val}, but with split_fed neither side knows the norm "
                "of all gradients: leave it out, or clip in the model's own optimizer"
            )
        if precision == "16-mixed":
            problems.append(
                "fabric.precision is 16-mixed, which needs a loss scaler, and split_fed has none: use bf16-mixed "
                "or 32-true"
            )
        return problems

    def choose_cut(self, submodels: Submodels) -> Cut | None:
        """Choose where the model is cut; None if it cannot be cut.

        Raises:
            BadInput: the model cannot be cut at ``cut``, or its frozen parameters exist in several precisions.
        """
        if submodels.bases.names:
            raise BadInput(
                f"the model's frozen base has several precisions, {', '.join(submodels.bases.names)}, but split_fed "
                "needs one: give a single precision"
            )
        cuts, reason = cuts_of(submodels)
        if self.cut is not None:
            cut = next((cut for cut in cuts if cut.path == self.cut), None)
            if cut is None:
                paths = ", ".join(cut.path for cut in cuts)
                raise BadInput(f"cut is '{self.cut}', where the model cannot be cut: {reason or f'use one of {paths}'}")
            return cut
        best: dict[frozenset[str], Cut] = {}
        # of the cuts between the same layers keep the one that sends the fewest bytes, and of equal ones the last
        for cut in cuts:
            if cut.lower not in best or cut.sample_bytes <= best[cut.lower].sample_bytes:
                best[cut.lower] = cut
        places = list(best.values())
        if not places:
            return None
        if self.share is not None:
            total, share = sum(submodels.parameters.values()), self.share
            return min(places, key=lambda cut: abs(cut.num_values / total - share))
        most = self.client_layers or 0
        return next((cut for cut in reversed(places) if cut.num_layers <= most), places[0])

    def exchange(self, submodels: Submodels, extra: Mapping[str, Any] | None = None) -> Halves | None:
        """Return the two halves of the model, which exchange activations and gradients; None if it cannot be cut.

        Args:
            submodels: submodels of the whole model.
            extra: the task's settings, which name the place of the cut; None = choose the place anew.
        """
        if extra is not None:
            return halves(submodels, extra[KEY]["cut"]) if KEY in extra else None
        cut = self.choose_cut(submodels)
        return None if cut is None else halves(submodels, cut.path)

    def hook(self, task: Task) -> Hook:
        """Return the hook that trains the client's half, the server's half, or in a simulation both."""
        if isinstance(task.submodels, Half):
            return LowerHook(task, task.submodels) if task.submodels.side == "lower" else UpperHook(task)
        both = self.exchange(task.submodels, task.assignment.extra)
        return Hook(task) if both is None else BothHook(task, both.server)

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Predict the cost of the client's half by tracing its steps, and that of messages by `estimate`."""
        both = self.exchange(submodels)
        if both is None:
            return submodels.cost(spec, batch_size)
        estimate = self.estimate(submodels, spec, batch_size, extra)
        return followed_cost(self, both.client, FULL, batch_size, extra, estimate)

    def cost_depends_on(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return nothing: the place of the cut is in the client's half, and numbers of samples are counted apart."""
        return {}

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Estimate the cost of the client's half, including the transfer of activations and gradients for all its samples.

        Each batch pays the latency of the network link twice. The peak memory includes the activation and gradient of
        one batch. The server's computation counts as 0.
        """
        both = self.exchange(submodels)
        if both is None:
            return submodels.cost(spec, batch_size)
        half = both.client
        cost, terms = half.cost(FULL, batch_size), extra.get(KEY, {})
        num_samples = terms.get("samples", 0)
        activation, leaves = half.cut.sample_bytes, _leaf_bytes(half)
        return replace(
            cost,
            peak_bytes=cost.peak_bytes + round(batch_size * (2 * activation + leaves)),
            down_bytes=cost.down_bytes + round(num_samples * activation),
            up_bytes=cost.up_bytes + round(num_samples * (activation + leaves)),
            num_exchanges=terms.get("batches", 0),
        )

    def task_options(
        self, client: ClientInfo, submodels: Submodels, training: Training, batch_size: int, drop_last: bool
    ) -> dict[str, Any]:
        """Return the path of the cut and the sizes of a task's batches; empty if the model cannot be cut.

        Args:
            client: client that gets the tasks.
            submodels: submodels of the whole model.
            training: the run's settings of local training.
            batch_size: local batch size.
            drop_last: whether an epoch drops its last batch if that is smaller.
        """
        cut = self.choose_cut(submodels)
        if cut is None:
            return {}
        num_samples = client.num_samples
        per_epoch = batches_of_epoch(num_samples, batch_size, drop_last)
        batches = per_epoch * (training.num_epochs or 1) if training.num_steps is None else training.num_steps
        samples = samples_of(batches, num_samples, batch_size, drop_last)
        terms = {"cut": cut.path, "batch_size": batch_size, "num_samples": num_samples, "per_epoch": per_epoch}
        return {KEY: {**terms, "batches": batches, "samples": samples}}

    def notes(self, submodels: Submodels) -> list[str]:
        """Return messages for the user: where the model is cut, which data leave the clients, and what the server's half costs."""
        both = self.exchange(submodels)
        if both is None:
            return [
                Warn(
                    f"split: the model cannot be cut, so clients train all of it, as in FedAvg: {cuts_of(submodels)[1]}"
                )
            ]
        cut, upper, total = both.client.cut, both.server, sum(submodels.parameters.values())
        leaves = ", ".join(f"number {i}" for i in cut.leaves) or "none"
        peak = upper.cost(FULL, _num_samples(submodels))
        return [
            f"split: cut after '{cut.path}': clients train {cut.num_values:,} of {total:,} parameters, the server the rest",
            f"split: PRIVACY: the server sees the output of '{cut.path}' for every sample ({cut.sample_bytes:,.0f} "
            f"bytes), and without change the parts of each batch that its own layers need ({leaves}; this includes "
            "the labels)",
            f"split: for each client at work the server trains a copy of the upper part: {upper.layout().num_bytes:,} bytes of "
            f"values, at least {peak.peak_bytes:,} with gradients, activations and the optimiser",
        ]

    def __str__(self) -> str:
        if self.cut is not None:
            where = f"up to {self.cut}"
        else:
            where = f"{self.share:g} of the parameters" if self.share is not None else f"{self.client_layers} layers"
        return f"SGD on the loss in two halves, {where} at the client"


def _leaf_bytes(half: Half) -> float:
    """Compute the bytes per sample that the server's half needs besides the activation, such as those of labels."""
    flat = tree_flatten(half.example_batch)[0]
    num_bytes: int = sum(flat[i].nbytes for i in half.cut.leaves)
    return num_bytes / max(_num_samples(half), 1)


def _num_samples(submodels: Submodels) -> int:
    flat = tree_flatten(submodels.example_batch)[0]
    return int(flat[0].shape[0]) if flat and flat[0].dim() else 1


@dataclass(frozen=True, slots=True)
class Halved(Select):
    """Rule that gives every client the same task: train the lower half of the model, while the server trains the rest.

    Attributes:
        sends: content of the updates of both halves: "values" = trained values; "delta" = their change in the task.
    """

    sends: Literal["values", "delta"] = "values"

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the whole model with the run's epochs or steps, and tell the client in `Work.extra` where the model is cut."""
        extra, training = fleet.task_options(client), fleet.training
        if not extra:
            return Work()
        extra[KEY]["sends"] = self.sends
        if training.num_steps is not None:
            return Work(num_steps=training.num_steps, extra=extra)
        return Work(num_epochs=training.num_epochs or 1, extra=extra)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return error messages: for a place where the model cannot be cut, and for each client with too little memory."""
        try:
            cut = _split(fleet).choose_cut(fleet.state.submodels)
        except BadInput as error:
            return [str(error)]
        words = "the full model" if cut is None else f"the part up to '{cut.path}'"
        return [
            f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, {words} needs "
            f"{fleet.cost(FULL).peak_bytes:.4g} to train: raise memory_bytes, use a smaller batch, or cut earlier"
            for client in fleet.clients.values()
            if not fleet.fits(client, FULL)
        ]

    def __str__(self) -> str:
        return "full, in two halves"


def _split(fleet: SelectContext) -> Split:
    if not isinstance(fleet.local, Split):
        raise BadInput(
            f"local is {type(fleet.local).__name__}, but select is Halved, which works with Split only: use raafl.split_fed()"
        )
    return fleet.local
