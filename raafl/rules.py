"""Number the rules that decide a run's times and bits, so that an older run folder replays as it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

CURRENT: Final = 10
"""Revision of a new run."""


@dataclass(frozen=True)
class _Since:
    """Rule that a run follows from a revision on."""

    revision: int

    def __get__(self, rules: Rules, owner: type[Rules]) -> bool:
        return rules.revision >= self.revision


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a run by their revision.

    An attribute names a rule, and is true from the revision on that brought it. Code asks an attribute, never the number.
    A change that moves times or bits of a run adds an attribute.

    Attributes:
        revision: field `rules` of the run's config.
    """

    revision: int = CURRENT

    keeps_order = _Since(2)
    """Whether a training loader that does not shuffle keeps its order, and an evaluation the ``drop_last`` of its loader."""
    validates = _Since(2)
    """Whether evaluations use a validation set where there is one beside the test set, which is measured once, at the end."""
    trained_labels = _Since(2)
    """Whether a partition by class counts the classes that the training step gets, not those that a data set stores."""
    suspends_by_time = _Since(2)
    """Whether a client that leaves tasks unanswered is suspended for as long as they took, instead of for 10 s at first."""
    metrics_live = _Since(2)
    """Whether a metric that a module does not log as an object goes on from evaluation to evaluation."""
    keeps_modes = _Since(2)
    """Whether parts of a model that its author put into eval mode train in eval mode, not in train mode."""
    seeds_evaluation = _Since(2)
    """Whether each evaluation draws from generators of its own, seeded by the run's seed and the model's version."""
    follows_methods = _Since(2)
    """Whether the cost of a task is that of its method's own steps (`Local.cost`), not a formula (`Local.estimate`)."""
    counts_trained_samples = _Since(2)
    """Whether a task's time counts the samples that it trains on, with the last batches of epochs as they are."""
    measures_rounding = _Since(2)
    """Whether the proof of axes allows the rounding that it measures in a model, not a fixed share of values alone."""
    fuses_multihead = _Since(2)
    """Whether the attention within torch's `nn.MultiheadAttention` counts as the one kernel that a CPU runs for it."""
    starts_observers = _Since(2)
    """Whether buffers that are empty or infinite before a first step begin with the sizes and values that it gives them."""
    sees_loops = _Since(3)
    """Whether operations within torch's own loop over positions, as of a GRU, take less time than those that Python calls."""
    sees_zeros = _Since(3)
    """Whether an optimizer's square root takes its time by the zeros that it meets, as in an embedding's unused rows."""
    sees_norms_twice = _Since(3)
    """Whether a batch norm's gradient takes the memory of two of its inputs for a moment: torch's kernel allocates it twice."""
    seeds_own_tests = _Since(3)
    """Whether a client's evaluation on its own test part has a seed of its own, not what its training has left."""
    reseeds_data = _Since(3)
    """Whether generators that a data set or its transforms own are seeded anew for each task and each evaluation."""
    captures_steps = _Since(3)
    """Whether tasks on a GPU train with fused or capturable optimizers, and captured steps, as `fabric.capture` says."""
    times_by_launches = _Since(4)
    """Whether a step on a GPU takes the longer of its launches by the host and its kernels on the device, not their sum."""
    steps_as_lightning = _Since(5)
    """Whether clipping takes the optimizer's parameters alone, and a skipped epoch's gradients are dropped, as in Lightning."""
    follows_reads = _Since(5)
    """Whether a step of a large model that reads values, or whose optimizer is fused, is followed without values."""
    compresses_shares = _Since(6)
    """Whether compression saves TimelyFL with clock "share" only the share of a transfer's bytes that this clock charges."""
    counts_trained_ranks = _Since(6)
    """Whether HetLoRA's pruning compares the tail of the adapters that a task trains, not that of all adapters."""
    counts_combined = _Since(6)
    """Whether a robust or private mean counts in delayed Nesterov momentum as the updates that it stands for, not as one."""
    keeps_zeros = _Since(6)
    """Whether updates whose zeros count, as of FIARSE's elements, are refused compressors that make more of them."""
    follows_memory = _Since(6)
    """Whether PruneFL's whole rounds, and TimelyFL's fixed workload, follow the memory of a client that has changed."""
    moves_waiting_statistics = _Since(6)
    """Whether FedCompass compares running statistics with those at the merge, not with those at the update's arrival."""
    feeds_back_model = _Since(7)
    """Whether tensors beside the model that come back as differences are sent whole by top_k, and have no residual."""
    keeps_roots = _Since(7)
    """Whether tensors by whose root steps are divided, as Adam's moments, are refused compressors that make them 0."""
    works_by_base_rate = _Since(7)
    """Whether FedNova counts a client's work by its optimizer's base learning rate, not by that of its first step."""
    keeps_ties_whole = _Since(7)
    """Whether FedPer refuses layers of a client's own that have a parameter in common with shared ones."""
    norms_are_of_changes = _Since(7)
    """Whether limits on norms are refused where a method has no such norm: of masks, of scalars, of gradients without any."""
    changes_memory_alone = _Since(7)
    """Whether a client that ran out of memory changes only in that for selects, which else hear that it left and joined."""
    adds_lag = _Since(7)
    """Whether trained values count from what the server had, not from what top_k had sent of it so far."""
    predicts_overlapped = _Since(8)
    """Whether DiLoCo's steps by speed are by predicted times with overlap, whose measured ones contain waits for the uplink."""
    counts_returned = _Since(9)
    """Whether a server that was restarted starts with as many clients as have come back, not with those from before."""
    seeds_setup = _Since(10)
    """Whether a data module draws its splits from generators that are seeded alike in each process, run and replay."""
    waits_for_groups = _Since(9)
    """Whether in rounds, too, masked updates of fewer clients than a sum needs wait for more clients, and are not refused."""
    sizes_overlapped = _Since(10)
    """Whether sizes by measured speed are by predicted times with overlap, whose measured ones contain waits for the uplink."""


def recorded_revision(config: Mapping[str, Any]) -> Any:
    """Return the revision in the config of a run folder; a folder older than the field has revision 1."""
    return config.get("rules", 1)
