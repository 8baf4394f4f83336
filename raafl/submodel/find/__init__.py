"""Finding axes: a training step is followed, and what goes together in its operations is an axis."""
