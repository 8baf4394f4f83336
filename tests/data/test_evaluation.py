"""What a model is measured on, the example batch, and loaders that cannot be used."""

import time

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from raafl.data import federated
from raafl.data.federated import ClientData, FederatedData
from raafl.data.partition import Iid
from raafl.errors import BadInput
from raafl.rules import Rules
from tests.data.modules import Module, Plain, equal, generator, tensors


class WithTest(Module):
    def test_dataloader(self):
        return DataLoader(self.test, batch_size=4)


class WithVal(Module):
    def val_dataloader(self):
        return DataLoader(self.test, batch_size=4)


WITH_TEST = list(zip(DataLoader(tensors(10), batch_size=4), [4, 4, 2], strict=True))


def test_test_set_in_order(monkeypatch):
    for kind, calls in ((WithTest, ["prepare", "fit", "test"]), (WithVal, ["prepare", "fit"])):
        for test in (tensors(10), Plain(tensors(10)), Subset(tensors(20), range(10))):
            module = kind(tensors(), test)
            fed = FederatedData(module, Iid(), 2, 0)
            expected = list(zip(DataLoader(tensors(10), batch_size=4), [4, 4, 2], strict=True))
            assert equal(fed.test_batches(), expected) and equal(fed.test_batches(), expected)
            assert module.calls == calls
            assert [(len(y), num) for (_, y), num in fed.test_batches(7)] == [(7, 7), (3, 3)]
            with monkeypatch.context() as patched:
                patched.setattr(federated, "_MOST_COPIED_BYTES", 0)
                assert equal(FederatedData(kind(tensors(), test), Iid(), 2, 0).test_batches(), expected)


@pytest.mark.parametrize(("num", "expected"), [(10, [4, 4]), (8, [4, 4]), (3, [3])])
@pytest.mark.parametrize("wrap", [lambda data: data, Plain])
def test_an_evaluation_drops_the_last_batch_as_its_loader_does(wrap, num, expected):
    """As Lightning's Trainer; a set of less than a batch is measured whole, since nothing else is left."""

    class Dropping(Module):
        def val_dataloader(self):
            return DataLoader(wrap(tensors(num)), batch_size=4, drop_last=True)

    fed = FederatedData(Dropping(tensors()), Iid(), 2, 0)
    assert [(len(y), n) for (_, y), n in fed.test_batches()] == [(n, n) for n in expected]
    assert [n for _, n in fed.test_batches(first=1)] == expected[1:]
    before = FederatedData(Dropping(tensors()), Iid(), 2, 0, Rules(1))
    assert sum(n for _, n in before.test_batches()) == num


def test_which_of_two_sets_is_measured_is_said():
    class Both(WithTest, WithVal):
        pass

    same = FederatedData(Both(tensors(), tensors(10)), Iid(), 2, 0)
    assert equal(same.test_batches(), WITH_TEST) and same.final_batches() is None and not same.notes  # one data set
    assert same.measured == "Both.val_dataloader()"

    class Two(WithTest):
        def val_dataloader(self):
            return DataLoader(tensors(3), batch_size=2)

    fed = FederatedData(Two(tensors(), tensors(10)), Iid(), 2, 0)
    assert [(len(y), num) for (_, y), num in fed.test_batches()] == [(2, 2), (1, 1)]
    final = fed.final_batches()
    assert equal(final(), WITH_TEST) and equal(final(first=2), WITH_TEST[2:])
    assert fed.notes == [
        "the global model is measured on Two.val_dataloader() during the run, and on test_dataloader() once, at its end, as "
        "test/..."
    ]
    before = FederatedData(Two(tensors(), tensors(10)), Iid(), 2, 0, Rules(1))
    assert equal(before.test_batches(), WITH_TEST) and before.final_batches() is None and not before.notes
    assert (fed.measured, before.measured) == ("Two.val_dataloader()", "Two.test_dataloader()")
    for kind, measured in ((WithTest, "WithTest.test_dataloader()"), (WithVal, "WithVal.val_dataloader()")):
        fed = FederatedData(kind(tensors(), tensors(10)), Iid(), 2, 0)
        next(iter(fed.test_batches()))
        assert not fed.notes and fed.measured == measured


