"""`raafl.Federation`: what it takes becomes the run that a config would have made, and what it says of itself."""

from __future__ import annotations

import json
import re
import signal
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import raafl
from raafl.api.python_objects import digest
from raafl.commands.cli import main
from raafl.core.algorithm import Local
from raafl.core.options import Training
from raafl.data import Dirichlet, Iid
from raafl.errors import BadInput
from raafl.runtime.run import simulate
from tests.habits.source import ROOT
from tests.helpers.refusals import refuses
from tests.helpers.small_federations import federation, small_net
from tests.helpers.small_runs import digits, experiment, small_mlp


def seeded_net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return small_net()


class Steps(LightningModule):
    """The least that Lightning asks for."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_the_run_is_that_of_the_same_experiment(tmp_path):
    """Handing over a function leaves the weights to the run's seed, as a config does."""
    summary, _ = simulate(experiment(tmp_path / "config"))
    result = federation(tmp_path / "python", max_updates=12).simulate(small_mlp, digits())
    assert result.summary["model_digest"] == summary["model_digest"]
    assert digest(result.module) != digest(small_mlp())


def test_the_result_has_the_final_model_and_the_tables(tmp_path):
    result = federation(tmp_path / "run").simulate(small_mlp, digits())
    data = digits()
    data.setup()
    images, labels = next(iter(DataLoader(data.test, batch_size=len(data.test))))
    accuracy = (result.module(images).argmax(dim=1) == labels).float().mean().item()
    assert accuracy == pytest.approx(result.final["accuracy"])
    assert result.metrics[-1]["accuracy"] == result.final["accuracy"]
    assert len(result.clients) == 8
    assert result.module._trainer is None
    assert json.loads((result.folder / "summary.json").read_text()) == json.loads(json.dumps(result.summary))
    assert not result.module.training


def test_a_result_keeps_its_tables_where_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fed = raafl.Federation("fed_avg", clients=2, max_updates=2, num_steps=1, progress="quiet", output="run")
    result = fed.simulate(small_mlp, digits())
    monkeypatch.chdir("/")
    assert result.folder == tmp_path / "run" and len(result.clients) == 2 and "<svg" in result._repr_html_()


def test_a_federation_and_a_result_are_shown_briefly(tmp_path):
    fed = federation(tmp_path / "run", "fed_avg", callbacks=raafl.EarlyStopping("loss"))
    text = repr(fed)
    assert (
        text.startswith("Federation(fed_avg, clients=") and "devices=[device-1, device-2, device-3, device-4]" in text
    )
    assert "max_updates=8" in text and "EarlyStopping(metric='loss'" in text and "\n" not in text
    result = fed.simulate(small_mlp, digits())
    assert re.fullmatch(
        r"Result\(fed_avg: loss [\d.]+, accuracy [\d.]+.* after 8 updates, 2 versions, [\d.]+ s; finished 'max_updates', "
        rf"folder '{tmp_path}/run'\)",
        repr(result),
    )
    assert len(repr(result)) < 300
    assert repr(raafl.Federation()) == "Federation(fed_raa, clients=by devices, ranks or 10, devices=None)"


def test_a_module_that_was_made_keeps_its_weights_and_starts_every_run_anew(tmp_path):
    net = seeded_net()
    before = digest(net)
    fed = federation(tmp_path / "first")
    first = fed.simulate(net, digits(), loss=F.cross_entropy)
    assert digest(net) == before
    again = federation(tmp_path / "again").simulate(net, digits(), loss=F.cross_entropy)
    assert again.summary["model_digest"] == first.summary["model_digest"]
    assert type(first.module) is nn.Sequential
    assert digest(first.module) != before


def test_a_plain_module_is_trained_as_a_lightning_module_with_the_same_steps(tmp_path):
    class Same(Steps):
        def __init__(self):
            super().__init__()
            self.net = seeded_net()

        def validation_step(self, batch, batch_idx):
            return {"accuracy": (self(batch[0]).argmax(dim=1) == batch[1]).float().mean()}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)  # the default of a plain module

    # a class of this function alone, as of a notebook: workers are forked
    lightning = federation(tmp_path / "lightning", workers=2).simulate(Same(), digits())
    plain = federation(tmp_path / "plain").simulate(seeded_net(), digits(), loss=nn.CrossEntropyLoss())
    adam = federation(tmp_path / "adam").simulate(
        seeded_net(),
        digits(),
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        metrics={"top": lambda output, target: output.max()},
    )
    assert plain.summary["model_digest"] == lightning.summary["model_digest"]
    assert adam.summary["model_digest"] != plain.summary["model_digest"]
    assert set(plain.final) == {"loss", "accuracy"}
    assert set(adam.final) == {"loss", "accuracy", "top"}


