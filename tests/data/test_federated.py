import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from raafl.data import federated
from raafl.data.federated import ClientData, FederatedData
from raafl.data.partition import ByColumn, ClassesPerClient, Dirichlet, Iid
from raafl.data.sources import TensorImages
from raafl.errors import BadInput
from raafl.rules import Rules
from tests.data.modules import Module, Plain, equal, generator, tensors, values

ROWS = torch.tensor([1, 4, 5, 9, 16, 20, 33, 34, 40, 41, 49])


@pytest.mark.parametrize("counts", [{"num_epochs": 3}, {"num_steps": 1}, {"num_steps": 7}])
@pytest.mark.parametrize("batch_size", [1, 4, 11, 100])
@pytest.mark.parametrize("copied", [True, False])
def test_fast_path_equals_slow_path_batch_for_batch(counts, batch_size, copied):
    fast = ClientData(tensors(), ROWS, copied=copied)
    slow = ClientData(Plain(tensors()), ROWS)
    assert equal(fast.batches(generator(), batch_size, **counts), slow.batches(generator(), batch_size, **counts))


@pytest.mark.parametrize("copied", [True, False])
def test_fast_path_equals_slow_path_for_subsets_and_images(copied):
    images = TensorImages(
        torch.randint(0, 256, (50, 1, 3, 3), dtype=torch.uint8, generator=generator()), torch.arange(50), [0.3], [0.4]
    )
    for dataset in (images, Subset(images, range(49, -1, -1)), Subset(tensors(), range(49, -1, -1))):
        fast, slow = ClientData(dataset, ROWS, copied=copied), ClientData(Plain(dataset), ROWS)
        assert equal(fast.batches(generator(), 4, num_epochs=2), slow.batches(generator(), 4, num_epochs=2))


def test_batches_are_permutations_of_the_clients_own_rows_by_a_plain_loop():
    """The bare loop: one permutation an epoch from the same generator, cut into slices."""
    base, plain = tensors(), generator(5)
    expected = []
    for _ in range(2):
        order = ROWS[torch.randperm(len(ROWS), generator=plain)]
        cuts = [order[i : i + 4] for i in range(0, len(ROWS), 4)]
        expected += [([t[rows] for t in base.tensors], len(rows)) for rows in cuts]
    assert equal(ClientData(base, ROWS).batches(generator(5), 4, num_epochs=2), expected)


def test_each_epoch_has_every_sample_once_in_a_fresh_order():
    client = ClientData(TensorDataset(torch.arange(50)), ROWS)
    epochs = values(client.batches(generator(), 4, num_epochs=2))
    assert [len(x) for (x,) in epochs] == [4, 4, 3] * 2 and client.num_batches(4) == 3
    first, second = torch.cat([x for (x,) in epochs[:3]]), torch.cat([x for (x,) in epochs[3:]])
    assert sorted(first.tolist()) == sorted(second.tolist()) == ROWS.tolist()
    assert first.tolist() != second.tolist()


def test_steps_run_on_through_epochs():
    client = ClientData(tensors(), ROWS)
    steps = list(client.batches(generator(), 4, num_steps=5))
    assert equal(steps, list(client.batches(generator(), 4, num_epochs=2))[:5])


@pytest.mark.parametrize("counts", [{"num_epochs": 2}, {"num_steps": 4}])
def test_drop_last_leaves_out_the_short_batch_of_an_epoch_unless_it_is_the_only_one(counts):
    client = ClientData(tensors(), ROWS, drop_last=True)
    whole = list(ClientData(tensors(), ROWS).batches(generator(), 4, num_epochs=2))
    assert equal(client.batches(generator(), 4, **counts), [*whole[:2], *whole[3:5]]) and client.num_batches(4) == 2
    ((alone, num),) = client.batches(generator(), 12, num_epochs=1)
    assert len(alone[0]) == num == len(ROWS) and client.num_batches(12) == 1
    assert sum(num for _, num in client.in_order(4)) == len(ROWS)


def test_a_batch_larger_than_the_data_is_one_batch():
    ((batch, num),) = ClientData(tensors(), ROWS).batches(generator(), 1000, num_epochs=1)
    assert len(batch[0]) == num == len(ROWS)


@pytest.mark.parametrize("dataset", [tensors(), Plain(tensors())])
def test_the_order_depends_on_the_generator_alone_and_global_generators_stay(dataset):
    client = ClientData(dataset, ROWS)
    before = torch.get_rng_state()
    first = list(client.batches(generator(1), 4, num_epochs=1))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert equal(first, client.batches(generator(1), 4, num_epochs=1))
    other = list(client.batches(generator(2), 4, num_epochs=1))
    assert not torch.equal(torch.cat([x for x, _ in values(first)]), torch.cat([x for x, _ in values(other)]))


