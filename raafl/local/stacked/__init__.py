"""Train tasks of several clients as one: torch functions on stacked tensors, with the bits of training one after another."""

from raafl.local.stacked.cohort import CohortTrainer, Trained, refusal_of, refusal_of_optimizer
from raafl.local.stacked.stacks import Parted, Unstackable
from raafl.local.stacked.steps import Member

__all__ = ["CohortTrainer", "Member", "Parted", "Trained", "Unstackable", "refusal_of", "refusal_of_optimizer"]
