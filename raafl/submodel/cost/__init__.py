"""Predict what a submodel costs the client that trains it: operations, bytes moved, memory, bytes on the wire."""

from raafl.submodel.cost.method import Method, MethodSteps
from raafl.submodel.cost.predicted import Cost, predict

__all__ = ["Cost", "Method", "MethodSteps", "predict"]