def test_a_batch_may_be_changed_in_place():
    client = ClientData(tensors(), ROWS)
    for x, _ in values(client.batches(generator(), 4, num_epochs=1)):
        x.zero_()
    assert all(x.sum() > 0 for x, _ in values(client.batches(generator(), 4, num_epochs=1)))


def test_bad_counts_are_refused_at_the_call():
    client = ClientData(tensors(), ROWS)
    for counts, message in [
        ({}, "exactly one"),
        ({"num_epochs": 1, "num_steps": 1}, "exactly one"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"num_steps": -1}, "num_steps is -1"),
    ]:
        with pytest.raises(BadInput, match=message):
            client.batches(generator(), 4, **counts)
    with pytest.raises(BadInput, match="batch_size is 0"):
        client.batches(generator(), 0, num_epochs=1)
    with pytest.raises(BadInput, match="batch_size is missing"):
        client.batches(generator(), num_epochs=1)


def test_an_empty_client_is_refused():
    with pytest.raises(BadInput, match="no samples"):
        ClientData(tensors(), torch.tensor([], dtype=torch.int64))


def test_clients_share_the_training_set_and_use_the_modules_batch_size():
    module = Module(tensors())
    fed = FederatedData(module, Iid(), num_clients=3, seed=1)
    assert module.calls == ["prepare", "fit"]
    assert fed.num_clients == 3 and fed.sizes == [17, 17, 16]
    assert [fed.client(i).num_samples for i in (1, 2, 3)] == fed.sizes
    seen = torch.cat([x for i in (1, 2, 3) for x, _ in values(fed.client(i).batches(generator(), num_epochs=1))])
    assert sorted(seen[:, 0].tolist()) == tensors().tensors[0][:, 0].tolist()
    assert [num for _, num in fed.client(1).batches(generator(), num_epochs=1)] == [8, 8, 1]


def test_clients_are_numbered_from_one():
    fed = FederatedData(Module(tensors()), Iid(), 3, 0)
    for client in (0, 4, -1):
        with pytest.raises(BadInput, match=f"client is {client}: clients are numbered 1 to 3"):
            fed.client(client)


def test_clients_of_a_simulation_hold_no_samples_of_their_own():
    """What a thousand of them had copied stayed, also of those that did not work."""
    fed = FederatedData(Module(tensors()), Iid(test_share=0.2), 5, 0)
    for number in range(1, 6):
        shared, alone = fed.client(number), fed.make_client(number, copied=True)
        assert shared._indices is not None and alone._indices is alone.test._indices is None
        for one, other in ((shared, alone), (shared.test, alone.test)):
            assert equal(one.batches(generator(), num_epochs=2), other.batches(generator(), num_epochs=2))


def test_clients_that_have_not_worked_for_long_are_made_anew(monkeypatch):
    monkeypatch.setattr(federated, "_MOST_KEPT", 2)
    fed = FederatedData(Module(tensors()), Iid(), 5, 0)
    one, two = fed.client(1), fed.client(2)
    assert fed.client(1) is one
    fed.client(3)
    assert fed.client(1) is one and len(fed._clients) == 2
    again = fed.client(2)
    assert again is not two
    assert equal(*(list(one.batches(generator(), num_epochs=2)) for one in (two, again)))


def test_more_samples_than_there_is_room_for_are_not_copied(monkeypatch):
    # a sample is 2 floats and an int64, 16 bytes; a client has 10
    fed = FederatedData(Module(tensors()), Iid(), 5, 0)
    for most_bytes, is_copied in ((160, True), (159, False)):
        monkeypatch.setattr(federated, "_MOST_COPIED_BYTES", most_bytes)
        assert (fed.make_client(1, copied=True)._indices is None) == is_copied


def test_a_client_alone_in_its_process_lets_the_data_set_go():
    import gc
    import weakref

    fed = FederatedData(Module(tensors()), Iid(), 5, 0)
    client, base = fed.make_client(2, copied=True), weakref.ref(fed._dataset)
    del fed
    gc.collect()
    assert base() is None and client.num_samples == 10


class Targets(Plain):
    def __init__(self, base):
        super().__init__(base)
        self.targets = base.tensors[1].tolist()


class Dicts(Plain):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "label": int(y)}


@pytest.mark.parametrize("wrap", [lambda d: d, Plain, Targets, Dicts, lambda d: Subset(Targets(d), range(50))])
def test_labels_are_found_wherever_they_are(wrap):
    fed = FederatedData(Module(wrap(tensors())), ClassesPerClient(1), 5, 0)
    for client in range(1, 6):
        assert len({row % 5 for row in fed.indices(client).tolist()}) == 1


def test_labels_of_a_subset_are_those_of_its_rows():
    rows = [i for i in range(50) if i % 5 in (1, 3)]
    for base in (tensors(), Targets(tensors())):
        fed = FederatedData(Module(Subset(base, rows)), ClassesPerClient(1), 2, 0)
        ys = [{int(v) for _, y in values(fed.client(i).batches(generator(), num_epochs=1)) for v in y} for i in (1, 2)]
        assert sorted(map(sorted, ys)) == [[1], [3]]


