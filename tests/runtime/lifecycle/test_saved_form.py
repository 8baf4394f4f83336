"""What modules save of themselves: a dozen of them go through a checkpoint and come back by plain Lightning."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
import torchmetrics
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raafl
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runtime.lifecycle.checkpointer import SavedForm
from raafl.submodel import FlatTensors
from raafl.submodel.cut.layers import persistent_buffers


class Base(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), 1.0

    def get_extra_state(self):
        return {"scale": self.scale, "shape": torch.Size([2]), "dtype": torch.bfloat16}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def forward(self, inputs):
        return self.linear(inputs) * self.scale


class ExtraState(Base):
    def __init__(self):
        super().__init__()
        self.layer = Scaled()

    def touch(self):
        self.layer.scale = 3.0

    def facts(self):
        return self.layer.scale


class ExtraTensor(Base):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(2)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def touch(self):
        self.seen = torch.tensor([1.0, 2.0])

    def facts(self):
        return self.seen.tolist()


class PersistentMetric(Base):
    def __init__(self):
        super().__init__()
        self.best = torchmetrics.MaxMetric()
        self.best.persistent(True)

    def touch(self):
        self.best.update(0.75)

    def facts(self):
        return float(self.best.max_value)


class ListMetric(Base):
    def __init__(self):
        super().__init__()
        self.all = torchmetrics.CatMetric()
        self.all.persistent(True)

    def touch(self):
        self.all.update(torch.tensor([1.0, 2.0]))

    def facts(self):
        return torch.cat([torch.as_tensor(value).flatten() for value in self.all.value]).tolist()


class OwnNames(Base):
    """A state dict by other names, such as those of a library's files."""

    def state_dict(self, *args, **kwargs):
        return OrderedDict((f"net/{name}", value) for name, value in super().state_dict(*args, **kwargs).items())

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict({name.removeprefix("net/"): value for name, value in state.items()}, strict)


