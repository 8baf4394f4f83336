"""Capture whole training steps as CUDA graphs, one for each submodel and shape of batches, where eager steps give the same.

Forward pass, backward pass, clipping, optimizer, sum of losses and logged values of one step are one launch. What a graph reads
or leaves lies in memory whose address stays: the batch, the values of the submodel, the optimizer's state, its learning rates,
the sums. A value in Python would be frozen, so what may differ from step to step is part of a graph's key, or refused.

Nothing is assumed: two steps of each shape run eagerly where waiting for the GPU is an error, and the first tasks that use a
graph are trained both ways and compared, including what they log and the state in which they leave the generators.
"""

from raafl.local.captured.tasks import Capture

__all__ = ["Capture"]