@pytest.mark.parametrize("test", [None, []])
def test_without_test_data_evenly_spaced_training_samples_are_measured_on(monkeypatch, test):
    class Nothing(Module):
        def val_dataloader(self):
            return test

    monkeypatch.setattr(federated, "_MOST_MEASURED", 5)
    fed = FederatedData(Nothing(tensors(50)), Iid(), 2, 0)
    assert not fed.notes, "nothing has been measured yet"
    ((batch, _),) = fed.test_batches()
    assert batch[0][:, 0].tolist() == [0.0, 20.0, 40.0, 60.0, 80.0]  # rows 0, 10, 20, 30, 40
    assert fed.measured == "Nothing.train_dataloader()"
    assert fed.notes == [
        "Nothing has no test or validation set: the global model is measured on 5 samples of the training set, which says "
        "nothing of new data"
    ]


def test_a_missing_file_is_said_with_the_class_that_reads_it(tmp_path):
    class Csv(Module):
        def setup(self, stage):
            (tmp_path / "train.csv").read_text()

    with pytest.raises(
        BadInput, match=f"Csv cannot read its data: No such file or directory '{tmp_path}/train.csv': put"
    ) as e:
        FederatedData(Csv(tensors()), Iid(), 2, 0)
    assert e.value.field == "data"


def test_what_fails_in_the_code_that_reads_is_said_with_its_line():
    class Shuffled(Module):
        def train_dataloader(self):
            return DataLoader(tensors(0), batch_size=2, shuffle=True)  # torch's own sampler raises here

    with pytest.raises(
        BadInput,
        match=r"Shuffled cannot read its data: ValueError: num_samples .* \(.*test_evaluation.py:\d+\): is there",
    ) as e:
        FederatedData(Shuffled(tensors()), Iid(), 2, 0)
    assert e.value.field == "data"


def test_a_missing_package_is_to_be_installed():
    class Scans(Module):
        def setup(self, stage):
            import no_such_reader  # noqa: F401

    with pytest.raises(BadInput, match=r"No module named 'no_such_reader' \(.*\): install that package$"):
        FederatedData(Scans(tensors()), Iid(), 2, 0)


@pytest.mark.parametrize(("train", "test", "name"), [(0, 5, "train"), (5, 0, "val")])
def test_data_without_samples_is_refused(train, test, name):
    with pytest.raises(BadInput, match=rf"the data set of {name}_dataloader\(\) is TensorDataset without any samples"):
        FederatedData(WithVal(tensors(train), tensors(test), batch_size=8), Iid(), 2, 0).test_batches()


def test_lightnings_own_datamodule_from_data_sets_works():
    module = LightningDataModule.from_datasets(tensors(), test_dataset=tensors(6), batch_size=5)
    fed = FederatedData(module, Iid(), 2, 0)
    assert fed.batch_size == 5 and [num for _, num in fed.test_batches()] == [5, 1]


def test_example_batch_is_the_first_samples_collated():
    x, y = FederatedData(Module(tensors()), Iid(), 2, 0).example_batch(3)
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]] and y.tolist() == [0, 1, 2]
    assert len(FederatedData(Module(tensors(4)), Iid(), 2, 0).example_batch(100)[1]) == 4


def test_unusable_loaders_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class Two(Module):
        def train_dataloader(self):
            return {"a": super().train_dataloader()}

    with pytest.raises(
        BadInput,
        match=r"the data set of train_dataloader\(\) is Stream, which can only be iterated, but samples are divided among",
    ):
        FederatedData(Module(Stream(), batch_size=8), Iid(), 2, 0)
    with pytest.raises(BadInput, match=r"train_dataloader\(\) returned dict"):
        FederatedData(Two(tensors()), Iid(), 2, 0)


def test_the_users_collate_function_is_used_for_training_and_example():
    module = Module(
        tensors(), batch_size=4, collate_fn=lambda samples: {"n": len(samples), "all": default_collate(samples)}
    )
    fed = FederatedData(module, Iid(), 2, 0)
    assert [b["n"] for b, _ in fed.client(1).batches(generator(), num_epochs=1)] == [4] * 6 + [1]
    assert fed.example_batch(2)["n"] == 2


def test_batches_cost_little_more_than_bare_indexing():
    """Against `x[idx], y[idx]` on tensors of the client's own: no more than 20 microseconds a batch above it."""
    x, y = torch.rand(4096, 784), torch.randint(0, 10, (4096,))
    client = ClientData(TensorDataset(x, y), torch.arange(4096))

    def bare():
        order = torch.randperm(4096, generator=generator())
        for i in range(0, 4096, 32):
            idx = order[i : i + 32]
            x[idx], y[idx]

    def ours():
        for _ in client.batches(generator(), 32, num_epochs=1):
            pass

    def best_s(run):
        times = []
        for _ in range(15):
            start_s = time.thread_time()
            run()
            times.append(time.thread_time() - start_s)
        return min(times)

    assert best_s(ours) < best_s(bare) + 128 * 20e-6
