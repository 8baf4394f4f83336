"""Tasks of several clients trained as one: torch functions on stacks of tensors, a client's after another's, to the loop's bits."""

from raafl.local.stacked.cohort import CohortTrainer, Trained, refusal_of, refusal_of_optimizer
from raafl.local.stacked.stacks import Parted, Unstackable
from raafl.local.stacked.steps import Member

__all__ = ["CohortTrainer", "Member", "Parted", "Trained", "Unstackable", "refusal_of", "refusal_of_optimizer"]