def test_a_module_without_a_validation_step_is_measured_by_its_training_step(tmp_path):
    result = federation(tmp_path / "run", "fed_raa").simulate(Steps, digits())
    assert set(result.final) == {"loss"}
    assert isinstance(result.module, Steps)


def test_without_a_test_set_the_model_is_measured_on_training_samples_and_that_is_said(tmp_path, capsys):
    data = digits()
    data.setup()
    more = {"progress": "plain", "max_updates": 1, "clients": 1, "devices": None}
    result = federation(tmp_path / "run", **more).simulate(small_mlp, (data.train, None), batch_size=2000)
    said = " ".join(capsys.readouterr().out.split())  # lines are fitted to the terminal
    assert (
        "Datasets has no test or validation set: the global model is measured on 1,438 samples of the training" in said
    )
    assert (
        "batches of 2000 are more than 1 of 1 clients have, so each of these trains on all of its 1438 samples" in said
    )
    batch = next(iter(DataLoader(data.train, batch_size=len(data.train))))
    assert result.final["loss"] == pytest.approx(F.cross_entropy(result.module(batch[0]), batch[1]).item(), rel=1e-4)


def test_a_compiled_module_is_trained_as_the_one_that_was_compiled(tmp_path):
    steps = Steps()
    plain = federation(tmp_path / "plain", max_updates=4).simulate(steps, digits())
    compiled = federation(tmp_path / "compiled", max_updates=4)
    steps.net = torch.compile(steps.net, backend="eager")
    result = compiled.simulate(torch.compile(steps, backend="eager"), digits())
    assert result.summary["model_digest"] == plain.summary["model_digest"]
    assert type(result.module) is Steps and type(result.module.net) is nn.Sequential
    assert "_orig_mod.0" not in str(steps.net) and hasattr(steps.net, "_orig_mod"), "what was given stays as it is"
    assert compiled.replay(result.folder, steps, digits())["equal"]


def test_data_sets_give_the_run_of_the_same_data_module(tmp_path):
    data = digits()
    data.setup()
    module = federation(tmp_path / "module").simulate(small_mlp, data)
    pair = federation(tmp_path / "pair").simulate(small_mlp, (data.train, data.test), batch_size=64)
    assert pair.summary["model_digest"] == module.summary["model_digest"]
    assert pair.final == module.final


def test_batch_size_and_collate_fn_of_a_loader_are_kept(tmp_path):
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

    class Data(LightningDataModule):
        def train_dataloader(self):
            inputs = torch.arange(60.0).reshape(30, 2)
            return DataLoader(TensorDataset(inputs, torch.arange(30) % 2), batch_size=7, collate_fn=collate)

        test_dataloader = train_dataloader

    fed = federation(tmp_path / "run", num_epochs=1, num_steps=None, clients=2, devices=None, max_updates=2)
    fed.simulate(lambda: nn.Linear(2, 2), Data(), loss=F.cross_entropy)
    # 15 samples for each client, in batches of 7, 7 and 1; the test set twice in batches of 7, 7, 7, 7 and 2,
    # after its first batch by itself, twice: it is read, and a step is tried
    assert set(seen) == {1, 2, 7}
    assert seen.count(7) == 2 * 2 + 2 * 4 + 2


def test_loaders_count_with_their_samplers_batch_size_and_drop_last(tmp_path):
    """A batch norm that a last batch of one sample would end: 17 samples for each client, in batches of 8."""
    g = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(60, 3, generator=g), torch.arange(60) % 2)
    train, test = list(range(34)), list(range(40, 60))
    loaders = (
        DataLoader(rows, 8, sampler=SubsetRandomSampler(train), drop_last=True),
        DataLoader(rows, 8, sampler=SubsetRandomSampler(test)),
    )
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fed = federation(tmp_path / "run", num_epochs=1, num_steps=None, clients=2, devices=None, max_updates=2)
    result = fed.simulate(net, loaders, loss=F.cross_entropy)
    assert [(row["num_samples"], row["num_steps"]) for row in result.clients[:2]] == [("17", "2")] * 2
    module, (x, y) = result.module.eval(), (tensor[test] for tensor in rows.tensors)
    with torch.no_grad():
        assert result.final["loss"] == pytest.approx(F.cross_entropy(module(x), y).item(), rel=1e-5)
    refused = federation(tmp_path / "two", num_epochs=1, num_steps=None, clients=2, devices=None, max_updates=2)
    with pytest.raises(BadInput, match="has a batch of one sample, its 17 samples in batches of 8: set drop_last=True"):
        refused.simulate(net, (Subset(rows, train), None), loss=F.cross_entropy, batch_size=8)


