"""Executors: where the tasks of a simulated run, or of a replay, are trained."""

from raafl.runtime.executors.base import Executor, Inline
from raafl.runtime.executors.pool import Pool
from raafl.runtime.executors.rank_worker import work
from raafl.runtime.executors.ranks import RankExecutor

__all__ = ["Executor", "Inline", "Pool", "RankExecutor", "work"]
