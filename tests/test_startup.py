"""What a process imports before it has done anything, and what it costs a client rank."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
from contextlib import suppress

import pytest

from raafl.lean_import import quick_imports
from tests.habits.source import ROOT
from tests.helpers.forked_command import in_fork

HEAVY = (
    "lightning",
    "transformers",
    "datasets",
    "plotly",
    "wandb",
    "sklearn",
    "torchvision",
    "scipy",
    "pandas",
    "matplotlib",
    "torchmetrics",
    "prometheus_client",
    "opentelemetry",
)


BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}


def run(code: str) -> object:
    """Run `code` in a fresh interpreter and return what it printed last, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_after(code: str, names: tuple[str, ...] = HEAVY) -> object:
    return run(f"{code}\nimport sys, json\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))")


def test_import_raafl_is_light():
    assert loaded_after("import raafl") == []


@pytest.mark.parametrize(
    "modules", ["raafl.lean_import", "raafl.commands.watch, raafl.runfolder.journal, raafl.runfolder.outcome"]
)
def test_modules_without_tensors_do_not_import_torch(modules):
    assert loaded_after(f"import {modules}", ("torch", "numpy", "rich", *HEAVY)) == []


def test_a_report_needs_no_torch_to_read_run_folders():
    assert loaded_after("import raafl.commands.report", ("torch", *HEAVY)) == []


def test_a_run_imports_the_method_that_it_names_and_no_other(tmp_path):
    code = f"""
import json, sys
from raafl.commands.cli import main
argv = ["simulate", "--config", "quickstart", "--max_updates", "2", "--progress", "quiet", "--output", {str(tmp_path / "run")!r}]
assert main(argv) == 0
print(json.dumps([name for name in sys.modules if name.startswith("raafl.algorithms.")]))
"""
    assert run(code) == ["raafl.algorithms.fed_raa"]


STAGES = """
import gc, json, sys
from raafl.lean_import import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import torch
    from torch import nn
    before, found = set(sys.modules), {}

    def note(stage, *names):
        found[stage] = [name for name in names if name in set(sys.modules) - before]

    from raafl.submodel import Spec, Submodels, skeleton

    class Declared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def submodel_axes(self):
            norm = [(f"norm.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")]
            return {"hidden": [("fc1.weight", 0), ("fc1.bias", 0), *norm, ("fc2.weight", 1)]}

    with skeleton():
        model = Declared()
    Submodels(model).shrink(Spec.select({"hidden": [1]}), rescale=True)
    note("declared axes", "sympy", "torch.fx", "torch.utils.flop_counter", "raafl.submodel.find.discover", "lightning",
         "torch._dynamo")

    model = nn.Sequential(nn.TransformerEncoderLayer(6, 3, 5), nn.Linear(6, 2))
    Submodels(model).shrink(Spec.select({"0.heads": [0]})).module(torch.ones(2, 1, 6))
    note("torch's own transformer", "transformers", "torchvision")

    import raafl.data.federated, raafl.data.partition, raafl.devices.measure
    note("data and devices", "lightning")

    from raafl.data import SST2, Digits, Shakespeare
    Digits().setup("fit")
    optional = ("torchvision", "transformers", "tokenizers", "scipy", "datasets", "wandb", "pandas", "sklearn")
    note("digits", *optional)

    from raafl.lean_import import import_lightning
    import_lightning()
    note("lean lightning", *optional, "matplotlib")

    from model_zoo import CNN, MLP, CharLM, FastText, KeywordSpotter, ResNet, VGG11
    import model_zoo.huggingface, model_zoo.vit
    with torch.device("meta"):
        ResNet(), VGG11(), FastText(100), CharLM(), KeywordSpotter()
    note("models without transformers", *optional)
assert gc.isenabled() and gc.get_freeze_count() > 10_000
print(json.dumps(found))
"""


@pytest.mark.slow("torch and lightning are imported anew")
def test_nothing_is_imported_before_it_is_needed():
    """Stage by stage in one process, which imports without garbage collection, and ends without a word."""
    done = subprocess.run([sys.executable, "-c", STAGES], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    stages = ("declared axes", "torch's own transformer", "data and devices", "digits", "lean lightning")
    stages += ("models without transformers",)
    assert json.loads(done.stdout) == {stage: [] for stage in stages}


def collects_again():
    """Import nothing quickly, with an error, and without garbage collection; return whether there was some after each."""
    found = []
    with suppress(KeyError), quick_imports():
        raise KeyError
    found.append(gc.isenabled())
    gc.disable()
    with quick_imports():
        pass
    return [*found, gc.isenabled()]


def test_garbage_is_collected_after_quick_imports_as_before_them():
    assert in_fork(collects_again) == [True, False]


@pytest.mark.long
def test_after_a_lean_import_everything_else_imports_as_usual():
    optional = ("torchvision", "transformers", "scipy.signal", "matplotlib.pyplot")
    present = [n for n in optional if importlib.util.find_spec(n.partition(".")[0])]
    code = f"""
import gc, sys, importlib, importlib.util, json
gc.disable()
finders, find_spec = list(sys.meta_path), importlib.util.find_spec
from raafl.lean_import import import_lightning
assert import_lightning() is import_lightning() is sys.modules["lightning"]
assert importlib.util.find_spec is find_spec
assert importlib.util.find_spec("torchmetrics") is not None, "looking for it must not use it up"
for name in {present!r}:
    importlib.import_module(name)
import torchmetrics, lightning.pytorch.core.module as core
from torchmetrics.classification import MulticlassAccuracy
assert core.Metric is torchmetrics.Metric is torchmetrics.metric.Metric
assert core.MetricCollection is torchmetrics.MetricCollection
assert sys.meta_path[:1] == finders[:1], sys.meta_path
import torch
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
accuracy.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
assert issubclass(MulticlassAccuracy, core.Metric)
if {("matplotlib.pyplot" in present)!r}:
    import matplotlib
    matplotlib.use("agg")
    assert isinstance(accuracy.plot()[1], matplotlib.axes.Axes)
if {("transformers" in present)!r}:
    from model_zoo import HFSequenceClassifier
    HFSequenceClassifier(architecture={BERT!r})
    assert "peft" not in sys.modules, "a model without adapters needs none"
print(json.dumps(accuracy.compute().item()))
"""
    assert run(code) == 0.75


@pytest.mark.long
def test_a_submodule_of_torchmetrics_may_come_first_after_a_lean_import():
    assert run(
        "from raafl.lean_import import import_lightning\nimport_lightning()\n"
        "from torchmetrics.regression import MeanSquaredError\nimport torchmetrics, json\n"
        "print(json.dumps(torchmetrics.MeanSquaredError is MeanSquaredError))"
    )


@pytest.mark.long
def test_lean_import_does_nothing_when_torchmetrics_is_there_already():
    assert run(
        "import torchmetrics, sys, json\nfinders, module = list(sys.meta_path), torchmetrics\n"
        "from raafl.lean_import import import_lightning\nimport_lightning()\n"
        "print(json.dumps(sys.modules['torchmetrics'] is module and '_Resume' not in str(sys.meta_path)))"
    )


@pytest.mark.long
def test_a_lightning_that_wants_more_of_torchmetrics_is_imported_the_ordinary_way():
    assert run(
        "import raafl.lean_import as lean, json\nlean._HOME.pop('MetricCollection')\nlightning = lean.import_lightning()\n"
        "import sys, torchmetrics\nfrom lightning.pytorch.core.module import MetricCollection\n"
        "print(json.dumps(MetricCollection is torchmetrics.MetricCollection and '_Resume' not in str(sys.meta_path)))"
    )
