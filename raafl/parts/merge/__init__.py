"""Merge waiting updates into the global model. Every merge works on submodels: it changes only what an update covers."""

from raafl.parts.merge.mean import Deltas, Mean
from raafl.parts.merge.server_optimizer import ServerOptimizer

__all__ = ["Deltas", "Mean", "ServerOptimizer"]
