"""Merge waiting updates into the global model. Every merge works on submodels: it changes only what an update covers."""

from raafl.parts.merge.mean import Deltas, Mean, ServerOptimizer

__all__ = ["Deltas", "Mean", "ServerOptimizer"]
