"""Find samples that no model can be trained or measured on, once something is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from raafl.data.federated import FederatedData, Sized
from raafl.submodel.nested_batch import batch_tensors

_AT_A_TIME = 32


def fault_in(data: FederatedData, client: int | None) -> str | None:
    """Look for a sample with NaN or infinity in a client's data, and describe it; None = none was found.

    The result is also None if the data cannot be read. This function must not fail, since any client can cause its call
    by sending a non-finite update.

    `client`: id of the client; None = search the data on which the run evaluates.
    """
    try:
        return _fault_in(data, client)
    except Exception:
        return None


def _fault_in(data: FederatedData, client: int | None) -> str | None:
    if client is None:
        place = first_not_finite(data.test_batches())
        return None if place is None else f"row {place} of the test set"
    mine = data.client(client)
    place = first_not_finite(mine.in_order(mine.batch_size or _AT_A_TIME))
    return None if place is None else f"row {int(data.indices(client)[place])} of the training set"


def first_not_finite(batches: Iterable[Sized]) -> int | None:
    """Name the first sample with NaN or infinity by its position; if a batch's samples cannot be separated, name the batch."""
    before = 0
    for batch, num_samples in batches:
        places = [_row(x, num_samples) for x in batch_tensors(batch) if x.is_floating_point() or x.is_complex()]
        found = [place for place in places if place is not None]
        if found:
            return before + min(found)
        before += num_samples
    return None


def _row(x: Tensor, num_samples: int) -> int | None:
    bad = ~torch.isfinite(x)
    if not bool(bad.any()):
        return None
    if x.dim() == 0 or len(x) != num_samples:
        return 0
    # `view` would fail where a collate function has permuted dimensions
    return int(bad.reshape(num_samples, -1).any(1).nonzero()[0])
