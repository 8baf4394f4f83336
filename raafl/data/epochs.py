"""Count the batches and samples of epochs; importing it does not import torch."""

from __future__ import annotations

import math


def batches_of_epoch(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches in one pass over a client's samples."""
    return max(num_samples // batch_size, 1) if drop_last else math.ceil(num_samples / batch_size)


def samples_of(num_batches: int, num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of samples in the first batches of as many epochs as needed, with last batches as they are."""
    per_epoch = batches_of_epoch(num_samples, batch_size, drop_last)
    epochs, rest = divmod(num_batches, per_epoch)
    return epochs * min(num_samples, per_epoch * batch_size) + rest * batch_size
