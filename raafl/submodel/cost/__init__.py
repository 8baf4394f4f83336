"""Predict what a submodel costs the client that trains it: operations, bytes moved, memory, bytes on the wire."""

from raafl.submodel.cost.predicted import Cost, Method, MethodSteps, predict

__all__ = ["Cost", "Method", "MethodSteps", "predict"]