def test_several_inputs_and_mappings_reach_a_plain_module(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, a, b):
            return self.a(a) + self.b(b)

    x, y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    rows = [{"a": one, "b": one, "label": int(label)} for one, label in zip(x, y, strict=True)]
    tensors = TensorDataset(x, x, y)
    runs = []
    for name, data in (("tuples", (tensors, tensors)), ("mappings", (rows, rows))):
        fed = federation(tmp_path / name)
        runs.append(fed.simulate(Two, data, loss=F.cross_entropy, batch_size=5))
    assert runs[0].summary["model_digest"] == runs[1].summary["model_digest"]
    assert runs[0].final["accuracy"] == runs[1].final["accuracy"]


def test_texts_by_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    words = [f"{'good' if i % 2 else 'bad'} film {i}" for i in range(64)]
    rows = {"sentence": words, "label": [i % 2 for i in range(64)]}
    hidden = {"sentence": words[:8], "label": [-1] * 8}
    splits = {name: datasets.Dataset.from_dict(rows) for name in ("train", "validation")}
    datasets.DatasetDict({**splits, "test": datasets.Dataset.from_dict(hidden)}).save_to_disk(str(tmp_path / "texts"))
    bag = lambda: nn.Sequential(nn.EmbeddingBag(20_000, 8), nn.Linear(8, 2))  # noqa: E731

    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = bag()

        def forward(self, tokens, mask):
            return self.net(tokens)

    fed = federation(tmp_path / "run", max_updates=4, clients=2, devices=None)
    result = fed.simulate(Texts, str(tmp_path / "texts"), loss=F.cross_entropy, batch_size=8)
    assert result.summary["updates_merged"] == 4
    assert 0 <= result.final["accuracy"] <= 1  # labels of the hidden test split would not do


def test_config_yaml_says_what_ran(tmp_path):
    fed = federation(
        tmp_path / "run",
        raafl.fed_raa(alpha=0.6),
        devices=[{"name": "phone", "flops_per_s": 5e7, "count": 2}],
        partition=Dirichlet(alpha=0.7),
        precision="bf16-mixed",
        callbacks=raafl.EarlyStopping(),
    )
    fed.simulate(seeded_net(), digits(), loss=F.cross_entropy, optimizer=torch.optim.Adam)
    text = (tmp_path / "run" / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert "# callbacks: EarlyStopping(metric='accuracy'" in text
    assert config["clients"] == 2
    assert config["fabric"]["precision"] == "bf16-mixed"
    assert (config["train"]["num_steps"], config["train"]["num_epochs"]) == (3, None)
    assert config["partition"]["class_path"] == "raafl.data.partition.Dirichlet"
    assert config["partition"]["init_args"]["alpha"] == 0.7
    model = config["model"]["init_args"]
    assert model["given"] == "torch.nn.modules.container.Sequential"
    assert model["shown"] == repr(seeded_net())
    assert model["settings"] == {"loss": "torch.nn.functional.cross_entropy", "optimizer": "torch.optim.adam.Adam"}
    assert config["algorithm"]["init_args"]["given"] == "fed_raa"
    assert "alpha 0.6" in config["algorithm"]["init_args"]["parts"]["merge"]


def test_on_the_command_line_such_a_run_gets_one_clear_line(tmp_path, capsys):
    folder = tmp_path / "run"
    federation(folder, max_updates=4).simulate(seeded_net(), digits(), loss=F.cross_entropy)
    again = ["simulate", "--config", str(folder / "config.yaml"), "--output", str(tmp_path / "other")]
    for command in (["replay", str(folder)], again):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "this run's data was a Python object, raafl.data.sources.Digits" in line
        assert "raafl.Federation(...).replay(RUN, module, data)" in line


def test_a_replay_wants_the_weights_that_the_run_began_with(tmp_path):
    fed = federation(tmp_path / "run", raafl.fed_raa(alpha=0.6))
    result = fed.simulate(seeded_net(), digits(), loss=F.cross_entropy)
    found = fed.replay(result.folder, seeded_net(), digits(), loss=F.cross_entropy)
    assert (found["equal"], found["recorded_digest"]) == (True, result.summary["model_digest"])
    with pytest.raises(BadInput, match=r"torch\.manual_seed before the module is made"):
        fed.replay(result.folder, seeded_net(1), digits(), loss=F.cross_entropy)


def test_a_run_goes_on_only_with_the_settings_it_had(tmp_path):
    federation(tmp_path / "run").simulate(small_mlp, digits())
    with pytest.raises(BadInput, match=r"resume: seed, train not as in the run's config\.yaml"):
        federation(seed=1, num_steps=4).simulate(small_mlp, digits(), resume=tmp_path / "run")
    with pytest.raises(
        BadInput, match=r"output is '.*new', but a run that is resumed goes on in its own folder, '.*run':"
    ):
        federation(tmp_path / "new").simulate(small_mlp, digits(), resume=tmp_path / "run")
    with pytest.raises(BadInput, match="is not a run folder"):
        federation().simulate(small_mlp, digits(), resume=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "problem"), [(b"seed: [", "is not valid YAML: line 1, column 8"), (b"name: \xff", "UTF-8")]
)
def test_a_run_whose_config_cannot_be_read_is_named(tmp_path, content, problem):
    """It ended with an error of the YAML library; the command names the file, too."""
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(BadInput, match=f"resume: '.*config.yaml' .*{problem}"):
        federation().simulate(small_mlp, digits(), resume=tmp_path)