def test_stored_labels_are_compared_with_a_few_samples_and_iid_needs_none():
    plain = Plain(TensorDataset(torch.rand(50, 2)))
    for dataset, partition, num in ((Targets(tensors(1000)), Dirichlet(1.0), 64), (plain, Iid(), 0)):
        FederatedData(Module(dataset), partition, 5, 0)
        assert dataset.num_reads == num


class Transformed(Targets):
    """As torchvision's: `targets` are as stored, samples go through `target_transform`."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + random.random() + np.random.rand(), int(y) // 3  # an augmentation


class Remapped(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y // 3

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def collated(samples):
    x, y = default_collate(samples)
    return x, y // 3


@pytest.mark.parametrize(
    ("dataset", "more"),
    [
        (Transformed(tensors(100)), {}),
        (Subset(Transformed(tensors(200)), range(100)), {}),
        (Remapped(Targets(tensors(200)), range(100)), {}),
        (Targets(tensors(100)), {"collate_fn": collated}),
    ],
)
def test_a_partition_by_class_counts_the_classes_of_the_training_step(dataset, more):
    """Classes 0, 1, 2 become 0, classes 3 and 4 become 1; a run folder of before parts by the stored five."""
    module = Module(dataset, batch_size=8, shuffle=True, **more)
    drawn = random.getstate(), torch.get_rng_state()
    fed = FederatedData(module, ClassesPerClient(1), 2, 0)
    assert drawn[0] == random.getstate() and torch.equal(drawn[1], torch.get_rng_state())
    assert fed.labels().tolist() == [row % 5 // 3 for row in range(100)]
    assert sorted(map(sorted, (fed.client(i).classes() for i in (1, 2)))) == [[0], [1]]
    old = FederatedData(module, Iid(), 2, 0, Rules(1))
    assert len(set(old.labels().tolist())) == (2 if isinstance(dataset, Remapped) else 5)


def test_a_loader_that_does_not_shuffle_keeps_its_order():
    """Each epoch is the client's rows as they lie in the data set; nothing is drawn."""
    module = Module(tensors(), batch_size=4)
    fed = FederatedData(module, Iid(), 3, 0)
    assert fed.notes == [
        "Module.train_dataloader() does not shuffle, so each client trains on its samples in the order of the data set"
    ]
    for copied in (False, True):
        client, own, draws = fed.make_client(2, copied=copied), fed.indices(2).tolist(), generator()
        batches = values(client.batches(draws, num_epochs=2))
        assert [int(x[0]) // 2 for xs, _ in batches for x in xs] == own * 2 and own == sorted(own)
        assert torch.equal(draws.get_state(), generator().get_state())
    before = FederatedData(module, Iid(), 3, 0, Rules(1))
    shuffled = FederatedData(Module(tensors(), batch_size=4, shuffle=True), Iid(), 3, 0)
    one, other = (data.client(2).batches(generator(), num_epochs=2) for data in (before, shuffled))
    assert before.notes == shuffled.notes == [] and equal(one, other)


def test_samples_without_labels_are_refused_by_a_partition_by_class():
    with pytest.raises(BadInput, match="no whole-number label"):
        FederatedData(Module(Plain(TensorDataset(torch.rand(9, 2)))), Dirichlet(1.0), 2, 0)


def test_by_column_reads_attributes_and_hugging_face_columns():
    datasets = pytest.importorskip("datasets")

    who = ["amy", "bob", "cat", "amy", "cat"]
    rows = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0, 4.0, 5.0], "label": [0, 1, 0, 1, 0], "who": who})
    with_attribute = tensors(5)
    with_attribute.who = who
    for data in (rows, with_attribute):
        fed = FederatedData(Module(data), ByColumn("who"), 3, 0)
        assert [fed.indices(i).tolist() for i in (1, 2, 3)] == [[0, 3], [1], [2, 4]]
    with pytest.raises(
        BadInput, match="column is 'speaker', but the training data has columns label, who, x: name one"
    ):
        FederatedData(Module(rows), ByColumn("speaker"), 3, 0)
    by_class = FederatedData(Module(rows.select([4, 3, 2])), ClassesPerClient(1), 2, 0)
    assert sorted(by_class.indices(i).tolist() for i in (1, 2)) == [[0, 2], [1]]
    (batch,) = values(FederatedData(Module(rows), Iid(), 1, 0).client(1).batches(generator(), 5, num_epochs=1))
    assert sorted(batch["x"].tolist()) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_transfer_hooks_of_a_data_module_are_refused_by_name():
    class Moves(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.raises(
        BadInput, match=r"^Moves\.on_after_batch_transfer would not be called.* in the LightningModule$"
    ):
        FederatedData(Moves(tensors()), Iid(), 2, 0)
