"""Counts of batches and samples against the batches of a client's data."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from raafl.core.options import Training
from raafl.core.types import Work
from raafl.data.epochs import batches_of_epoch
from raafl.data.federated import ClientData


def trained(num_samples, batch_size, drop_last, weighted, **length):
    """Samples that a client's batches have, one batch after the other."""
    data = ClientData(
        TensorDataset(torch.arange(num_samples)),
        torch.arange(num_samples),
        batch_size,
        drop_last=drop_last,
        weights=torch.ones(num_samples) if weighted else None,
    )
    sizes = [len(rows) for rows in data.rows(torch.Generator(), **length)]
    assert data.num_batches() == batches_of_epoch(num_samples, batch_size, drop_last)
    return sum(sizes)


@given(st.integers(1, 80), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 9), st.booleans())
def test_a_task_counts_the_samples_of_its_batches(num_samples, batch_size, drop_last, weighted, number, in_steps):
    length = {"num_steps" if in_steps else "num_epochs": number}
    wanted = trained(num_samples, batch_size, drop_last, weighted, **length)
    at = num_samples, batch_size, drop_last
    assert Training().trained_samples(Work(**length), *at) == wanted
    run = Training(**{"num_epochs": None, **length})
    assert run.trained_samples(Work(), *at) == wanted
    assert wanted <= run.nominal_samples(Work(), *at[:2])


def test_by_hand():
    assert Training().trained_samples(Work(num_steps=10), 33, 32, False) == 5 * 33
    assert Training().trained_samples(Work(num_epochs=10), 63, 32, True) == 320
    assert Training().trained_samples(Work(num_steps=3), 7, 32, True) == 21  # the only batch is kept