def test_a_run_goes_on_only_with_the_arrays_it_had_and_takes_numbers_of_numpy(tmp_path):
    """Of an array of 2,000 entries NumPy prints the first and last three; YAML knows no number of NumPy."""

    class Weighted(Steps):
        def __init__(self, weights, rate):
            super().__init__()
            self.save_hyperparameters()

    def made(last):
        torch.manual_seed(0)
        weights = np.ones(2000)
        weights[1000] = last
        return Weighted(weights, np.float64(0.1))

    federation(tmp_path / "run").simulate(made(1.0), digits())
    with pytest.raises(BadInput, match=r"resume: model not as in"):
        federation(max_updates=12).simulate(made(1.5), digits(), resume=tmp_path / "run")
    with pytest.raises(BadInput, match="whose run is finished"):  # what is checked after the settings
        federation(max_updates=12).simulate(made(1.0), digits(), resume=tmp_path / "run")


def test_a_run_goes_on_only_with_the_arrays_of_its_method_and_partition(tmp_path):
    @dataclass(frozen=True)
    class Weighted(Local):
        weights: object = None

    @dataclass(frozen=True)
    class Shares(Iid):
        shares: object = None

    def made(method, partition, **more):
        arrays = np.ones((2, 2000))
        arrays[:, 1000] = method, partition
        weighted = replace(raafl.fed_avg(), local=Weighted(weights={"of classes": [torch.tensor(arrays[0])]}))
        return federation(algorithm=weighted, partition=Shares(shares=arrays[1]), **more)

    made(1.0, 1.0, output=tmp_path / "run").simulate(small_mlp, digits())
    for method, partition, other in (
        (2.0, 1.0, "algorithm"),
        (1.0, 2.0, "partition"),
        (2.0, 2.0, "partition, algorithm"),
    ):
        with pytest.raises(BadInput, match=f"resume: ({other}|algorithm, partition) not as in"):
            made(method, partition).simulate(small_mlp, digits(), resume=tmp_path / "run")
    with pytest.raises(BadInput, match="whose run is finished"):
        made(1.0, 1.0).simulate(small_mlp, digits(), resume=tmp_path / "run")


def test_a_run_goes_on_only_with_the_weights_it_began_with_and_says_how_to_have_them(tmp_path):
    federation(tmp_path / "run", raafl.fed_raa()).simulate(seeded_net(), digits(), loss=F.cross_entropy)
    with pytest.raises(BadInput, match=r"model not as in .*torch\.manual_seed before it is made"):
        federation(algorithm=raafl.fed_raa()).simulate(
            seeded_net(1), digits(), loss=F.cross_entropy, resume=tmp_path / "run"
        )


def test_a_run_off_the_main_thread_leaves_signals_alone(tmp_path):
    before, results = signal.getsignal(signal.SIGINT), []
    seen = raafl.LambdaCallback(on_version=lambda run, version: results.append(signal.getsignal(signal.SIGINT)))
    fed = federation(tmp_path / "run", callbacks=seen, max_updates=4)
    thread = threading.Thread(target=lambda: results.append(fed.simulate(small_mlp, digits())))
    thread.start()
    thread.join()
    assert results[0] is before
    assert results[-1].summary["updates_merged"] == 4


