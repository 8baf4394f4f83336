"""`raafl.Federation` given what it cannot take: one line that names it."""

from __future__ import annotations

import pandas
import pytest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import raafl
from raafl.data import Dirichlet
from raafl.errors import BadInput
from tests.helpers.small_federations import federation, small_net
from tests.helpers.small_runs import digits, small_mlp


class Stream(IterableDataset):
    """It has a length, and no samples by number."""

    def __iter__(self):
        yield from range(3)

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("module", "data", "more", "message"),
    [
        (small_net(), digits(), {}, "module is a plain Sequential, and loss is missing"),
        (small_net, digits(), {}, "makes a plain Sequential, and loss is missing"),
        (3, digits(), {}, "module is 3: give a LightningModule"),
        (lambda: 3, digits(), {}, "a function that makes int"),
        (small_mlp(), digits(), {"loss": F.mse_loss}, "has its own training_step"),
        (small_mlp, 3, {}, "data is 3: give a LightningDataModule"),
        (small_mlp, (3, 4), {}, "train is int: give a data set"),
        (
            small_mlp,
            (pandas.DataFrame({"a": [1]}), None),
            {},
            "train is DataFrame, whose columns, not rows, are read by index: give torch.utils.data.TensorDataset",
        ),
        (small_mlp, type(digits()), {}, r"data is the class Digits: give an object, Digits\(...\)"),
        (
            small_mlp,
            (Stream(), None),
            {},
            "train is Stream, which can only be iterated, but samples are divided among clients by",
        ),
        (
            small_mlp,
            ([1], DataLoader([1])),
            {},
            r"test is a DataLoader: give its data set instead \(a Subset if it has a sampler\), with batch_size= and collate_fn=",
        ),
        (small_mlp, digits(), {"devices": "auto"}, "devices is auto: it says what the clients can do"),
        (
            nn.Module(),
            digits(),
            {"loss": F.mse_loss},
            r"module is Module, which has no forward: define forward\(self, x\)",
        ),
        (small_net(), digits(), {"loss": nn.MSELoss}, r"loss is the class MSELoss: give an object, MSELoss\(\)"),
        (
            small_net(),
            digits(),
            {"loss": F.mse_loss, "optimizer": 3},
            "optimizer is 3: give a function that makes one of a list",
        ),
        (small_mlp, digits(), {"batch_size": 3}, "batch_size is given, but has no effect with Digits"),
        (
            small_mlp,
            (DataLoader([1]), None),
            {"batch_size": 3},
            "batch_size is given, but has no effect with DataLoaders: set it",
        ),
        (
            small_mlp,
            (DataLoader([1]), [1]),
            {},
            "'test' is list, but 'train' is a DataLoader: give a DataLoader for 'test' too, or None",
        ),
        (small_mlp, digits(), {"devices": 3}, "their number is `clients`"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_runs(tmp_path, module, data, more, message):
    with pytest.raises(BadInput, match=message):
        federation(tmp_path / "run").simulate(module, data, **more)
    assert not (tmp_path / "run").exists()


def test_a_local_number_that_contradicts_the_clients_is_refused_before_anything_starts():
    with pytest.raises(
        BadInput, match=r"^local is 2, but the federation has clients=3: give one of them, or the same$"
    ):
        federation(clients=3).fit(small_mlp(), digits(), local=2)


def test_fit_without_ranks_says_how_to_get_them(tmp_path):
    with pytest.raises(BadInput, match=r"start the script with `torchrun .*local=4.*simulate"):
        federation().fit(small_mlp, digits())
    with pytest.raises(BadInput, match="no run is in progress"):
        federation().stop()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("dirichlet", r"partition is 'dirichlet': give an object, such as raafl\.data\.Dirichlet\(alpha=0\.5\)"),
        (Dirichlet, r"partition is the class Dirichlet: give an object, Dirichlet\(\.\.\.\)"),
        (
            {"class_path": "raafl.data.Dirichlet", "init_args": {"alpha": 0.3}},
            r"give an object, such as raafl\.data\.Dirichlet\(alpha=0\.3\)",
        ),
    ],
)
def test_a_partition_that_is_no_object_is_told_how_to_be_one(wrong, message):
    with pytest.raises(BadInput, match=message):
        raafl.Federation("fed_avg", partition=wrong)
    if isinstance(wrong, dict):
        with pytest.raises(BadInput, match=r"give an object, such as raafl\.fed_avg\(mu=1\), or its name"):
            raafl.Federation({"class_path": "raafl.fed_avg", "init_args": {"mu": 1}})


def test_a_setting_that_is_assigned_later_is_refused_since_no_run_reads_it():
    fed = federation()
    with pytest.raises(
        BadInput, match=r"^max_updates is set to 3, .* raafl\.Federation\(\.\.\., max_updates=\.\.\.\)$"
    ):
        fed.max_updates = 3
    fed.note = "an attribute of one's own"
    fed.callbacks, fed.clients = [], 2
    assert repr(fed).startswith("Federation(fed_avg, clients=2, ")


def test_plan_and_axes_name_an_argument_that_they_lack_and_take_one_name_or_rate():
    fed = federation()
    with pytest.raises(BadInput, match=r"^there is no argument 'optimiser': did you mean 'optimizer'\?$"):
        fed.plan(small_mlp, digits(), optimiser=3)
    names = [one.name.split()[0] for one in fed.plan(small_mlp, digits(), algorithms="fed_buff").plan.algorithms]
    assert names == ["fed_avg", "fed_buff"]
    assert list(fed.axes(small_mlp, digits(), rates=0.5).facts["rates"]) == ["0.5"]


def test_a_long_setting_is_cut_with_dots():
    fed = raafl.Federation("fed_avg", partition=Dirichlet(alpha=0.5), max_updates=8)
    assert repr(fed).endswith("partition=Dirichlet(test_share=0.0, validation_share=0.0, alpha=0.5..., max_updates=8)")
