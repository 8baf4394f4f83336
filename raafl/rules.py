"""Number the rules that decide a run's times and bits, so that an older run folder replays as it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

CURRENT: Final = 4
"""Revision of a new run."""

_BEFORE_NUMBERS: Final = 1
"""Revision of a run folder whose config has no field `rules`."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a run by their revision.

    A property names a rule, and is true from the revision on that brought it. Code asks a property, never the number.
    A change that moves times or bits of a run adds a property.

    Attributes:
        revision: field `rules` of the run's config.
    """

    revision: int = CURRENT

    @property
    def keeps_order(self) -> bool:
        """Whether a training loader that does not shuffle keeps its order, and an evaluation the ``drop_last`` of its loader."""
        return self.revision >= 2

    @property
    def validates(self) -> bool:
        """Whether evaluations use a validation set where there is one beside the test set, which is measured once, at the end."""
        return self.revision >= 2

    @property
    def trained_labels(self) -> bool:
        """Whether a partition by class counts the classes that the training step gets, not those that a data set stores."""
        return self.revision >= 2

    @property
    def suspends_by_time(self) -> bool:
        """Whether a client that leaves tasks unanswered is suspended for as long as they took, instead of for 10 s at first."""
        return self.revision >= 2

    @property
    def metrics_live(self) -> bool:
        """Whether a metric that a module does not log as an object goes on from evaluation to evaluation."""
        return self.revision >= 2

    @property
    def keeps_modes(self) -> bool:
        """Whether parts of a model that its author put into eval mode train in eval mode, not in train mode."""
        return self.revision >= 2

    @property
    def seeds_evaluation(self) -> bool:
        """Whether each evaluation draws from generators of its own, seeded by the run's seed and the model's version."""
        return self.revision >= 2

    @property
    def follows_methods(self) -> bool:
        """Whether the cost of a task is that of its method's own steps (`Local.cost`), not a formula (`Local.estimate`)."""
        return self.revision >= 2

    @property
    def counts_trained_samples(self) -> bool:
        """Whether a task's time counts the samples that it trains on, with the last batches of epochs as they are."""
        return self.revision >= 2

    @property
    def measures_rounding(self) -> bool:
        """Whether the proof of axes allows the rounding that it measures in a model, not a fixed share of values alone."""
        return self.revision >= 2

    @property
    def fuses_multihead(self) -> bool:
        """Whether the attention within torch's `nn.MultiheadAttention` counts as the one kernel that a CPU runs for it."""
        return self.revision >= 2

    @property
    def starts_observers(self) -> bool:
        """Whether buffers that are empty or infinite before a first step begin with the sizes and values that it gives them."""
        return self.revision >= 2

    @property
    def sees_loops(self) -> bool:
        """Whether operations within torch's own loop over positions, as of a GRU, take less time than those that Python calls."""
        return self.revision >= 3

    @property
    def sees_zeros(self) -> bool:
        """Whether an optimizer's square root takes its time by the zeros that it meets, as in an embedding's unused rows."""
        return self.revision >= 3

    @property
    def sees_norms_twice(self) -> bool:
        """Whether a batch norm's gradient takes the memory of two of its inputs for a moment: torch's kernel allocates it twice."""
        return self.revision >= 3

    @property
    def seeds_own_tests(self) -> bool:
        """Whether a client's evaluation on its own test part has a seed of its own, not what its training has left."""
        return self.revision >= 3

    @property
    def reseeds_data(self) -> bool:
        """Whether generators that a data set or its transforms own are seeded anew for each task and each evaluation."""
        return self.revision >= 3

    @property
    def captures_steps(self) -> bool:
        """Whether tasks on a GPU train with fused or capturable optimizers, and captured steps, as `fabric.capture` says."""
        return self.revision >= 3

    @property
    def times_by_launches(self) -> bool:
        """Whether a step on a GPU takes the longer of its launches by the host and its kernels on the device, not their sum."""
        return self.revision >= 4


def recorded_revision(config: Mapping[str, Any]) -> Any:
    """Return the revision in the config of a run folder; a folder older than the field has revision 1."""
    return config.get("rules", _BEFORE_NUMBERS)
