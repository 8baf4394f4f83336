"""Train the tasks of a simulated run or of a replay: in this process, in workers, on other ranks, one by one or batched."""

from raafl.runtime.executors.base import Executor, Inline
from raafl.runtime.executors.pool import Pool
from raafl.runtime.executors.rank_worker import work
from raafl.runtime.executors.ranks import RankExecutor

__all__ = ["Executor", "Inline", "Pool", "RankExecutor", "work"]