def test_the_callback_of_the_docs_measures(tmp_path):
    """tests/docs/test_blocks.py runs the page's blocks."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if "class SizeTracker" in block]
    names = {"__name__": "block"}
    exec(block, names)
    result = federation(tmp_path / "run", callbacks=names["SizeTracker"]()).simulate(small_mlp, digits())
    assert result.final["error"] == 1 - result.final["accuracy"]


def test_a_run_leaves_the_process_as_it_was(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    federation(tmp_path / "run", threads=2).simulate(small_mlp, digits())
    assert torch.rand(1) == expected
    assert torch.get_num_threads() == threads


def test_a_run_leaves_the_generators_of_an_emulated_gpu_as_they_were(tmp_path, emulated_cuda):
    torch.cuda.manual_seed_all(5)
    expected = [torch.rand(1, device=f"cuda:{index}").item() for index in range(2)]
    torch.cuda.manual_seed_all(5)
    short = {"max_updates": 2, "num_steps": 1, "eval_every": 100}
    federation(tmp_path / "run", accelerator="cuda", **short).simulate(small_mlp, digits())
    assert [torch.rand(1, device=f"cuda:{index}").item() for index in range(2)] == expected


class Misnamed(raafl.Callback):
    def on_evaluation(self, run, metrics):
        """Never called: the hook is on_evaluate."""


class Both(raafl.Callback, EarlyStopping):
    """A callback of Lightning's Trainer, too, which has methods of other names."""

    on_gpu = True


def test_a_callback_of_two_frameworks_has_the_methods_of_both():
    both = Both("loss")
    assert raafl.Federation("fed_avg", callbacks=both).callbacks == [both]


test_a_setting_that_is_none_is_named = refuses(
    raafl.Federation,
    ({"max_update": 3}, "Federation has no 'max_update': did you mean 'max_updates'"),
    ({"algorithm": "fed_rra"}, "algorithm is 'fed_rra': did you mean 'fed_raa'"),
    ({"train": {"epochs": 1}}, "unknown field train.epochs"),
    ({"devices": [{"name": "x", "flops": 1}]}, "unknown field devices.flops"),
    ({"devices": 3}, "devices is 3: it says what the clients can do"),
    ({"devices": 0.5}, "give a list of devices"),
    ({"devices": ["iphone-99"]}, "device 'iphone-99' is not in raafl's catalogue, and flops_per_s is missing"),
    ({"max_epochs": 3}, "Federation has no 'max_epochs': a run ends by max_updates"),
    (
        {"callbacks": object()},
        "callbacks has an object of object: give objects of raafl.Callback; callbacks of Lightning's Trainer do not work here",
    ),
    (
        {"callbacks": [raafl.EarlyStopping]},
        r"callbacks has the class EarlyStopping: give an object, EarlyStopping\(\)",
    ),
    (
        {"callbacks": EarlyStopping("loss")},
        "give objects of raafl.Callback, such as raafl.EarlyStopping; callbacks of Lightning's Trainer",
    ),
    (
        {"callbacks": Misnamed()},
        "callbacks: Misnamed has the method on_evaluation, which raafl never calls: did you mean 'on_ev",
    ),
    ({"algorithm": raafl.fed_avg}, r"algorithm is fed_avg: give what it makes, raafl.fed_avg\(\), or its name"),
    ({"guard": 3}, "guard is 3: give its fields as a dict"),
    ({"clients": 2.5}, "clients is 2.5: give a whole number or null"),
    ({"lr_time_s": "5m"}, "train.lr_time_s is '5m': give a number or null"),
    ({"lr_versions": "3"}, "train.lr_versions is '3': give a whole number or null"),
    ({"train": {"num_steps": 2.5}}, "train.num_steps is 2.5: give a whole number or null"),
    ({"train": Training(lr_schedule="linear", lr_versions=True)}, "train.lr_versions is True: give a whole number"),
    ({"max_updates": "auto"}, "max_updates is 'auto': give a whole number or null"),
    ({"target": 0.9}, "target is 0.9: give text or a list of texts or null"),
    ({"overlap": "no", "seed": 1.5}, "overlap is 'no': give true or false\nseed is 1.5: give a whole number"),
    ({"devices": [{"flops_per_s": "fast"}]}, "devices.flops_per_s is 'fast': give a number"),
)
