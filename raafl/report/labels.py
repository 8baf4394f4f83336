"""Recover the classes of each client's samples by partitioning the config's data again; run folders do not store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from raafl.errors import BadInput
from raafl.runfolder.reading import RecordedRun

if TYPE_CHECKING:
    from raafl.data.federated import FederatedData

_MAX_CLASSES = 100


def classes_of(run: RecordedRun, deal_out: Callable[[RecordedRun], FederatedData]) -> Mapping[int, Sequence[int]] | str:
    """Return the samples of each class by client, without clients that have their own data; or the reason why not.

    ``deal_out`` loads and partitions the data that the run's config names.
    """
    if not run.config:
        return "there is no config to deal the data out by"
    try:
        data = deal_out(run)
        labels = data.labels()
    except (BadInput, OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        return f"the data cannot be dealt out again: {' '.join(str(error).split())[:300]}"
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) > _MAX_CLASSES:
        return f"the samples have {len(names):,} classes, too many to show"
    found: dict[int, Sequence[int]] = {}
    for client in range(1, data.num_clients + 1):
        rows = data.indices(client).numpy()
        known = run.clients.get(client)
        if known is None or known.own_data:
            continue
        if known.num_samples != len(rows):
            return (
                f"the config's data are not those of the run: client {client} had {known.num_samples:,} samples, "
                f"and would have {len(rows):,}"
            )
        found[client] = np.bincount(numbers[rows], minlength=len(names)).tolist()
    return found
