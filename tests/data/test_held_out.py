"""What clients keep from training to measure themselves on."""

from __future__ import annotations

import pytest
import torch

from raafl.data.federated import FederatedData
from raafl.data.partition import ClassesPerClient, Dirichlet, Iid
from raafl.errors import BadInput
from tests.data.test_federated import Module, Plain, tensors


@pytest.mark.parametrize(
    ("share", "num", "num_test"),
    [
        (0.2, 10, 2),
        (0.2, 12, 2),
        (0.2, 13, 3),
        (0.5, 5, 3),
        (0.2, 2, 0),
        (0.2, 3, 1),
        (0.9, 1, 0),
        (0.99, 4, 3),
        (0.0, 9, 0),
    ],
)
def test_the_share_is_rounded_and_leaves_something_to_train_on(share, num, num_test):
    part = torch.arange(100, 100 + 2 * num, 2)
    train, test = Iid(test_share=share).held_out(part, 1, 0)
    assert len(test) == num_test
    assert sorted([*train.tolist(), *test.tolist()]) == part.tolist()
    assert train.tolist() == sorted(train.tolist()) and test.tolist() == sorted(test.tolist())


def test_the_draw_depends_on_seed_and_client_alone():
    part = torch.arange(50)

    def drawn(seed, client, partition=Iid(test_share=0.2)):  # noqa: B008  # it is frozen
        return partition.held_out(part, client, seed)[1].tolist()

    assert drawn(0, 1) == drawn(0, 1) == drawn(0, 1, Dirichlet(0.3, test_share=0.2))
    assert len({tuple(drawn(seed, client)) for seed in (0, 1) for client in (1, 2)}) == 4
    assert drawn(0, 1) != list(range(40, 50))


@pytest.mark.parametrize("share", [-0.1, 1.0, 20, float("nan")])
def test_a_share_out_of_range_is_named(share):
    with pytest.raises(BadInput, match=r"partition.test_share is .*: give at least 0 and less than 1"):
        FederatedData(Module(tensors()), Iid(test_share=share), 2)


@pytest.mark.parametrize("make", [tensors, lambda: Plain(tensors())])
def test_clients_train_and_test_on_parts_of_their_own(make):
    whole = FederatedData(Module(make()), Iid(), 3, seed=5)
    data = FederatedData(Module(make()), Iid(test_share=0.2), 3, seed=5)
    assert data.sizes == [14, 14, 13] and data.test_sizes == [3, 3, 3] and whole.test_sizes == [0, 0, 0]
    for client in (1, 2, 3):
        mine = data.client(client)
        assert mine.num_samples == data.sizes[client - 1] and mine.test.num_samples == 3
        rows = [int(x[0]) // 2 for batch, _ in mine.test.in_order(2) for x in batch[0]]
        assert sorted([*data.indices(client).tolist(), *rows]) == whole.indices(client).tolist()
        assert [(len(batch[0]), num) for batch, num in mine.test.in_order(2)] == [(2, 2), (1, 1)]
        assert mine.classes() is not None and whole.client(client).test is None
        trained = {int(x[0]) // 2 for batch, _ in mine.batches(torch.Generator(), 4, num_epochs=1) for x in batch[0]}
        assert trained == set(data.indices(client).tolist())


def test_one_client_that_has_all_data_tests_on_a_part_as_well():
    data = FederatedData(Module(tensors()), Iid(test_share=0.2), 1)
    assert data.client(1).num_samples == 40 and data.client(1).test.num_samples == 10


def test_batches_in_order_differ_by_one_sample_at_most():
    part = FederatedData(Module(tensors()), Iid(test_share=0.5), 1).client(1).test
    assert [num for _, num in part.in_order(8)] == [7, 6, 6, 6]


def test_validation_rows_are_nobodys_and_replace_the_test_set():
    data = FederatedData(Module(tensors(40)), Iid(validation_share=0.25), 3, seed=5)
    owned = torch.cat([data.indices(client) for client in (1, 2, 3)])
    validation = torch.cat([torch.as_tensor(y) for (_, y), _ in data.test_batches()])
    rows = data.labels()
    assert len(owned) == 30 and len(validation) == 10
    assert sorted([*rows[owned].tolist(), *validation.tolist()]) == sorted(rows.tolist())


def test_validation_rows_depend_on_the_seed_and_follow_the_labels():
    """A partition by label sees the labels of the rows that are left, not of the first ones."""
    labels = torch.arange(40) % 2
    module = Module(torch.utils.data.TensorDataset(torch.zeros(40, 3), labels))
    data = FederatedData(module, ClassesPerClient(1, validation_share=0.3), 2, seed=1)
    assert [set(data.labels()[data.indices(client)].tolist()) for client in (1, 2)] in ([{0}, {1}], [{1}, {0}])
    assert not torch.equal(
        Iid(validation_share=0.3).validation_rows(40, 1), Iid(validation_share=0.3).validation_rows(40, 2)
    )


@pytest.mark.parametrize(("num", "says"), [(49, "give 0.0205 or more"), (1, "give 0, as it takes two samples")])
def test_a_validation_share_of_less_than_a_sample_is_refused_and_the_test_set_stays_unseen(num, says):
    with pytest.raises(BadInput, match=f"partition.validation_share is 0.01, which is no sample of {num}: {says}"):
        FederatedData(Module(tensors(num)), Iid(validation_share=0.01), 1)
    data = FederatedData(Module(tensors(50)), Iid(validation_share=0.01), 1)
    assert [count for _, count in data.test_batches()] == [1] and data.sizes == [49]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_validation_share_out_of_range_is_named(share):
    with pytest.raises(BadInput, match=f"partition.validation_share is {share}: give at least 0"):
        Iid(validation_share=share).validation_rows(10, 0)
