"""Sparse gradients train as dense ones do, wherever they are read; an optimiser that takes no others is refused."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raafl.algorithms import fed_avg, fed_dyn, fed_prox, scaffold
from raafl.core.algorithm import Training
from raafl.core.payload import Payload
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.client_group import Buckets
from raafl.local.train import FabricOptions, LocalTrainer
from raafl.local.trainable import check_optimizer, takes_sparse
from raafl.submodel import FlatTensors, Submodels
from tests.local.bench import assignment

TEXTS = torch.tensor([[1, 2, 2], [0, 3, 4], [1, 1, 0], [4, 0, 2]])
LABELS = torch.tensor([0, 2, 1, 1])


class Bag(LightningModule):
    def __init__(self, sparse, optimizer=torch.optim.SGD, **options) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(5, 8, sparse=sparse), nn.Linear(8, 3)
        self.made = optimizer, options

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.table(batch[0])), batch[1])

    def configure_optimizers(self):
        optimizer, options = self.made
        return optimizer(self.parameters(), lr=0.1, **options)


def trained(sparse, algorithm, clip, **made):
    """The values after three steps of two samples each, of two batches to a step."""
    torch.manual_seed(0)
    module = Bag(sparse, **made)
    submodels = Submodels(module, (TEXTS, LABELS))
    options = FabricOptions(gradient_clip_val=clip, accumulate_grad_batches=2)
    training = Training(num_steps=6, num_epochs=None)
    trainer = LocalTrainer(submodels, algorithm.local, algorithm.merge.sends, training, options)
    received = FlatTensors.zeros(Payload(submodels, algorithm.local.down, algorithm.local.up).layout())
    for name, value in submodels.state(module).items():
        received[name].copy_(value)
    data = ClientData(TensorDataset(TEXTS, LABELS), torch.arange(4), batch_size=2)
    return dict(trainer.run(assignment(), received, data).tensors.items())


@pytest.mark.parametrize("algorithm", [fed_avg(), fed_prox(prox=0.1), fed_dyn(), scaffold(), scaffold(option=1)])
@pytest.mark.parametrize("made", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": torch.optim.AdamW}])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_sparse_table_is_trained_as_a_dense_one(algorithm, made, clip):
    for (name, one), other in zip(
        trained(True, algorithm, clip, **made).items(), trained(False, algorithm, clip, **made).values(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)


def test_gradients_of_several_processes_are_summed_dense():
    """Two processes that have the same gradient: the sum over both is twice it, and the mean is it."""
    table, other = nn.EmbeddingBag(3, 2, mode="sum", sparse=True), nn.Linear(2, 1, bias=False)
    parameters = [table.weight, other.weight]

    def twice(flat):
        return lambda: flat.mul_(2)

    buckets = Buckets(parameters, twice)
    table(torch.tensor([[0, 2, 2]])).sum().backward()
    buckets.end()
    buckets.average(2, [0.0, 1.0])  # of the parameters in reverse
    assert table.weight.grad.tolist() == [[1, 1], [0, 0], [2, 2]]
    assert other.weight.grad is None


@pytest.mark.parametrize(
    ("optimizer", "options", "takes"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.SGD, {"weight_decay": 0.1}, False),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.Adam, {}, False),
        (torch.optim.SparseAdam, {}, True),
    ],
)
def test_an_optimizer_is_given_sparse_gradients_only_where_its_step_takes_them(optimizer, options, takes):
    weight = nn.Parameter(torch.ones(3, 2))
    made = optimizer([weight], lr=0.1, **options)
    assert takes_sparse(made) == takes
    F.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    if takes:
        made.step()
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            made.step()


@pytest.mark.parametrize(
    ("local", "clip", "num_processes", "reader"),
    [
        (fed_prox(prox=0.1).local, None, 1, "the proximal term"),
        (fed_avg().local, 1.0, 1, "fabric.gradient_clip_val"),
        (scaffold().local, None, 1, "the algorithm's own steps"),
        (fed_avg().local, None, 2, "a client of several processes"),
    ],
)
def test_sparse_adam_is_refused_where_gradients_are_read(local, clip, num_processes, reader):
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(3, 2))])
    check_optimizer(optimizer, fed_avg().local, None)
    with pytest.raises(
        BadInput, match=f"accepts only sparse gradients, but {reader} needs dense ones: use torch.optim.Adam"
    ):
        check_optimizer(optimizer, local, clip, num_processes)