class OnlyTrained(Base):
    """Frozen parameters are left out, as adapters do."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return OrderedDict((name, value) for name, value in found.items() if "backbone" not in name)


class SaveHook(Base):
    def __init__(self):
        super().__init__()
        self.vocabulary = ["a"]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["vocabulary"] = list(self.vocabulary)
        checkpoint["weight sum"] = float(self.layer.weight.sum())

    def on_load_checkpoint(self, checkpoint):
        self.vocabulary = checkpoint["vocabulary"]
        self.sum = checkpoint["weight sum"]

    def touch(self):
        self.vocabulary = ["a", "b"]

    def facts(self):
        return self.vocabulary, round(getattr(self, "sum", float(self.layer.weight.sum())), 4)


class DroppingHook(Base):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = checkpoint["state_dict"].pop("layer.bias") * 2

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["layer.bias"] = checkpoint.pop("own") / 2


class PostHook(Base):
    def __init__(self):
        super().__init__()
        self.layer.register_state_dict_post_hook(_halved)
        self.layer.register_load_state_dict_pre_hook(_doubled)


def _halved(module, state, prefix, metadata):
    state[prefix + "weight"] = state[prefix + "weight"] / 2


def _doubled(module, state, prefix, *more):
    state[prefix + "weight"] = state[prefix + "weight"] * 2


class Versioned(Base):
    """Layers convert what an older version saved: the version has to come along."""

    class Layer(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state, prefix, metadata, *more):
            if metadata.get("version", 1) < 2:
                state[prefix + "weight"] = state[prefix + "weight"] + 100
            super()._load_from_state_dict(state, prefix, metadata, *more)

    def __init__(self):
        super().__init__()
        self.layer = self.Layer(4, 2)


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Parametrized(Base):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.layer)
        self.norm = nn.BatchNorm1d(2)


ALL = [
    ExtraState,
    ExtraTensor,
    PersistentMetric,
    ListMetric,
    OwnNames,
    OnlyTrained,
    SaveHook,
    DroppingHook,
    PostHook,
    Versioned,
    Tied,
    Parametrized,
]


def other_values(module):
    """Values of a global model that are not those of the module."""
    named = {**dict(module.named_parameters()), **persistent_buffers(module)}
    return FlatTensors.from_named({name: value.detach() + 1 for name, value in named.items()})


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_plain_lightning_reads_what_the_module_saves(tmp_path, kind):
    """The same as from a module that has these values itself, saved by its own methods."""
    module = kind()
    getattr(module, "touch", int)()
    values, before = other_values(module), pickle.dumps(dict(module.named_parameters()))
    path = checkpoint.write(tmp_path, SavedForm(module).contents(7, values, {"x": 1}))
    assert pickle.dumps(dict(module.named_parameters())) == before
    loaded = kind.load_from_checkpoint(path, weights_only=True)
    for name, tensor in {**dict(loaded.named_parameters()), **persistent_buffers(loaded)}.items():
        if not (kind is OnlyTrained and "backbone" in name):
            assert torch.equal(tensor, values[name]), name
    assert isinstance(loaded, Tied) is (hasattr(loaded, "decode") and loaded.decode.weight is loaded.encode.weight)
    if hasattr(module, "facts"):
        with SavedForm(module).filled(values):
            expected = module.facts()
        assert loaded.facts() == expected
    again = checkpoint_reader.load(
        path
    )  # a run resumes from the values by raafl's names, whatever the module calls them
    assert again.version == 7 and again.raafl == {"x": 1}
    assert all(torch.equal(again.values[name], value) for name, value in values.items())


def test_values_that_the_state_dict_has_are_not_stored_twice(tmp_path):
    found = SavedForm(Tied()).contents(1, other_values(Tied()))
    assert found["raafl"]["values"] == {} and len(found["state_dict"]) == 5
    assert set(SavedForm(OnlyTrained()).contents(1, other_values(OnlyTrained()))["raafl"]["values"]) == {
        "backbone.weight",
        "backbone.bias",
    }


class Secretive(Base):
    def get_extra_state(self):
        return {"rule": lambda: 1}

    def set_extra_state(self, state):
        pass

    def on_save_checkpoint(self, checkpoint):
        checkpoint["open"] = {"file": object()}
        checkpoint["plain"] = (1, torch.float32)


def test_what_a_checkpoint_cannot_hold_is_left_out_and_said(tmp_path):
    lines = []
    found = SavedForm(Secretive()).contents(1, other_values(Secretive()), left_out=lines.append)
    assert "_extra_state" not in found["state_dict"] and found["plain"] == (1, torch.float32) and "open" not in found
    assert [line.split(" and ")[0].split(", which")[0] for line in lines] == [
        "_extra_state.rule in the state dict is a function",
        "on_save_checkpoint adds open.file, a object",
    ]
    path = checkpoint.write(tmp_path, found)
    assert Secretive.load_from_checkpoint(path, strict=False, weights_only=True) is not None


class Failing(Base):
    def state_dict(self, *args, **kwargs):
        raise RuntimeError("not gathered")


def rows():
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def run(folder, module, resume=None, **options):
    federation = raafl.Federation("fed_avg", clients=2, progress="quiet", output=folder, **options)
    return federation.simulate(module, (DataLoader(rows(), 8, shuffle=True), DataLoader(rows(), 8)), resume=resume)


def test_a_state_dict_that_fails_is_refused_at_the_start(tmp_path):
    with pytest.raises(BadInput, match=r"Failing\.state_dict.* fails: RuntimeError: not gathered \(.*test_saved_form"):
        run(tmp_path / "run", Failing(), max_updates=2)
    assert not (tmp_path / "run").exists()


class LivesOn(OnlyTrained):
    """The best accuracy so far, as lightning-hydra-template logs it: the metric is updated at the end of each evaluation."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.best = torchmetrics.classification.BinaryAccuracy(), torchmetrics.MaxMetric()
        self.best.persistent(True)

    def validation_step(self, batch, index):
        self.accuracy(self.layer(batch[0]).softmax(1)[:, 1], batch[1])
        self.log("acc", self.accuracy)

    def on_validation_epoch_end(self):
        self.best(self.accuracy.compute() * (-1 if self.layer.bias.sum() == 0 else 1))
        self.log("best", self.best.compute())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=3.0)  # up and down


def test_a_metric_that_is_not_logged_itself_lives_through_evaluations_resumes_and_checkpoints(tmp_path):
    torch.manual_seed(0)
    module = LivesOn()
    options = {"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9}
    whole = run(tmp_path / "whole", module, max_updates=12, **options)
    accuracies = [row["acc"] for row in whole.metrics]
    best = [max(accuracies[: place + 1]) for place in range(len(accuracies))]
    assert accuracies != best and [row["best"] for row in whole.metrics] == best
    last = LivesOn.load_from_checkpoint(checkpoint.newest(tmp_path / "whole"))
    assert float(last.best.max_value) == pytest.approx(best[-1])

    old = run(tmp_path / "old", module, max_updates=12, rules=1, **options)
    assert [row["best"] for row in old.metrics] == accuracies


def test_a_run_that_is_resumed_goes_on_with_the_metrics_and_frozen_values_that_it_had(tmp_path):
    torch.manual_seed(0)
    module = LivesOn()
    options = {"eval_every": 1, "checkpoint_every": 1}
    whole = run(tmp_path / "whole", module, max_updates=12, **options)

    class Stop(raafl.Callback):
        def on_evaluate(self, run, metrics):
            if run.version == 3:
                run.stop("tired")

    run(tmp_path / "cut", module, max_updates=12, callbacks=[Stop()], **options)
    rest = run(None, module, resume=tmp_path / "cut", max_updates=12, **options)
    assert rest.summary["model_digest"] == whole.summary["model_digest"]
    assert [row["best"] for row in rest.metrics] == [row["best"] for row in whole.metrics]
