"""Train the tasks of a simulated run or of a replay: in this process, in workers, on other ranks, one by one or batched."""

from raafl.runtime.executors.base import Executor, Inline

__all__ = ["Executor", "Inline"]
